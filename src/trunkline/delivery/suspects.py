"""Suspects are handed out one at a time.

A suspect was in hand when its process ended: it may be what ended the process. Several of them at
once would all be counted if one of them does so again. One at a time, a record that ends its
process reaches the dead letters alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from trunkline.bus import Delivery


class Holder(Protocol):
    """An inbox: ``open`` has every delivery of it that is not finished."""

    @property
    def open(self) -> Mapping[Delivery, object]: ...


class SuspectSlot:
    """The place for one suspect of a process, or of a client behind a broker."""

    __slots__ = ("_delivery", "_holder", "_waiting")

    def __init__(self) -> None:
        self._delivery: Delivery | None = None
        self._holder: Holder | None = None
        self._waiting: set[Callable[[], None]] = set()

    @property
    def is_free(self) -> bool:
        return self._holder is None or self._delivery not in self._holder.open

    def hold(self, delivery: Delivery, holder: Holder) -> None:
        """Be taken until the delivery is finished."""
        self._delivery, self._holder = delivery, holder

    def wait(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` once, after the place was found to be free."""
        self._waiting.add(wake)

    def look(self) -> None:
        """Wake those that wait if the place is free."""
        if self._waiting and self.is_free:
            waiting, self._waiting = self._waiting, set()
            for wake in waiting:
                wake()
