"""Exactly once, step by step: what is in the log after a commit died anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

import pyarrow as pa
from pyspark.sql.types import StringType, StructField, StructType

from trunkline.errors import TrunklineError
from trunkline.folder import Folder
from trunkline.options import TopicOptions
from trunkline.spark.sink import folder as sinking
from trunkline.spark.sink.folder import Staged
from trunkline.spark.sink.rows import PIECE
from trunkline.spark.sink.writers import StreamSink

from .logs import read_log

SCHEMA = StructType([StructField("key", StringType()), StructField("value", StringType())])


class Died(BaseException):
    """The process ends here."""


def make_sink(root: Path) -> StreamSink:
    folder = Folder(str(root))
    folder.define("out", TopicOptions(partitions=2))
    folder.close()
    return StreamSink({"url": str(root), "topic": "out", "txnAppId": "query"}, SCHEMA, False)


def rows(start: int, end: int) -> Iterator[pa.RecordBatch]:
    numbers = range(start, end)
    columns = [[f"k{n % 5}" for n in numbers], [str(n) for n in numbers]]
    yield pa.RecordBatch.from_arrays([pa.array(c) for c in columns], names=["key", "value"])


def numbers(root: Path) -> list[int]:
    return sorted(r.event.payload for p in (0, 1) for r in read_log(str(root), "out", p))


def stage(sink: StreamSink, start: int, end: int) -> list[Staged]:
    half = (start + end) // 2
    staged = [sink.write(rows(start, half)), sink.write(rows(half, end))]
    return [one for one in staged if isinstance(one, Staged)]


class Failed(Exception):
    """The commit fails, and Spark gives the batch up for now."""


@pytest.mark.parametrize("problem", [Died, Failed])
@pytest.mark.parametrize("appends", range(9))
def test_a_commit_that_dies_after_some_appends_is_finished_by_the_next_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, appends: int, problem: type[BaseException]
) -> None:
    monkeypatch.setattr(sinking, "_PIECE_RECORDS", 10)
    sink = make_sink(tmp_path)
    sink.commit(stage(sink, 0, 20), 0)
    left = appends
    append = Folder.append

    def dying(self: Folder, *args: object, **options: object) -> object:
        nonlocal left
        if left == 0:
            raise problem
        left -= 1
        return append(self, *args, **options)  # type: ignore[arg-type]

    staged = stage(sink, 20, 60)
    monkeypatch.setattr(Folder, "append", dying)
    try:
        sink.commit(staged, 1)
    except Died:
        left = -1
    except Failed:
        sink.abort(staged, 1)
    monkeypatch.undo()

    again = make_sink(tmp_path)
    again.commit(stage(again, 20, 60), 1)
    again.commit(stage(again, 60, 70), 2)

    assert numbers(tmp_path) == list(range(70))
    assert not list((tmp_path / "spark" / "sinks" / "staged").iterdir())


def test_an_older_batch_is_never_written_again(tmp_path: Path) -> None:
    sink = make_sink(tmp_path)
    for batch in (0, 1, 1, 0):
        sink.commit(stage(sink, batch * 10, batch * 10 + 10), batch)

    assert numbers(tmp_path) == list(range(20))


def test_a_piece_is_marked_once_and_the_rest_is_as_it_was(tmp_path: Path) -> None:
    sink = make_sink(tmp_path)
    sink.commit([one for one in [sink.write(rows(0, 30))] if isinstance(one, Staged)], 0)

    marked = [r for p in (0, 1) for r in read_log(str(tmp_path), "out", p) if r.event.headers]
    assert [set(r.event.headers) for r in marked] == [{PIECE}, {PIECE}]
    assert [r.offset for r in marked] == [1, 1]


def test_a_log_is_not_overwritten(tmp_path: Path) -> None:
    make_sink(tmp_path)

    with pytest.raises(TrunklineError, match="a log is only added to"):
        StreamSink({"url": str(tmp_path), "topic": "out"}, SCHEMA, True)
