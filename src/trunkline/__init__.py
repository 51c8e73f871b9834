"""One durable event bus: a log of records, and a cursor per group.

::

    async with trunkline.connect("file:.bus") as bus:
        await bus.publish("orders", {"id": 1}, key="c42")
        async with bus.subscribe("orders", group="billing") as deliveries:
            async for delivery in deliveries:
                await delivery.ack()

Importing this module imports nothing: each name brings its module when it is first used.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own would cost a command like nbs-bus its quick start
if TYPE_CHECKING:
    from typing import Any

    from trunkline.bus import (
        Bus,
        DeadLetters,
        Delivery,
        DeliveryBatch,
        GroupInfo,
        Handler,
        Subscription,
    )
    from trunkline.bus.connect import connect
    from trunkline.bus.sync import open
    from trunkline.clock import Clock, SystemClock
    from trunkline.delivery.deadletters import Letter, Redrive
    from trunkline.errors import (
        Closed,
        Conflict,
        ConnectionLost,
        Corrupt,
        Denied,
        Duplicate,
        FatalError,
        Invalid,
        InvalidEvent,
        InvalidFilter,
        InvalidName,
        InvalidOption,
        LockTimeout,
        NoBus,
        NotFound,
        OutOfRange,
        ProtocolError,
        Reject,
        Retry,
        StorageError,
        StorageFull,
        TrunklineError,
        UnsupportedFormat,
    )
    from trunkline.event import Event, Receipt, Record
    from trunkline.options import BusOptions, Flow, GroupOptions, Limits, StoreOptions, TopicOptions
    from trunkline.store import Store, open_store

__version__ = "0.1.0"

_HOME = {
    "trunkline.bus": (
        "Bus",
        "DeadLetters",
        "Delivery",
        "DeliveryBatch",
        "GroupInfo",
        "Handler",
        "Subscription",
    ),
    "trunkline.delivery.deadletters": ("Letter", "Redrive"),
    "trunkline.bus.connect": ("connect",),
    "trunkline.bus.sync": ("open",),
    "trunkline.clock": ("Clock", "SystemClock"),
    "trunkline.event": ("Event", "Receipt", "Record"),
    "trunkline.store": ("Store", "open_store"),
    "trunkline.options": (
        "BusOptions",
        "Flow",
        "GroupOptions",
        "Limits",
        "StoreOptions",
        "TopicOptions",
    ),
    "trunkline.errors": (
        "TrunklineError",
        "Invalid",
        "InvalidEvent",
        "InvalidFilter",
        "InvalidName",
        "InvalidOption",
        "NoBus",
        "NotFound",
        "OutOfRange",
        "Conflict",
        "Duplicate",
        "StorageError",
        "Corrupt",
        "StorageFull",
        "LockTimeout",
        "UnsupportedFormat",
        "Closed",
        "ConnectionLost",
        "ProtocolError",
        "Denied",
        "Retry",
        "Reject",
        "FatalError",
    ),
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "connect",
    "open",
    "Event",
    "Record",
    "Receipt",
    "Bus",
    "Delivery",
    "DeliveryBatch",
    "Subscription",
    "Handler",
    "GroupInfo",
    "DeadLetters",
    "Letter",
    "Redrive",
    "Store",
    "open_store",
    "Clock",
    "SystemClock",
    "BusOptions",
    "Flow",
    "GroupOptions",
    "Limits",
    "StoreOptions",
    "TopicOptions",
    "TrunklineError",
    "Invalid",
    "InvalidEvent",
    "InvalidFilter",
    "InvalidName",
    "InvalidOption",
    "NoBus",
    "NotFound",
    "OutOfRange",
    "Conflict",
    "Duplicate",
    "StorageError",
    "Corrupt",
    "StorageFull",
    "LockTimeout",
    "UnsupportedFormat",
    "Closed",
    "ConnectionLost",
    "ProtocolError",
    "Denied",
    "Retry",
    "Reject",
    "FatalError",
]


def __getattr__(name: str) -> Any:
    module = _MODULE.get(name)
    if module is None:
        raise AttributeError(f"module 'trunkline' has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
