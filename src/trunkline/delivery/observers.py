"""Observers: objects that are told what becomes of records.

A middleware that has ``on_settled`` or ``on_dead_letter`` is an observer too::

    def on_settled(self, key, offset, outcome): ...
    def on_dead_letter(self, key, record, reason, error): ...

They are called after the fact is durable, in the loop's thread, and must not block. An error of
theirs ends the subscription.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trunkline.event import Record
from trunkline.names import GroupKey

OnSettled = Callable[[GroupKey, int, str], None]
OnDeadLetter = Callable[[GroupKey, Record, str, str], None]
METHODS = ("on_settled", "on_dead_letter")


class Observers:
    """The observers of one bus."""

    def __init__(self, *observers: Any) -> None:
        self.settled: list[OnSettled] = []
        self.dead_letter: list[OnDeadLetter] = []
        self.add(*observers)

    def add(self, *observers: Any) -> None:
        for one in observers:
            if hasattr(one, "on_settled"):
                self.settled.append(one.on_settled)
            if hasattr(one, "on_dead_letter"):
                self.dead_letter.append(one.on_dead_letter)

    def tell_dead_letter(self, key: GroupKey, record: Record, reason: str, error: str) -> None:
        for tell in self.dead_letter:
            tell(key, record, reason, error)
