"""Records that a pump has read and not handed out. They are read outside of the transaction."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence, Sized
from itertools import islice
from typing import NamedTuple

from msgspec.json import encode

from trunkline.errors import Corrupt, InvalidFilter, OutOfRange
from trunkline.event import RANK, Event, Record
from trunkline.filters import Filter
from trunkline.filters.work import Share
from trunkline.group import Group
from trunkline.names import GroupKey
from trunkline.ranges import compress
from trunkline.store import Store

READ_RECORDS = 1024
_NEVER = float("inf")
_SPARE_RECORDS = 64
_AHEAD_BYTES = 2 * 1024 * 1024  # of all pumps together
_FIRST_RECORDS = 8  # as long as the size of the records is not known


class _Batch(NamedTuple):
    """The log from ``start`` on: nothing before ``first``, then these records."""

    start: int
    first: int
    records: list[Record]


class Prefetch:
    def __init__(self, store: Store, key: GroupKey, others: Sized) -> None:
        self.records: dict[int, Record] = {}
        self.has_plenty = False  # after the last round, more was known than had room
        self.is_behind = False  # the log may hold more than was read
        self.is_damaged = False  # no record can be read behind those that can be leased
        self._store = store
        self._key = key
        self._others = others
        self._most = 0  # records to keep
        self._weight = 0  # about how many bytes a record takes
        self._batch: _Batch | None = None  # read, and not offered
        self._rest: _Batch | None = None  # of the batch, for the next transaction
        self._lost: set[int] = set()  # wanted, but no longer in the log
        self._first = 1  # the first offset of the log, as far as it was looked at

    @property
    def has_news(self) -> bool:
        """Whether the next transaction has something to offer."""
        return bool(self._batch or self._lost)

    def forget(self) -> None:
        """The group was sought or removed: an offset may be another record now."""
        self.records.clear()
        self._lost.clear()
        self._batch = self._rest = None
        self._first, self.is_behind = 1, True

    # -- reading ---------------------------------------------------------------------------------

    async def fill(self, group: Group, room: int, told: bool) -> bool:
        """Read the records that the group may lease next; False if there was no need to look."""
        topic, partition, _ = self._key
        self._measure(room, group.schedule.items)
        if strays := group.wanted():
            await self.fetch(strays)
            self._lost.update(offset for offset in strays if offset not in self.records)
        schedule = group.schedule
        if group.scheduled or schedule.wants() <= 0:  # some records may have been purged
            self._first = (await self._store.bounds(topic, partition)).first
        if self._batch or self.has_enough(group, room):
            return False
        limit = min(schedule.wants(), READ_RECORDS, max(room, self._most - len(self.records), 1))
        self.is_damaged = False
        start = schedule.next_gap()
        try:
            found, end = await self._store.read(topic, partition, start, limit), start
            if told and not found:  # the last records may have been compacted away
                _, end = await self._store.bounds(topic, partition)
                if end > start:
                    found = await self._store.read(topic, partition, start, limit)
        except OutOfRange as error:
            self._batch = _Batch(start, error.first, [])
        except Corrupt:
            self.is_damaged = schedule.available() > 0  # records before the damage come first
            if not self.is_damaged:
                raise
        else:
            if found:
                self._batch = _Batch(start, start, found)
                self._weigh(found)
            elif end > start:
                self._batch = _Batch(start, end, [])
        return True

    async def look(self, group: Group) -> None:
        """See whether the log holds more than was read."""
        _, end = await self._store.bounds(self._key.topic, self._key.partition)
        self.is_behind = group.schedule.next_gap() < end

    def has_enough(self, group: Group, room: int) -> bool:
        """Whether reading can wait. A record outside of the window cannot come first, however
        high its priority: the window is kept well filled, or filled when there is room.
        """
        schedule = group.schedule
        wants, available = schedule.wants(), schedule.available()
        if group.ledger.paused or wants <= 0:
            return True
        filled = 4 * wants < group.options.lookahead or self._is_ample
        if not filled and available < _SPARE_RECORDS:
            return False
        return available >= room if filled else room <= 0

    def count(self, group: Group | None) -> None:
        """Note after a round whether more is known than has room."""
        available = group.schedule.available() if group is not None else 0
        self.has_plenty = (available > 0 and self._is_ample) or available >= _SPARE_RECORDS

    async def fetch(self, offsets: Iterable[int]) -> None:
        """Read those of ``offsets`` that are not here. The log may no longer have some."""
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

    # -- in the transaction ----------------------------------------------------------------------

    def offer(self, group: Group, now: float, wall: float, wanted: Filter | None) -> bool:
        """Offer the records that were read. True if there is more to read at once."""
        schedule, batch, share = group.schedule, self._batch, Share()
        self._rest = None
        more = batch is not None
        refused: list[int] = []
        if batch is not None:
            group.begin_anew()
            if batch.start == schedule.next_gap():  # else it was read for an older state
                schedule.read_to = batch.start
                if batch.first != batch.start:
                    _skip_to(group, batch.first)
                for index, record in enumerate(batch.records, 1):
                    if record.offset != schedule.read_to:
                        _skip_to(group, record.offset)
                    try:
                        self._offer(group, record, now, wall, wanted, refused)
                    except InvalidFilter:
                        if not schedule.available():
                            raise
                        self.is_damaged, more = True, False
                        break  # the records before it come first
                    if wanted is not None and share.is_spent():  # others have their turn
                        at = record.offset + 1
                        self._rest = _Batch(at, at, batch.records[index:])
                        break
        for offset in group.wanted():
            stray = self.records.get(offset)
            if stray is not None:
                self._offer(group, stray, now, wall, wanted, refused)
            elif offset not in self._lost:  # it came due, or was redriven, since the last look
                more = True
        if refused:
            group.settle(refused, filtered=True)
        if self._first > group.ledger.floor + 1:
            group.trim(self._first)
        if self._lost:
            group.settle(self._lost)
            more = True
        return more

    def done(self) -> None:
        """The transaction was committed."""
        self._batch, self._rest = self._rest, None
        if self._batch is not None and not self._batch.records:
            self._batch = None
        if self._lost:
            self._lost.clear()

    def _offer(
        self,
        group: Group,
        record: Record,
        now: float,
        wall: float,
        wanted: Filter | None,
        refused: list[int],
    ) -> None:
        event, offset = record.event, record.offset
        if wanted is not None and not _is_wanted(wanted, event):
            if offset == group.schedule.read_to:
                group.schedule.read_to = offset + 1
            refused.append(offset)
            return
        due = event.not_before.timestamp() if event.not_before is not None else 0.0
        expires = _NEVER
        if event.ttl_s is not None and offset not in group.ledger.redriven:
            expires = event.ts.timestamp() + event.ttl_s  # a redriven record does not expire
        schedule = group.schedule
        schedule.offer(offset, event.key, RANK[event.priority], due, expires, now, wall)
        if len(self.records) < self._most and offset in schedule.items:
            self.records[offset] = record  # else it is read again when it is leased

    # -- how much --------------------------------------------------------------------------------

    def _measure(self, room: int, window: Collection[int]) -> None:
        """Decide how many records to keep, and let go of the rest: others settled some of them,
        or there are more groups.
        """
        all_of_it = self._weight * max(1, len(self._others))
        self._most = max(room, _AHEAD_BYTES // all_of_it if all_of_it else _FIRST_RECORDS, 1)
        if len(self.records) > 2 * min(self._most, len(window) + READ_RECORDS):
            kept = (entry for entry in self.records.items() if entry[0] in window)
            self.records = dict(islice(kept, self._most))

    @property
    def _is_ample(self) -> bool:
        """Whether so much is kept that reading more is not worth a look at the log."""
        return 2 * len(self.records) >= self._most

    def _weigh(self, found: Sequence[Record]) -> None:
        """Learn how large records are. A record that comes alone is handed out at once, so it is
        not weighed: nothing is kept then.
        """
        if self.records or len(found) >= _SPARE_RECORDS or not self._weight:
            sample = found[:: 1 + len(found) // 8]
            self._weight = sum(len(encode(record.event)) for record in sample) // len(sample)


def _is_wanted(wanted: Filter, event: Event) -> bool:
    try:
        return bool(wanted(event))
    except Exception as error:
        raise InvalidFilter(f"the filter failed on event {event.id}: {error!r}") from error


def _skip_to(group: Group, offset: int) -> None:
    """The log holds no record between the last one that was read and ``offset``."""
    schedule = group.schedule
    if offset > schedule.read_to:
        group.skip(schedule.read_to, offset - 1)
        schedule.read_to = offset
