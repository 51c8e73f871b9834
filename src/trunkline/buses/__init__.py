"""Open a bus by its URL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trunkline.buses.local import LocalBus
from trunkline.options import BusOptions
from trunkline.store import open_store

_BUS = frozenset(BusOptions.__struct_fields__)
_LOCAL = frozenset({"on_publish", "on_message", "hooks", "draw"})


def connect(
    url: str, *, middleware: Sequence[object] = (), clock: Any = None, **options: Any
) -> LocalBus:
    """Open the bus at ``url``: ``file:<folder>`` or ``memory:``. Enter it, or ``close`` it.

    ``options`` are those of ``StoreOptions`` and ``BusOptions``.
    """
    mine = {name: options.pop(name) for name in list(options) if name in _BUS | _LOCAL}
    store = open_store(url, clock=clock, **options)
    bus = LocalBus(store, clock=clock, **mine)
    bus.use(*middleware)
    return bus
