"""Open a bus by its URL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from trunkline.buses.local import LocalBus
from trunkline.errors import InvalidOption
from trunkline.middleware import check
from trunkline.options import BusOptions, StoreOptions, make
from trunkline.store import check_url, open_store

_BUS = frozenset(BusOptions.__struct_fields__)
_STORE = frozenset(StoreOptions.__struct_fields__)
_LOCAL = frozenset({"on_publish", "on_message", "hooks", "draw"})


def connect(
    url: str, *, middleware: Sequence[object] = (), clock: Any = None, **options: Any
) -> LocalBus:
    """Open the bus at ``url``: ``file:<folder>``, ``memory:`` or, behind a broker, ``ws://…``.
    Enter it, or ``close`` it.

    ``options`` are those of ``StoreOptions`` and ``BusOptions``; for a broker ``token``, ``tls``
    and those of ``ClientOptions``.
    """
    _check_clock(clock)
    if check_url(url).startswith(("ws://", "wss://")):
        try:
            from trunkline.buses.remote import RemoteBus
        except ImportError as error:
            raise InvalidOption(
                f"a bus behind a broker needs {error.name}", hint="pip install 'trunkline[client]'"
            ) from None
        remote = RemoteBus(url, clock=clock, middleware=middleware, **options)
        return cast(LocalBus, remote)  # it has the same calls, and no store
    mine = {name: options.pop(name) for name in list(options) if name in _BUS | _LOCAL}
    if unknown := options.keys() - _STORE:
        raise InvalidOption(
            f"there is no option {', '.join(sorted(unknown))}",
            hint=f"known options: {', '.join(sorted(_STORE | _BUS))}",
        )
    check(middleware)  # what is wrong is refused before a folder is made
    make(BusOptions, {name: value for name, value in mine.items() if name in _BUS})
    store = open_store(url, clock=clock, **options)
    bus = LocalBus(store, clock=clock, **mine)
    if bus.options.audit:
        from trunkline.system import Audit  # it needs the bus, and few need it

        Audit(bus, bus.options.audit)
    bus.use(*middleware)
    return bus


def _check_clock(clock: Any) -> None:
    names = ("now", "monotonic", "sleep", "call_later", "boot")
    if clock is not None and not all(hasattr(clock, name) for name in names):
        raise InvalidOption(f"a clock has {', '.join(names)}", name="clock")
