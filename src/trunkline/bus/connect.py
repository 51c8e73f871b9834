"""Open a bus by its URL."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

from trunkline.bus import Bus
from trunkline.bus.local import LocalBus
from trunkline.clock import Clock
from trunkline.errors import InvalidOption
from trunkline.explain import nearest
from trunkline.middleware import check
from trunkline.options import BusOptions, ConnectFields, make
from trunkline.store import check_url, open_store, options_for

if TYPE_CHECKING:
    from ssl import SSLContext

    from trunkline.bus.app import OnPublish

_BUS = frozenset(BusOptions.__struct_fields__)


class _Remote(NamedTuple):
    """A bus outside of this process. ``opener`` is a class or function of ``module`` that takes the
    URL, ``token``, ``tls``, ``clock``, ``middleware`` and options by name, and returns a ``Bus``.
    """

    module: str
    opener: str
    extra: str
    about: str


_WS = _Remote("trunkline.bus.remote", "RemoteBus", "client", "a bus behind a broker")
_NATS = _Remote("trunkline.bus.nats", "NatsBus", "nats", "a bus on NATS JetStream")
REMOTE = {"ws": _WS, "wss": _WS, "nats": _NATS, "nats+tls": _NATS}


def url_of(url: str | None) -> str:
    """The URL, else that of ``TRUNKLINE_URL`` or ``BUS_URL``, else ``file:.bus``."""
    if url is not None:
        return url
    named = (os.environ.get("TRUNKLINE_URL"), os.environ.get("BUS_URL"))
    return next(filter(None, named), "file:.bus")


def connect(
    url: str | None = None,
    *,
    middleware: Sequence[object] = (),
    clock: Clock | None = None,
    token: str | None = None,
    tls: SSLContext | None = None,
    on_publish: OnPublish | None = None,
    on_message: OnPublish | None = None,
    draw: Callable[[], float] | None = None,
    **options: Unpack[ConnectFields],
) -> Bus:
    """Open the bus at ``url``. Enter it, or ``close`` it.

    =========================  ==================================  ====================
    URL                        bus                                 options
    =========================  ==================================  ====================
    ``file:<folder>``          a folder that processes share       ``StoreOptions``
    ``memory:``                this process alone                  ``StoreOptions``
    ``mongodb://``             a MongoDB replica set               ``MongoOptions``
    ``ws://`` ``wss://``       a broker, with ``token`` and ``tls``  ``ClientOptions``
    ``nats://`` ``nats+tls://``  NATS JetStream                    its own
    =========================  ==================================  ====================

    ``BusOptions`` are options of every bus. Without ``url`` the environment says which:
    ``TRUNKLINE_URL``, else ``BUS_URL``, else ``file:.bus``.
    """
    _check_clock(clock)
    url = url_of(url)
    far = REMOTE.get(check_url(url).partition(":")[0])
    if far is None:
        if token is not None or tls is not None:
            name = "token" if token is not None else "tls"
            raise InvalidOption(f"{name} is an option of a bus behind a broker", name=name)
        return open_local(
            url,
            middleware=middleware,
            clock=clock,
            on_publish=on_publish,
            on_message=on_message,
            draw=draw,
            **options,
        )
    if draw is not None:
        raise InvalidOption("draw is an option of a bus in this process", name="draw")
    try:
        opener: Callable[..., Bus] = getattr(import_module(far.module), far.opener)
    except ModuleNotFoundError as error:
        raise InvalidOption(
            f"{far.about} needs {error.name}", hint=f"pip install 'trunkline[{far.extra}]'"
        ) from None
    return opener(
        url,
        token=token,
        tls=tls,
        clock=clock,
        middleware=middleware,
        on_publish=on_publish,
        on_message=on_message,
        **options,
    )


def open_local(
    url: str,
    *,
    middleware: Sequence[object] = (),
    clock: Clock | None = None,
    on_publish: OnPublish | None = None,
    on_message: OnPublish | None = None,
    draw: Callable[[], float] | None = None,
    **options: Unpack[ConnectFields],
) -> LocalBus:
    """The bus of a store, with its pumps in this process. ``connect`` opens those of any URL."""
    given: dict[str, Any] = {**options}
    mine = {name: given.pop(name) for name in _BUS if name in given}
    known = frozenset(options_for(url).__struct_fields__)
    if unknown := given.keys() - known:
        guess = nearest(min(unknown), known | _BUS)
        raise InvalidOption(
            f"there is no option {', '.join(sorted(unknown))}",
            hint=f"did you mean {guess}?"
            if guess
            else f"known options: {', '.join(sorted(known | _BUS))}",
        )
    check(middleware)  # a wrong argument is refused before a folder is made
    make(BusOptions, mine)
    store = open_store(url, clock=clock, **given)
    bus = LocalBus(
        store,
        clock=clock,
        on_publish=on_publish,
        on_message=on_message,
        draw=draw or random.random,
        **mine,
    )
    if bus.options.audit:
        from trunkline.patterns.audit import Audit  # it needs the bus, and few need it

        Audit(bus, bus.options.audit)
    bus.use(*middleware)
    return bus


def _check_clock(clock: Any) -> None:
    names = ("now", "monotonic", "sleep", "call_later", "boot")
    if clock is not None and not all(hasattr(clock, name) for name in names):
        raise InvalidOption(f"a clock has {', '.join(names)}", name="clock")
