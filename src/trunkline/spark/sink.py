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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple
from zlib import crc32

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from trunkline.errors import InvalidEvent, InvalidOption, NotFound
from trunkline.event import Event, check_event, decode_payload, encode_event
from trunkline.log import atomic
from trunkline.log.folder import Folder
from trunkline.options import Limits, StoreOptions
from trunkline.spark.columns import OTHER_NAMES
from trunkline.spark.extents import Catalog
from trunkline.topics import check_topic, partition_for

PIECE: Final = "spark-piece"
_PIECE_RECORDS: Final = 5000
_PIECE_BYTES: Final = 4 * 1024 * 1024
_ORPHAN_S: Final = 24 * 3600

_KINDS: Final = {
    **dict.fromkeys(("key", "topic", "type", "space", "id", "actor", "subject"), ("string",)),
    **dict.fromkeys(("idem_key", "trace", "priority", "band", "cause"), ("string",)),
    **dict.fromkeys(("timestamp", "not_before"), ("timestamp",)),
    "value": ("string", "binary"),
    "partition": ("int",),
    "ttl_s": ("double", "float", "int", "bigint"),
    "caps": ("array<string>",),
    "headers": ("map<string,string>",),
}
_FIELDS: Final = {"timestamp": "ts", "value": "payload"}


class SinkOptions(msgspec.Struct, frozen=True, kw_only=True):
    topic: str = ""
    text: bool = False
    app: str = ""
    version: int = -1


def read_sink_options(options: Mapping[str, str]) -> SinkOptions:
    given = {key.lower(): value for key, value in options.items()}
    topic = given.get("topic", "")
    if topic:
        check_topic(topic)
    form = given.get("valueformat", "json")
    if form not in ("json", "text"):
        raise InvalidOption(f"valueFormat={form!r}", hint="json or text")
    version = given.get("txnversion", "")
    if version and not (version.isdigit() and given.get("txnappid")):
        raise InvalidOption("txnVersion is a number and goes with txnAppId")
    return SinkOptions(
        topic=topic,
        text=form == "text",
        app=given.get("txnappid", ""),
        version=int(version) if version else -1,
    )


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


class _Sink:
    def __init__(
        self, root: str, options: SinkOptions, schema: StructType, overwrite: bool
    ) -> None:
        if overwrite:
            raise InvalidOption("a log is only added to", hint="use mode append")
        self.root = root
        self.options = options
        self.names = _check_schema(schema, options)
        self.job = uuid.uuid4().hex
        catalog = Catalog(root)
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
        path = os.path.join(place, f"{uuid.uuid4().hex}.pieces")
        rows = 0
        fd = atomic.create_file(path, os.O_WRONLY)
        try:
            for piece in cut_pieces(self._events(batches), os.path.basename(path)[:32]):
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
        """Append what was staged, unless this batch is in the log already."""
        app = app or self.job
        place = os.path.join(self.root, "spark", "sinks")
        paths = [one.path for one in staged]
        state_path = os.path.join(place, f"{_file_name(app)}.json")
        lock_path = os.path.join(place, f"{_file_name(app)}.lock")
        atomic.make_dir(place)
        lock = atomic.open_file(lock_path, os.O_RDWR | os.O_CREAT)
        try:
            atomic.lock(lock, 60.0, lock_path)
            state = _load(state_path)
            if version < state.version or (version == state.version and state.done):
                return
            if version != state.version:
                ends = self._ends(paths)
                state = Batch(version=version, files=paths, ends=ends, done=False)
                atomic.replace_file(state_path, msgspec.json.encode(state))
            self._append(state)
            state.done, state.files, state.ends = True, [], {}
            atomic.replace_file(state_path, msgspec.json.encode(state))
        finally:
            os.close(lock)
            self.discard(paths)
            _sweep(os.path.join(place, "staged"))
        if app == self.job:
            atomic.remove_files([state_path, lock_path])

    def _ends(self, paths: list[str]) -> dict[str, int]:
        catalog = Catalog(self.root)
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

    def discard(self, paths: Sequence[str]) -> None:
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


class _Writer:
    """What is the same for a batch and for a stream."""

    def __init__(
        self, root: str, options: SinkOptions, schema: StructType, overwrite: bool
    ) -> None:
        self._sink = _Sink(root, options, schema, overwrite)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._sink.stage(iterator)

    def abort(
        self,
        messages: Sequence[WriterCommitMessage | None],
        batchId: int = 0,  # noqa: ARG002, N803
    ) -> None:
        self._sink.discard([one.path for one in _staged(messages)])


class BatchSink(_Writer, DataSourceArrowWriter):
    """``df.write.format("trunkline")``; with txnAppId and txnVersion, once for each version."""

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        options = self._sink.options
        version = options.version if options.app else 0
        self._sink.settle(_staged(messages), options.app, version)


class StreamSink(_Writer, DataSourceStreamArrowWriter):
    """``df.writeStream.format("trunkline")``: exactly once per query and batch."""

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        staged = _staged(messages)
        app = self._sink.options.app or next((one.query for one in staged if one.query), "")
        if staged and not app:
            raise InvalidOption("the query has no id", hint="set option txnAppId")
        if staged:
            self._sink.settle(staged, app, batchId)


def make_event(row: dict[str, Any], options: SinkOptions) -> Event:
    """The event of a row; what the row does not say has the defaults of an event."""
    fields: dict[str, Any] = {}
    for name, value in row.items():
        if value is not None and name not in ("partition", "value"):
            fields[_FIELDS.get(name, name)] = value
    if options.topic:
        fields["topic"] = options.topic
    if not fields.get("topic"):
        raise InvalidOption("a row has no topic", hint="set option topic, or a column topic")
    if "headers" in fields:
        fields["headers"] = {k: v for k, v in dict(fields["headers"]).items() if k != PIECE}
    if "caps" in fields:
        fields["caps"] = tuple(fields["caps"])
    value = row["value"]
    if options.text or value is None:
        fields["payload"] = value.decode() if isinstance(value, bytes) else value
    else:
        fields["payload"] = _payload(value)
    event = Event(**fields)
    check_event(event, Limits())
    return event


def _payload(value: str | bytes) -> Any:
    try:
        return decode_payload(value)
    except InvalidEvent as error:
        raise InvalidEvent(
            f"value is {str(value)[:60]!r}: {error.message}",
            hint="write to_json(struct(...)), or set option valueFormat=text",
        ) from None


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


def _staged(messages: Sequence[WriterCommitMessage | None]) -> list[Staged]:
    return [one for one in messages if isinstance(one, Staged)]


def _sweep(place: str) -> None:
    """Remove what tasks that died left behind long ago."""
    now = time.time_ns() / 1e9
    for name in os.listdir(place) if os.path.isdir(place) else []:
        path = os.path.join(place, name)
        with contextlib.suppress(FileNotFoundError):
            if now - os.stat(path).st_mtime > _ORPHAN_S:
                os.unlink(path)


def _file_name(app: str) -> str:
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in app)[:80]
    return safe if safe == app else f"{safe}-{crc32(app.encode()):08x}"


def _check_schema(schema: StructType, options: SinkOptions) -> list[str]:
    names = []
    for field in schema.fields:
        name = OTHER_NAMES.get(field.name, field.name)
        kinds = _KINDS.get(name)
        if kinds is None:
            raise InvalidOption(
                f"a record has no column {field.name!r}", hint=f"known: {', '.join(_KINDS)}"
            )
        if field.dataType.simpleString() not in kinds:
            raise InvalidOption(
                f"column {field.name} is {field.dataType.simpleString()}",
                hint=f"make it {' or '.join(kinds)}"
                + (", for example by to_json" if name == "value" else ""),
            )
        names.append(name)
    if "value" not in names:
        raise InvalidOption("there is no column value", hint="to_json(struct(...)) AS value")
    if "topic" not in names and not options.topic:
        raise InvalidOption("there is neither an option nor a column topic")
    return names
