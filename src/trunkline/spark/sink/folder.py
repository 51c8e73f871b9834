"""A DataFrame becomes records of a topic, each once, whatever dies in between.

Tasks only stage: they encode their rows into a file of their own under ``spark/sinks``. The driver
then notes durably which files make up the batch and where each partition ended before it, and
appends them piece by piece; every piece is one atomic batch of the log whose first record carries
the piece's name in a header. When a batch is tried again, the files that were noted first count,
and a piece whose name is found in the log behind the noted end is not appended again.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple
from zlib import crc32

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

from trunkline.codec import encode_event
from trunkline.errors import InvalidOption, NotFound
from trunkline.event import Event
from trunkline.folder import Folder
from trunkline.log import atomic
from trunkline.names import partition_for
from trunkline.options import Limits, StoreOptions
from trunkline.spark.sink.rows import PIECE, SinkOptions, check_schema, make_event
from trunkline.spark.source.catalogs import FolderCatalog

_PIECE_RECORDS: Final = 5000
_PIECE_BYTES: Final = 4 * 1024 * 1024
_ORPHAN_S: Final = 24 * 3600


@dataclass
class Staged(WriterCommitMessage):
    """What a task leaves behind: its file, and the query it belongs to."""

    path: str
    query: str
    rows: int


class Piece(msgspec.Struct, frozen=True):
    """Some records of one partition, encoded. ``ts`` is the latest of their times, epoch µs."""

    name: str
    topic: str
    partition: int
    ts: int
    keys: list[str | None]
    bodies: list[bytes]


class Batch(msgspec.Struct, kw_only=True):
    """The state of one query's sink: the batch it is at, and how far that one is."""

    version: int = -1
    files: list[str] = []
    ends: dict[str, int] = {}
    done: bool = True


class FolderSink:
    def __init__(
        self, root: str, options: SinkOptions, schema: StructType, overwrite: bool
    ) -> None:
        if overwrite:
            raise InvalidOption("a log is only added to", hint="use mode append")
        self.root = root
        self.options = options
        self.names = check_schema(schema, options)
        self.job = uuid.uuid4().hex
        catalog = FolderCatalog(root)
        try:
            self.partitions = catalog.topics()
        finally:
            catalog.close()

    def stage(self, batches: Iterator[pa.RecordBatch]) -> Staged:
        """Encode rows into a file that is durable when this returns."""
        context = TaskContext.get()
        query = context.getLocalProperty("sql.streaming.queryId") if context else None
        place = os.path.join(self.root, "spark", "sinks", "staged")
        atomic.make_dir(place)
        name = uuid.uuid4().hex
        app = _file_name(self.options.app or query or self.job)
        path = os.path.join(place, f"{app}~{name}.pieces")
        rows = 0
        fd = atomic.create_file(path, os.O_WRONLY)
        try:
            for piece in cut_pieces(self._events(batches), name):
                rows += len(piece.bodies)
                data = msgspec.msgpack.encode(piece)
                atomic.write_all(fd, len(data).to_bytes(8, "big") + data)
            atomic.sync(fd)
        finally:
            os.close(fd)
        return Staged(path, query or "", rows)

    def _events(self, batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[int, Event]]:
        for batch in batches:
            columns = [batch.column(at).to_pylist() for at in range(batch.num_columns)]
            for values in zip(*columns, strict=True):
                row = dict(zip(self.names, values, strict=True))
                event = make_event(row, self.options)
                yield self._partition(row, event), event

    def _partition(self, row: dict[str, Any], event: Event) -> int:
        count = self.partitions.get(event.topic, 1)
        wanted = row.get("partition")
        if wanted is not None:
            if not 0 <= wanted < count:
                raise NotFound(f"{event.topic} has no partition {wanted}", topic=event.topic)
            return int(wanted)
        if event.key is not None:
            return partition_for(event.key, count)
        return crc32(event.id.encode()) % count

    def settle(self, staged: Sequence[Staged], app: str, version: int) -> None:
        """Append what was staged, unless this batch is in the log already. Files that the batch's
        state names stay until they are in the log, whatever fails.
        """
        app = app or self.job
        place = os.path.join(self.root, "spark", "sinks")
        state_path = self._state_path(app)
        lock_path = os.path.join(place, f"{_file_name(app)}.lock")
        atomic.make_dir(place)
        lock = atomic.open_file(lock_path, os.O_RDWR | os.O_CREAT)
        try:
            atomic.lock(lock, 60.0, lock_path)
            state = _load(state_path)
            if version > state.version:
                paths = [one.path for one in staged]
                ends = self._ends(paths)
                state = Batch(version=version, files=paths, ends=ends, done=False)
                atomic.replace_file(state_path, msgspec.json.encode(state))
            if version == state.version and not state.done:
                self._append(state)
                state.done, state.files, state.ends = True, [], {}
                atomic.replace_file(state_path, msgspec.json.encode(state))
            _sweep(os.path.join(place, "staged"), _file_name(app))
        finally:
            os.close(lock)
        if app == self.job:
            atomic.remove_files([state_path, lock_path])

    def _state_path(self, app: str) -> str:
        return os.path.join(self.root, "spark", "sinks", f"{_file_name(app)}.json")

    def _ends(self, paths: list[str]) -> dict[str, int]:
        catalog = FolderCatalog(self.root)
        try:
            wheres = {(p.topic, p.partition) for path in paths for p in read_pieces(path)}
            return {f"{t}/{n}": catalog.reader(t, n).head().next for t, n in sorted(wheres)}
        finally:
            catalog.close()

    def _append(self, state: Batch) -> None:
        folder = Folder(self.root, StoreOptions(create=False))
        try:
            known = {
                where: _names_since(folder, where, start) for where, start in state.ends.items()
            }
            for path in state.files:
                for piece in read_pieces(path):
                    if piece.name not in known[f"{piece.topic}/{piece.partition}"]:
                        folder.append(piece.topic, piece.partition, piece.bodies, _stand_ins(piece))
        finally:
            folder.close()

    def discard(self, staged: Sequence[Staged]) -> None:
        """Remove what was staged for a batch that is given up. What the batch's state names is
        needed when the batch is tried again.
        """
        for one in staged:
            state = _load(self._state_path(self.options.app or one.query or self.job))
            if state.done or one.path not in state.files:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(one.path)


def cut_pieces(events: Iterator[tuple[int, Event]], name: str) -> Iterator[Piece]:
    """Events in order, cut into pieces of one partition each. The first of a piece is marked."""
    limits = Limits()
    open_: dict[tuple[str, int], _Open] = {}
    count = 0
    for partition, event in events:
        where = (event.topic, partition)
        part = open_.get(where)
        if part is None:
            part = open_[where] = _Open(f"{name}-{count}", [], [], 0, 0)
            count += 1
            event = msgspec.structs.replace(event, headers={**event.headers, PIECE: part.name})
        body = encode_event(event, limits)
        part.bodies.append(body)
        part.keys.append(event.idem_key)
        size = part.size + len(body)
        ts = max(part.ts, int(event.ts.timestamp() * 1_000_000))
        open_[where] = part._replace(size=size, ts=ts)
        if len(part.bodies) >= _PIECE_RECORDS or size >= _PIECE_BYTES:
            yield _close(where, open_.pop(where))
    for where, part in open_.items():
        yield _close(where, part)


class _Open(NamedTuple):
    name: str
    bodies: list[bytes]
    keys: list[str | None]
    size: int
    ts: int


def _close(where: tuple[str, int], part: _Open) -> Piece:
    return Piece(part.name, *where, part.ts, part.keys, part.bodies)


def read_pieces(path: str) -> Iterator[Piece]:
    with open(path, "rb") as file:
        while size := file.read(8):
            yield msgspec.msgpack.decode(file.read(int.from_bytes(size, "big")), type=Piece)


def _stand_ins(piece: Piece) -> list[Event]:
    """What the log asks of the events besides their bytes: their time and idempotency key."""
    ts = datetime.fromtimestamp(piece.ts / 1_000_000, UTC)
    return [Event(id="-", ts=ts, topic=piece.topic, idem_key=key) for key in piece.keys]


def _names_since(folder: Folder, where: str, start: int) -> set[str]:
    """The pieces that are in the log from ``start`` on."""
    topic, _, partition = where.rpartition("/")
    reader = folder.reader(topic, int(partition))
    found = set()
    while records := reader.read(start, strict=False):
        found |= {r.event.headers[PIECE] for r in records if PIECE in r.event.headers}
        start = records[-1].offset + 1
    return found


def sent_version(root: str, app: str) -> int:
    """The last version of ``app`` that is in the log as a whole; -1 if there is none."""
    state = _load(os.path.join(root, "spark", "sinks", f"{_file_name(app)}.json"))
    return state.version if state.done else state.version - 1


def _load(path: str) -> Batch:
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=Batch)
    except FileNotFoundError:
        return Batch()


def _sweep(place: str, app: str) -> None:
    """Remove what a batch that is done staged, in every try of it, and what tasks of others that
    died left behind long ago.
    """
    now = time.time_ns() / 1e9
    for name in os.listdir(place) if os.path.isdir(place) else []:
        path = os.path.join(place, name)
        with contextlib.suppress(FileNotFoundError):
            is_mine = name.partition("~")[0] == app
            if is_mine or now - os.stat(path).st_mtime > _ORPHAN_S:
                os.unlink(path)


def _file_name(app: str) -> str:
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in app)[:80]
    return safe if safe == app else f"{safe}-{crc32(app.encode()):08x}"
