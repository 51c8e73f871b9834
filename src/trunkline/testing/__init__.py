"""What a test needs, shipped: a clock that stands still, and one conformance suite per plug.

Importing this imports nothing; each name brings its module when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trunkline.testing.bus_contract import BusContract
    from trunkline.testing.clock import ManualClock, PassingClock
    from trunkline.testing.group_contract import GroupContract
    from trunkline.testing.handler_contract import HandlerContract
    from trunkline.testing.store_contract import StoreContract

_HOME = {
    "ManualClock": "clock",
    "PassingClock": "clock",
    "StoreContract": "store_contract",
    "BusContract": "bus_contract",
    "GroupContract": "group_contract",
    "HandlerContract": "handler_contract",
}

__all__ = [
    "ManualClock",
    "PassingClock",
    "StoreContract",
    "BusContract",
    "HandlerContract",
    "GroupContract",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
    return value
