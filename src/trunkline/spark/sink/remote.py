"""The sink of a log on a server: a broker, NATS or MongoDB.

Tasks turn rows into events and hand them to the driver, which publishes them. Each event carries
the name of its row: the query, the batch, a digest of the row's values, and how often the batch has
such a row. Before it publishes, the driver notes on the topic ``system.spark`` where each partition
ends. A batch that is tried again reads from there on, and publishes only the rows that are missing.
So a batch is in the log once if it has the same rows when it is tried again, in whatever order.
"""

from __future__ import annotations

import hashlib
import uuid
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

from trunkline.bus.sync import SyncBus
from trunkline.errors import InvalidOption
from trunkline.event import Event
from trunkline.names import SYSTEM_PREFIX
from trunkline.spark.sink.rows import ROW, SinkOptions, check_schema, make_event
from trunkline.spark.source.catalogs import open_remote

STATE: Final = f"{SYSTEM_PREFIX}spark"
_AT_ONCE: Final = 500  # events of one publish
_AT_ONCE_BYTES: Final = 512 * 1024
_PAGE: Final = 500

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Event]).decode


@dataclass
class StagedRows(WriterCommitMessage):
    """What a task hands to the driver: its events, packed, and the query it belongs to."""

    events: bytes
    query: str

    @property
    def rows(self) -> list[Event]:
        return _decode(zlib.decompress(self.events))


class SinkBatch(msgspec.Struct, kw_only=True):
    """The state of one query's sink, as a record on ``system.spark`` has it."""

    version: int = -1
    ends: dict[str, int] = {}  # where each partition ended when the batch began
    done: bool = True


class RemoteSink:
    def __init__(
        self, root: str, token: str, options: SinkOptions, schema: StructType, overwrite: bool
    ) -> None:
        if overwrite:
            raise InvalidOption("a log is only added to", hint="use mode append")
        self.root = root
        self.token = token
        self.options = options
        self.names = check_schema(schema, options)
        if "partition" in self.names:
            raise InvalidOption(
                f"{root} gives a record its partition by itself",
                hint="leave the column partition out; the key decides",
            )

    def stage(self, batches: Iterator[pa.RecordBatch]) -> StagedRows:
        """Make events of rows, each named by what its row holds."""
        context = TaskContext.get()
        query = context.getLocalProperty("sql.streaming.queryId") if context else None
        events = []
        for batch in batches:
            columns = [batch.column(at).to_pylist() for at in range(batch.num_columns)]
            for values in zip(*columns, strict=True):
                row = dict(zip(self.names, values, strict=True))
                event = make_event(row, self.options)
                digest = hashlib.blake2b(_encode(values), digest_size=12).hexdigest()
                named = {**event.headers, ROW: digest}
                given = event.id if row.get("id") is not None else ""
                events.append(msgspec.structs.replace(event, id=given, headers=named))
        return StagedRows(zlib.compress(_encode(events), 1), query or "")

    def settle(self, staged: Sequence[StagedRows], app: str, version: int) -> None:
        """Publish what was staged, unless this batch is in the log already."""
        events = [event for one in staged for event in one.rows]
        log = open_remote(self.root, self.token)
        try:
            bus = log.open_bus()
        finally:
            log.close()
        try:
            if not app:
                _publish(bus, list(_named(events, uuid.uuid4().hex, 0)))
                return
            state = read_state(bus, app)
            if version < state.version or (version == state.version and state.done):
                return
            named = list(_named(events, app, version))
            if version == state.version:
                known = _rows_since(bus, state.ends)
                named = [event for event in named if event.headers[ROW] not in known]
            else:
                ends = _ends(bus, {event.topic for event in events})
                _note(bus, app, SinkBatch(version=version, ends=ends, done=False))
            _publish(bus, named)
            _note(bus, app, SinkBatch(version=version))
        finally:
            bus.close()

    def discard(self, staged: Sequence[StagedRows]) -> None:
        """Nothing was written yet."""


def _named(events: Sequence[Event], app: str, version: int) -> Iterator[Event]:
    """The events with the whole names of their rows. An event whose row gave it no id gets one that
    is the same when the batch is tried again.
    """
    seen: Counter[str] = Counter()
    batch = hashlib.blake2b(f"{app}\0{version}".encode(), digest_size=8).hexdigest()
    for event in events:
        digest = event.headers[ROW]
        name = f"{batch}-{digest}-{seen[digest]}"
        seen[digest] += 1
        headers = {**event.headers, ROW: name}
        yield msgspec.structs.replace(event, id=event.id or name, headers=headers)


def _publish(bus: SyncBus, events: list[Event]) -> None:
    """In batches of one topic each. Events of one topic stay in their order."""
    waiting: dict[str, list[Event]] = {}
    sizes: Counter[str] = Counter()
    for event in events:
        topic = event.topic
        batch = waiting.setdefault(topic, [])
        batch.append(event)
        sizes[topic] += len(_encode(event))
        if len(batch) >= _AT_ONCE or sizes[topic] >= _AT_ONCE_BYTES:
            bus.publish_many(topic, waiting.pop(topic))
            del sizes[topic]
    for topic, batch in waiting.items():
        bus.publish_many(topic, batch)


def _ends(bus: SyncBus, topics: set[str]) -> dict[str, int]:
    """Where each partition of some topics ends; a topic that is not there yet ends at 1."""
    known = bus.topics()
    return {
        f"{topic}/{number}": bus.bounds(topic, number).next
        for topic in sorted(topics)
        for number in range(known[topic].partitions if topic in known else 0)
    } | {f"{topic}/0": 1 for topic in sorted(topics) if topic not in known}


def _rows_since(bus: SyncBus, ends: dict[str, int]) -> set[str]:
    """The names of the rows that are in the log from some places on."""
    found: set[str] = set()
    known = bus.topics()
    for where, start in ends.items():
        topic, _, partition = where.rpartition("/")
        if topic not in known:
            continue
        first = bus.bounds(topic, int(partition)).first
        start = max(start, first)
        while records := bus.read(topic, start, _PAGE, partition=int(partition)):
            found |= {r.event.headers[ROW] for r in records if ROW in r.event.headers}
            start = records[-1].offset + 1
    return found


def _note(bus: SyncBus, app: str, state: SinkBatch) -> None:
    payload: Any = msgspec.to_builtins(state)
    bus.publish(STATE, payload, key=app, type="sink")


def read_state(bus: SyncBus, app: str) -> SinkBatch:
    """What was noted last of a query, from the end of the topic backwards."""
    if STATE not in bus.topics():
        return SinkBatch()
    first, end = bus.bounds(STATE, 0)
    while end > first:
        start = max(first, end - _PAGE)
        records = [r for r in bus.read(STATE, start, end - start) if r.offset < end]
        for record in reversed(records):
            if record.event.key == app and record.event.type == "sink":
                return msgspec.convert(record.event.payload, SinkBatch)
        end = start
    return SinkBatch()


def sent_version(root: str, token: str, app: str) -> int:
    """The last version of ``app`` that is in the log as a whole; -1 if there is none."""
    log = open_remote(root, token)
    try:
        bus = log.open_bus()
    finally:
        log.close()
    try:
        state = read_state(bus, app)
    finally:
        bus.close()
    return state.version if state.done else state.version - 1
