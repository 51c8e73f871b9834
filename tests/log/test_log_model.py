"""The log against a dictionary: whatever is done to its files, readers see what the model holds."""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kit.log_events import TOPIC, at, event, payloads, put
from trunkline.errors import OutOfRange
from trunkline.folder import Folder, upkeep
from trunkline.options import StoreOptions, TopicOptions
from trunkline.testing.clock import ManualClock

_key = st.sampled_from([None, "a", "b"])
_record = st.tuples(_key, st.integers(0, 9), st.sampled_from([5, 400]))
_op = st.one_of(
    st.tuples(st.just("append"), st.lists(_record, min_size=1, max_size=4)),
    st.tuples(st.just("append"), st.lists(_record, min_size=1, max_size=4)),
    st.tuples(st.just("trim"), st.integers(1, 12)),
    st.tuples(st.just("compact"), st.none()),
    st.tuples(st.just("pack"), st.none()),
    st.tuples(st.just("reopen"), st.none()),
    st.tuples(st.just("lose the head"), st.none()),
    st.tuples(st.just("lose the index"), st.none()),
)


class Twin:
    """A folder and what it should hold."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.clock = ManualClock()
        self.writer = self.open()
        self.reader = self.open()  # keeps what it knows of the files over all that happens
        self.writer.define(TOPIC, TopicOptions(segment_records=3, retain_unsettled=False))
        self.records: dict[int, tuple[str | None, int, Any]] = {}
        self.start = self.next = 1
        self.in_segment = 0

    def open(self) -> Folder:
        return Folder(self.root, StoreOptions(reserve_bytes=0, index_bytes=1024), self.clock)

    def run(self, name: str, value: Any) -> None:
        match name:
            case "append":
                self.append(value)
            case "trim":
                before = min(value, self.next)
                upkeep.trim(self.writer, TOPIC, 0, value)
                if before > self.start:
                    self.start = before
                    if before == self.next:
                        self.in_segment = 0
                self.records = {o: r for o, r in self.records.items() if o >= self.start}
            case "compact":
                self.compact()
            case "pack":
                upkeep.pack_segments(self.writer, TOPIC, 0)
            case "reopen":
                self.writer.close()
                self.writer = self.open()
            case "lose the head" if self.start == 1:
                self.writer.close()
                shutil.rmtree(f"{self.root}/wal/t.head", ignore_errors=True)
                if os.path.exists(f"{self.root}/wal/t.head"):
                    os.unlink(f"{self.root}/wal/t.head")
                self.writer = self.open()
                self.writer.writer(TOPIC, 0).begin()
                self.writer.writer(TOPIC, 0).end()
                self.in_segment = self.writer.head(TOPIC, 0).records
            case "lose the index":
                for file in os.listdir(f"{self.root}/wal"):
                    if file.endswith(".index"):
                        os.truncate(f"{self.root}/wal/{file}", 7)

    def append(self, batch: list[tuple[str | None, int, int]]) -> None:
        events = [event("x" * size, key=key, ts=ts) for key, ts, size in batch]
        offsets = put(self.writer, *events).offsets()
        assert offsets == list(range(self.next, self.next + len(batch)))
        self.in_segment = self.in_segment if self.in_segment < 3 else 0
        self.in_segment += len(batch)
        for offset, (key, ts, size) in zip(offsets, batch, strict=True):
            self.records[offset] = (key, ts, "x" * size)
        self.next += len(batch)

    def compact(self) -> None:
        upkeep.compact(self.writer, TOPIC, 0)
        self.writer.forget(TOPIC, 0)
        self.reader.forget(TOPIC, 0)
        finished = self.next - self.in_segment
        latest = {key: o for o, (key, _, _) in self.records.items() if key is not None}
        self.records = {
            offset: record
            for offset, record in self.records.items()
            if record[0] is None or latest[record[0]] == offset or offset >= finished
        }

    def check(self) -> None:
        want = {offset: record[2] for offset, record in self.records.items()}
        for folder in (self.writer, self.reader):
            assert payloads(folder) == want
            assert folder.bounds(TOPIC, 0) == (self.start, self.next)
            for start in range(self.start, self.next + 1):
                found = folder.read(TOPIC, 0, start, 1)
                assert [r.offset for r in found] == [o for o in sorted(want) if o >= start][:1]
            for second in (0, 3, 5, 9, 10):
                matching = [o for o, (_, ts, _) in sorted(self.records.items()) if ts >= second]
                assert folder.seek(TOPIC, 0, at(second)) == next(iter(matching), self.next)
            if self.start > 1:
                with pytest.raises(OutOfRange):
                    folder.read(TOPIC, 0, self.start - 1, 1)
        assert not list(upkeep.verify(self.writer, TOPIC, 0))


def check_story(ops: list[tuple[str, Any]]) -> None:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    place = tempfile.mkdtemp(prefix="trunkline-", dir=memory)
    twin = Twin(os.path.join(place, "bus"))
    try:
        for name, value in ops:
            twin.run(name, value)
            twin.check()
    finally:
        twin.writer.close()
        twin.reader.close()
        shutil.rmtree(place)


_QUICK = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))


@_QUICK
@given(st.lists(_op, min_size=3, max_size=12))
def test_the_log_holds_what_the_model_holds(ops: list[tuple[str, Any]]) -> None:
    check_story(ops)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(_QUICK, max_examples=2000)
@given(st.lists(_op, min_size=3, max_size=25))
def test_the_log_holds_what_the_model_holds_at_length(ops: list[tuple[str, Any]]) -> None:
    check_story(ops)
