"""Reading spans of the log as Arrow: just what its own reader gives, whatever it went through."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

pytest.importorskip("pyarrow")

from trunkline.codec import encode_event
from trunkline.errors import Corrupt, OutOfRange
from trunkline.event import Event
from trunkline.folder import Folder, upkeep
from trunkline.folder.repair import salvage
from trunkline.log.extents import list_extents
from trunkline.options import MIB, Limits, StoreOptions, TopicOptions
from trunkline.spark.source import scan as scanning
from trunkline.spark.source.catalogs import FolderCatalog as Catalog
from trunkline.spark.source.columns import COLUMNS, CORRUPT
from trunkline.spark.source.plan import admit_bytes, admit_rows, divide
from trunkline.spark.source.scan import OffsetRange, ScanOptions, scan

from .logs import (
    TOPIC,
    append,
    as_row,
    decoded,
    make_event,
    make_log,
    read_log,
)

NAMES = tuple(COLUMNS)


def rows(
    root: str, start: int | None = None, end: int | None = None, partition: int = 0, **options: Any
) -> list[dict[str, Any]]:
    catalog = Catalog(root)
    head = catalog.reader(TOPIC, partition).head()
    catalog.close()
    span = OffsetRange(TOPIC, partition, start or head.start, end or head.next)
    return scanned(root, span, **options)


def scanned(root: str, span: OffsetRange, **options: Any) -> list[dict[str, Any]]:
    chosen = ScanOptions(**{"root": root, "names": NAMES, **options})
    return [row for batch in scan(span, chosen) for row in batch.to_pylist()]


def both_engines(root: str, **where: Any) -> list[dict[str, Any]]:
    """The rows by msgspec, which must be the rows by DuckDB."""
    little = [decoded(row) for row in rows(root, **where)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scanning, "SMALL", -1)
        much = [decoded(row) for row in rows(root, **where)]
    assert much == little
    return little


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
payloads = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
times = st.datetimes(
    datetime(1990, 1, 1),  # noqa: DTZ001
    datetime(2090, 1, 1),  # noqa: DTZ001
    timezones=st.just(UTC),
) | st.just(datetime(2026, 5, 4, 3, 2, 1, 7, tzinfo=timezone(timedelta(hours=2))))
events = st.builds(
    Event,
    id=st.text("abc0", min_size=1, max_size=5),
    ts=times,
    topic=st.just(TOPIC),
    type=st.none() | texts,
    key=st.none() | st.sampled_from(["a", "b", "payload"]),
    actor=st.none() | texts,
    ttl_s=st.none() | st.floats(0, 1e9),
    priority=st.sampled_from(["critical", "normal", "low"]),
    band=st.sampled_from(["GREEN", "RED"]),
    not_before=st.none() | times,
    caps=st.lists(texts, max_size=2).map(tuple),
    headers=st.dictionaries(st.sampled_from(["payload", "x", 'q"},']), texts, max_size=2),
    payload=payloads,
)
steps = st.lists(
    st.tuples(st.sampled_from([0, 1]), st.lists(events, min_size=1, max_size=6))
    | st.sampled_from(["roll", "compact", "pack", "trim", "torn"]),
    min_size=1,
    max_size=10,
)


def take(folder: Folder, step: Any) -> None:
    if isinstance(step, tuple):
        append(folder, step[1], step[0])
        return
    for partition in (0, 1):
        writer = folder.writer(TOPIC, partition)
        if step == "roll":
            head = writer.begin()
            try:
                writer.roll(head)
            finally:
                writer.end()
        elif step == "compact":
            upkeep.compact(folder, TOPIC, partition)
        elif step == "pack":
            upkeep.pack_segments(folder, TOPIC, partition)
        elif step == "trim":
            first, end = folder.bounds(TOPIC, partition)
            upkeep.trim(folder, TOPIC, partition, first + (end - first) // 3)
        folder.forget(TOPIC, partition)


def tear(root: str) -> None:
    """What a writer that died in the middle of a batch leaves behind."""
    for name in sorted(os.listdir(f"{root}/wal")):
        if name.endswith(".jsonl") and not has_seal(f"{root}/wal/{name}"):
            with open(f"{root}/wal/{name}", "ab") as file:
                file.write(b'{"offset":99999,"meta":{"event_id":"torn')


def has_seal(path: str) -> bool:
    with open(path, "rb") as file:
        return b'{"seal":' in file.read()[-400:]


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(story=steps)
def test_the_table_is_what_the_log_reads(story: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as root:
        folder = Folder(root, StoreOptions(index_bytes=1024, reserve_bytes=0))
        folder.define(TOPIC, TopicOptions(partitions=2))
        append(folder, [make_event(0)], 0)
        append(folder, [make_event(1)], 1)
        for step in story:
            for partition in (0, 1):
                rows(root, partition=partition)  # whoever read before sees no less after
            take(folder, step)
        folder.close()
        expected = [[as_row(r) for r in read_log(root, TOPIC, p)] for p in (0, 1)]
        if "torn" in story:
            tear(root)

        assert [both_engines(root, partition=p) for p in (0, 1)] == expected


@settings(max_examples=15, deadline=None, phases=[Phase.generate])
@given(
    cuts=st.lists(st.integers(1, 60), min_size=2, max_size=2).map(sorted),
    tasks=st.integers(1, 9),
)
def test_tasks_divide_a_range_without_gap_or_overlap(cuts: list[int], tasks: int) -> None:
    with tempfile.TemporaryDirectory() as root:
        folder = Folder(root, StoreOptions(index_bytes=1024, reserve_bytes=0))
        folder.define(TOPIC, TopicOptions(segment_records=15))
        for start in range(0, 60, 4):
            append(folder, [make_event(n) for n in range(start, start + 4)])
        folder.close()
        catalog = Catalog(root)

        parts = divide(catalog, [OffsetRange(TOPIC, 0, *cuts)], tasks, exact=True)

        spans = [span for part in parts for span in part]
        assert [n for span in spans for n in range(span.start, span.end)] == list(range(*cuts))
        assert len(parts) <= tasks + 4
        found = [row["offset"] for span in spans for row in rows(root, span.start, span.end)]
        assert found == list(range(*cuts))
        catalog.close()


@pytest.mark.parametrize("tasks", [1, 2, 4])
def test_tasks_take_whole_segments_if_that_is_about_as_even(tmp_path: Path, tasks: int) -> None:
    folder = Folder(str(tmp_path), StoreOptions(index_bytes=1024, reserve_bytes=0))
    folder.define(TOPIC, TopicOptions(partitions=4, segment_records=40))
    for partition in range(4):
        note = "x" * (300 + partition)  # so that no two are of one size
        append(folder, [make_event(n, payload=note) for n in range(40)], partition)
        append(folder, [make_event(n, payload=note) for n in range(40, 80)], partition)
    folder.close()
    catalog = Catalog(str(tmp_path))
    extents = [(e.first, e.after) for p in range(4) for e in catalog.extents(TOPIC, p)]

    parts = divide(catalog, [OffsetRange(TOPIC, p, 1, 81) for p in range(4)], tasks, exact=True)

    assert [(s.start, s.end) for part in parts for s in part] == extents
    assert [len(part) for part in parts] == [8 // tasks] * tasks
    catalog.close()


def test_a_task_is_not_full_before_the_short_end_of_its_partition(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path), StoreOptions(index_bytes=1024, reserve_bytes=0))
    folder.define(TOPIC, TopicOptions(partitions=4, segment_records=40))
    for partition in range(4):
        for start, end in ((0, 40), (40, 80), (80, 100)):
            append(folder, [make_event(n, payload="x" * 300) for n in range(start, end)], partition)
    folder.close()
    catalog = Catalog(str(tmp_path))

    parts = divide(catalog, [OffsetRange(TOPIC, p, 1, 101) for p in range(4)], 2, exact=True)

    assert [{span.partition for span in part} for part in parts] == [{0, 1}, {2, 3}]
    catalog.close()


def test_a_line_longer_than_what_is_read_at_a_time(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path), StoreOptions(reserve_bytes=0))
    folder.define(TOPIC, TopicOptions(segment_records=3))
    large = Limits(record_bytes=32 * MIB)
    for start in (0, 3):
        events = [make_event(n) for n in range(start, start + 3)]
        events[1] = make_event(start + 1, payload="x" * (12 * MIB))
        folder.append(TOPIC, 0, [encode_event(event, large) for event in events], events)
    folder.close()

    found = rows(str(tmp_path), 1, 7)

    assert [row["offset"] for row in found] == list(range(1, 7))
    assert [len(row["value"]) for row in found] == [7, 12 * MIB + 2, 7] * 2


def test_a_reader_stops_at_the_head_even_if_the_file_is_longer(tmp_path: Path) -> None:
    root = make_log(tmp_path, 10)
    tear(root)

    assert [row["offset"] for row in rows(root)] == list(range(1, 11))


def flip(path: str, text: bytes) -> int:
    """Damage one byte of the first line that holds ``text``; returns the line's position."""
    with open(path, "r+b") as file:
        data = file.read()
        at = data.index(text)
        file.seek(at)
        file.write(bytes([data[at] ^ 1]))
    return data.rfind(b"\n", 0, at) + 1


def test_a_damaged_record_fails_the_read_and_is_named(tmp_path: Path) -> None:
    root = make_log(tmp_path, 30)
    position = flip(f"{root}/wal/orders.00000001.jsonl", b'"event_id":"e12"')

    with pytest.raises(Corrupt, match=rf"orders\.00000001\.jsonl is damaged at byte {position}"):
        rows(root)


def test_a_damaged_record_goes_to_its_own_column_if_asked(tmp_path: Path) -> None:
    root = make_log(tmp_path, 30)
    flip(f"{root}/wal/orders.00000001.jsonl", b'"event_id":"e12"')

    found = rows(root, names=("offset", "id", CORRUPT), bad_records="column")

    bad = [row for row in found if row[CORRUPT]]
    assert [(row["offset"], row["id"]) for row in bad] == [(13, None)]
    assert bad[0][CORRUPT].startswith('{"offset":13,')
    assert sorted(row["offset"] for row in found) == list(range(1, 31))
    assert len(rows(root, bad_records="skip")) == 29


def test_a_record_cut_out_of_a_file_is_missed(tmp_path: Path) -> None:
    root = make_log(tmp_path, 30)
    path = Path(f"{root}/wal/orders.00000001.jsonl")
    lines = path.read_bytes().split(b"\n")
    # Another line of the same length keeps the file as long as it was.
    lines[12] = lines[11]
    path.write_bytes(b"\n".join(lines))

    with pytest.raises(Corrupt):
        rows(root, 13, 14)


def test_a_quarantined_segment_is_reported_not_passed_over(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    folder.define(TOPIC, TopicOptions(segment_records=10))
    for start in range(0, 30, 10):
        append(folder, [make_event(n) for n in range(start, start + 10)])
    folder.close()
    path = tmp_path / "wal" / "orders.00000002.jsonl"
    path.rename(f"{path}.corrupt")

    with pytest.raises(Corrupt, match="offsets 11 to 20 of orders/0 are in no readable file"):
        rows(str(tmp_path))
    found = rows(str(tmp_path), names=("offset", CORRUPT), bad_records="column")
    assert [row["offset"] for row in found] == [*range(1, 12), *range(21, 31)]
    assert "orders.00000002.jsonl.corrupt" in found[10][CORRUPT]


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_file_behind_a_compacted_one_is_not_passed_over(tmp_path: Path, is_gone: bool) -> None:
    folder = Folder(str(tmp_path))
    folder.define(TOPIC, TopicOptions(segment_records=2))
    for number, key in enumerate("aabcdef"):
        append(folder, [make_event(number, key=key)])
    upkeep.compact(folder, TOPIC, 0)
    path = tmp_path / "wal" / "orders.00000002.jsonl"
    path.unlink() if is_gone else path.write_bytes(b"")

    with pytest.raises(Corrupt, match="offsets 3 to 4 of orders/0 are in no readable file"):
        rows(str(tmp_path))
    salvage(folder, TOPIC, 0)
    assert [row["offset"] for row in rows(str(tmp_path))] == [2, 5, 6, 7]
    folder.close()


def test_what_retention_removed_fails_or_is_passed_over_by_option(tmp_path: Path) -> None:
    root = make_log(tmp_path, 30)
    folder = Folder(root)
    upkeep.trim(folder, TOPIC, 0, 11)
    folder.close()

    with pytest.raises(OutOfRange, match="has offsets 11 to 30, not 5"):
        rows(root, 5, 21)
    found = rows(root, 5, 21, fail_on_data_loss=False)
    assert [row["offset"] for row in found] == list(range(11, 21))


def test_a_span_means_the_same_after_its_segment_was_rewritten(tmp_path: Path) -> None:
    root = make_log(tmp_path, 40)
    folder = Folder(root)
    writer = folder.writer(TOPIC, 0)
    writer.roll(writer.begin())
    writer.end()
    before = rows(root, 11, 31)
    upkeep.pack_segments(folder, TOPIC, 0)
    folder.close()

    assert rows(root, 11, 31) == before
    assert [row["offset"] for row in before] == list(range(11, 31))


def test_the_end_of_a_log_costs_the_same_however_long_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Counter[str] = Counter()
    for name in ("listdir", "open", "stat", "fstat", "pread"):
        monkeypatch.setattr(os, name, _counted(name, getattr(os, name), asked))
    costs = []
    for segments in (2, 40):
        root = str(tmp_path / str(segments))
        folder = Folder(root, StoreOptions(reserve_bytes=0))
        folder.define(TOPIC, TopicOptions(segment_records=10))
        for start in range(0, segments * 10, 5):
            append(folder, [make_event(n) for n in range(start, start + 5)])
        folder.close()
        catalog = Catalog(root)
        for turn in range(2):  # the first one gets to know the log
            asked.clear()
            at = segments * 10 - 3 + turn
            spans = [OffsetRange(TOPIC, 0, at, at + 1)]
            assert divide(catalog, spans, 2, exact=False) == [spans]
            assert [row["offset"] for row in scanned(root, spans[0])] == [at]
        costs.append(dict(asked))
        catalog.close()

    assert costs[0] == costs[1]
    assert "listdir" not in costs[0]


def _counted(name: str, call: Callable[..., Any], calls: Counter[str]) -> Callable[..., Any]:
    def counted(*given: Any, **named: Any) -> Any:
        calls[name] += 1
        return call(*given, **named)

    return counted


def test_a_reader_that_saw_the_end_before_sees_what_became_of_it(tmp_path: Path) -> None:
    root = str(tmp_path / "bus")
    options = StoreOptions(reserve_bytes=0)
    folder = Folder(root, options)
    folder.define(TOPIC, TopicOptions(segment_records=20, compact=True))
    append(folder, [make_event(n, key=f"k{n % 3}") for n in range(10)])
    assert len(rows(root)) == 10

    append(folder, [make_event(n, key=f"k{n % 3}") for n in range(10, 20)])
    append(folder, [make_event(n, key=f"k{n % 3}") for n in range(20, 25)])
    assert len(rows(root, 1)) == 25
    assert len(rows(root, 21)) == 5
    upkeep.compact(folder, TOPIC, 0)
    folder.close()
    kept = [decoded(row) for row in rows(root)]
    assert kept == [as_row(record) for record in read_log(root)]
    assert len(kept) < 25

    shutil.rmtree(root)
    make_log(Path(root), 7)
    assert [row["id"] for row in rows(root)] == [f"e{n}" for n in range(7)]

    os.rename(root, root + ".old")  # noqa: TID251 -- as who restores a copy does
    folder = Folder(root, options)
    append(folder, [make_event(n) for n in range(10, 17)])
    folder.close()
    assert [row["id"] for row in rows(root)] == [f"e{n}" for n in range(10, 17)]


def test_what_was_removed_is_not_held_open_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scanning, "_KEPT_MAX", 3)
    monkeypatch.setattr(scanning, "_kept", {})
    for number in range(8):
        root = make_log(tmp_path / str(number), 7)
        assert len(rows(root)) == 7
        shutil.rmtree(root)
        assert root in {where[0] for where in scanning._kept}
    for reader, _ in scanning._kept.values():
        reader.close()


def test_scans_at_the_same_time_leave_no_file_open(tmp_path: Path) -> None:
    root = make_log(tmp_path, 7)
    chosen = ScanOptions(root=root, names=NAMES)
    open_files = []
    for _ in range(3):
        several = [scan(OffsetRange(TOPIC, 0, 1, 8), chosen) for _ in range(3)]
        for batches in zip(*several, strict=True):
            assert {batch.num_rows for batch in batches} == {7}
        del several
        open_files.append(len(os.listdir("/dev/fd")))
    assert open_files[0] == open_files[1] == open_files[2]


def test_types_and_spaces_are_picked_without_being_shown(tmp_path: Path) -> None:
    root = make_log(tmp_path, 12)

    found = rows(root, names=("offset",), types=frozenset({"t1"}), spaces=frozenset({"s0"}))

    assert found == [{"offset": 5}, {"offset": 11}]


def test_a_limit_is_shared_in_proportion_and_nobody_starves() -> None:
    start = {"a": {"0": 1, "1": 1}, "b": {"0": 1}}
    end = {"a": {"0": 901, "1": 101}, "b": {"0": 2}}

    got = admit_rows(start, end, 100)

    taken = {(t, p): got[t][p] - start[t][p] for t in got for p in got[t]}
    assert sum(taken.values()) <= 100
    assert taken["b", "0"] == 1
    assert taken["a", "0"] > 5 * taken["a", "1"] > 0
    assert admit_rows(start, end, 5000) == end


def test_a_limit_in_bytes_is_kept_by_the_index(tmp_path: Path) -> None:
    folder = Folder(str(tmp_path), StoreOptions(index_bytes=1024))
    for start in range(0, 400, 10):
        append(folder, [make_event(n) for n in range(start, start + 10)])
    folder.close()
    catalog = Catalog(str(tmp_path))
    reader = catalog.reader(TOPIC, 0)
    (extent,) = list_extents(reader, reader.head())
    each = extent.size / 400

    got = admit_bytes(catalog, {TOPIC: {"0": 1}}, {TOPIC: {"0": 401}}, int(each * 100))

    assert 90 <= got[TOPIC]["0"] <= 110
    tiny = admit_bytes(catalog, {TOPIC: {"0": 1}}, {TOPIC: {"0": 401}}, 1)
    assert tiny == {TOPIC: {"0": 2}}
    catalog.close()


def test_a_reader_beside_a_writer_sees_whole_batches_without_gaps(tmp_path: Path) -> None:
    root = str(tmp_path)
    folder = Folder(root)
    folder.define(TOPIC, TopicOptions(segment_records=70))
    append(folder, [make_event(0)])
    ended = threading.Event()

    def write() -> None:
        number = 1
        while not ended.is_set() and number < 3000:
            append(folder, [make_event(n) for n in range(number, number + 7)])
            number += 7
            if number % 210 == 1:
                upkeep.pack_segments(folder, TOPIC, 0)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = 0
        for _ in range(25):
            found = [row["offset"] for row in rows(root, names=("offset",))]
            assert found == list(range(1, len(found) + 1))
            assert len(found) >= seen
            assert (len(found) - 1) % 7 == 0
            seen = len(found)
    finally:
        ended.set()
        writer.join()
        folder.close()
