"""The records that a pump keeps: read ahead of being handed out, or read again when due."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Sized
from itertools import islice

from msgspec.json import encode

from trunkline.errors import OutOfRange
from trunkline.event import Record
from trunkline.ranges import compress
from trunkline.store import GroupKey, Store

READ_RECORDS = 1024
_AHEAD_BYTES = 2 * 1024 * 1024  # of all pumps together
_FIRST_RECORDS = 8  # as long as it is not known how large they are


class Stock:
    def __init__(self, store: Store, key: GroupKey, others: Sized) -> None:
        self.records: dict[int, Record] = {}
        self._store = store
        self._key = key
        self._others = others
        self._most = 0  # to be kept
        self._weight = 0  # about how many bytes one of them takes

    def measure(self, room: int, window: Collection[int]) -> None:
        """Settle how many may be kept, and let go of what is too much: others settled some of
        them, or there are more groups.
        """
        all_of_it = self._weight * max(1, len(self._others))
        self._most = max(room, _AHEAD_BYTES // all_of_it if all_of_it else _FIRST_RECORDS, 1)
        if len(self.records) > 2 * min(self._most, len(window) + READ_RECORDS):
            kept = (entry for entry in self.records.items() if entry[0] in window)
            self.records = dict(islice(kept, self._most))

    @property
    def room(self) -> int:
        return self._most - len(self.records)

    @property
    def is_ample(self) -> bool:
        """Whether so much is kept that reading more is not worth a look at the log."""
        return 2 * len(self.records) >= self._most

    def keep(self, record: Record) -> None:
        """Keep one if there is room; else it is read again when it is due."""
        if len(self.records) < self._most:
            self.records[record.offset] = record

    def weigh(self, found: Sequence[Record], worth: int) -> None:
        """Learn how large records are. Not from one that comes alone and goes at once, but from
        ``worth`` of them on: then there is nothing to keep.
        """
        if self.records or len(found) >= worth or not self._weight:
            sample = found[:: 1 + len(found) // 8]
            self._weight = sum(len(encode(record.event)) for record in sample) // len(sample)

    async def fetch(self, offsets: Iterable[int]) -> None:
        """Read those of ``offsets`` that are not here; the log may no longer have some."""
        missing = [offset for offset in offsets if offset not in self.records]
        topic, partition, _ = self._key
        for first, last in compress(missing):
            while first <= last:
                limit = min(last - first + 1, READ_RECORDS)
                try:
                    found = await self._store.read(topic, partition, first, limit)
                except OutOfRange as error:
                    first = max(first + 1, error.first)
                    continue
                if not found:
                    break
                self.records.update((r.offset, r) for r in found if r.offset <= last)
                first = found[-1].offset + 1
