"""One batcher: items that come close together are handed on together.

The items of one turn of the loop make a batch. A batch that may wait ends later, one that is full
ends at once. A batch that ends when the one before it is written is ``store.committer``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
_NEVER = float("inf")


class _Handle(Protocol):
    def cancel(self) -> object: ...


Later = Callable[[float, Callable[[], object]], _Handle]


class Batcher(Generic[T]):
    """Calls ``write`` with the items of each batch, and their size in all.

    ``count_max`` and ``size_max`` end a batch at once. An item that would make a batch larger than
    ``size_max`` begins the next one. ``call_later`` is a clock's, for batches that wait.
    """

    __slots__ = ("_call_later", "_count_max", "_items", "_planned", "_size", "_size_max", "_write")

    def __init__(
        self,
        write: Callable[[list[T], int], object],
        *,
        count_max: float = _NEVER,
        size_max: float = _NEVER,
        call_later: Later | None = None,
    ) -> None:
        self._write = write
        self._count_max = count_max
        self._size_max = size_max
        self._call_later = call_later
        self._items: list[T] = []
        self._size = 0
        self._planned: tuple[float, _Handle] | None = None  # how long it waits, and the timer

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: T, size: int = 0, wait_s: float = 0.0) -> None:
        """Put an item into the batch, which ends ``wait_s`` from now at the latest."""
        items, total = self._items, self._size + size
        if items and total > self._size_max:
            self.flush()
            items, total = self._items, size
        items.append(item)
        self._size = total
        if len(items) >= self._count_max or total >= self._size_max:
            self.flush()
        elif self._planned is None or wait_s < self._planned[0]:
            self.plan(wait_s)

    def plan(self, wait_s: float = 0.0) -> None:
        """End the batch ``wait_s`` from now at the latest, also without an item: at the end of
        this turn of the loop if that is 0.
        """
        if self._planned is not None and self._planned[0] <= wait_s:
            return
        self._unplan()
        loop = asyncio.get_running_loop()
        if wait_s == 0:
            self._planned = (0.0, loop.call_soon(self.flush))
        else:
            later = self._call_later or loop.call_later
            self._planned = (wait_s, later(wait_s, self.flush))

    def flush(self) -> None:
        """End the batch now. Nothing is written if there is no item and none was planned for."""
        planned = self._unplan()
        if self._items or planned:
            items, self._items = self._items, []
            size, self._size = self._size, 0
            self._write(items, size)

    def _unplan(self) -> bool:
        planned, self._planned = self._planned, None
        if planned is not None:
            planned[1].cancel()
        return planned is not None

    def limit(self, size_max: float) -> None:
        """Let the batches from now on be no larger."""
        self._size_max = size_max

    def remove(self, item: T, size: int = 0) -> None:
        """Take an item back out of the batch, if it is still there."""
        if item in self._items:
            self._items.remove(item)
            self._size -= size

    def clear(self) -> list[T]:
        """Take every item back out of the batch, and return them."""
        items, self._items = self._items, []
        self._size = 0
        self._unplan()
        return items
