"""Carry events from one place to another: a spool directory, an NDJSON file, any bus.

Every event gets an *origin*, a name made of the place it was first read from and its position
there, and keeps it wherever it is carried. Nothing is lost, because the cursor of the source is
noted only after the sink has the events on disk. Nothing is doubled, because each note also says
where the sink stood: after a crash, whatever the sink holds from there on is looked at once, and an
event whose origin is found there is not written again (a spool needs no look: the file's name
follows from the origin). Nothing goes round in circles, because an event also keeps the list of
places it came through, and is not carried to a place it has seen.

Bridges that share a sink may meet the same events. They write in turns, each after a look at what
the others wrote; and one that is not alone looks at all of the sink when it begins.

The notes are an append-only journal beside the sink, or in the user's state folder where the sink
is no folder: one line for each batch. A torn last line is a note that was not made.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from trunkline.check import check_event
from trunkline.codec import encode_event
from trunkline.errors import (
    Corrupt,
    Invalid,
    InvalidEvent,
    InvalidOption,
    NoBus,
    NotFound,
    StorageError,
)
from trunkline.event import Event, Record, new_id
from trunkline.files import ndjson
from trunkline.files import spool as spools
from trunkline.files.event_file import leading_us
from trunkline.files.forms import (
    ORIGIN,
    Parcel,
    from_line,
    from_spool,
    readable,
    to_event,
    to_line,
    to_spool,
    word,
)
from trunkline.folder.direct import DirectBus
from trunkline.log import atomic
from trunkline.log.layout import folder_path
from trunkline.log.line import Damaged, decode
from trunkline.names import SYSTEM_PREFIX, check_pattern, is_dead, matches
from trunkline.options import Limits

if TYPE_CHECKING:
    from trunkline.bus.sync import SyncBus

BATCH: Final = 200
POLL_S: Final = 0.2

FAR: Final = ("ws", "wss", "nats", "nats+tls", "mongodb", "mongodb+srv")
_PATIENCE_S = 30.0
_COMPACT_BYTES = 256 * 1024
_NAME_PART_BYTES = 80
_TURN_S = 60.0
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
Json = dict[str, Any]
_decode_note = msgspec.json.Decoder(Json).decode


class Carried(msgspec.Struct):
    copied: int = 0
    already: int = 0
    looped: int = 0
    filtered: int = 0
    invalid: int = 0

    def to_json(self) -> Json:
        return msgspec.structs.asdict(self)


class Source(Protocol):
    """``fetch`` gives what lies behind the cursor and what to note once it is carried; an empty
    note means that there is nothing. ``fold`` adds a note to a cursor, ``done`` says that what a
    cursor holds was carried. ``rewound`` turns true when a source had to begin again.
    """

    place: str
    rewound: bool

    def fetch(self, cursor: Json, limit: int) -> tuple[list[Parcel], Json]: ...

    def fold(self, cursor: Json, note: Json) -> Json: ...

    def done(self, note: Json) -> None: ...

    def close(self) -> None: ...


class Target(Protocol):
    """``put`` writes what is not there yet, durably, and says how much that was. ``standing`` is
    what to note beside a cursor, and what ``resume`` gets after a restart: look again at what came
    behind it. ``check`` raises ``Invalid`` for what the sink cannot take.
    """

    place: str

    def state_file(self, name: str) -> str: ...

    def resume(self, standing: Json) -> None: ...

    def check(self, item: Parcel) -> None: ...

    def put(self, items: list[Parcel]) -> int: ...

    def standing(self) -> Json: ...

    def close(self) -> None: ...


class Bridge:
    """One way from ``source`` to ``sink``. Two of the same at a time: ``LockTimeout``."""

    def __init__(
        self,
        source: Source,
        sink: Target,
        topics: Iterable[str] = (),
        *,
        skip_invalid: bool = False,
        batch: int = BATCH,
    ) -> None:
        if source.place == sink.place:
            raise InvalidOption("source and destination are the same place")
        self.counts = Carried()
        self._source = source
        self._sink = sink
        self._topics = tuple(sorted(check_pattern(name) for name in topics))
        self._skip_invalid = skip_invalid
        self._batch = batch
        # Another choice of topics is another bridge: it has not seen what this one left out.
        choice = hashlib.sha256(",".join(self._topics).encode()).hexdigest()[:8]
        path = sink.state_file(f"{source.place}-{choice}")
        self._journal = _Journal(path, source.fold)
        self._turn = os.open(sink.state_file("all") + ".lock", _FLAGS, 0o600)
        sink.resume(self._journal.standing if _is_only(path, sink) else {})
        source.done(self._journal.cursor)

    def step(self) -> bool:
        """Carry one batch. False when there was nothing behind the cursor."""
        items, note = self._source.fetch(self._journal.cursor, self._batch)
        if not note:
            return False
        if self._source.rewound:
            self._sink.resume({})
            self._source.rewound = False
        chosen: list[Parcel] = []
        try:
            chosen.extend(item for item in items if self._wanted(item))
        except InvalidEvent:
            # What comes before it goes on its way. Without a note it is met again, and recognised.
            self.counts.copied += self._put(chosen)
            raise
        written = self._put(chosen)
        self.counts.copied += written
        self.counts.already += len(chosen) - written
        self._journal.note(note, self._sink.standing())
        self._source.done(note)
        return True

    def run(self) -> Carried:
        """Carry everything there is now."""
        while self.step():
            pass
        return self.counts

    def close(self) -> None:
        """Let go of the journal. Source and sink belong to the caller that opened them."""
        self._journal.close()
        os.close(self._turn)

    def _put(self, items: list[Parcel]) -> int:
        atomic.lock(self._turn, _TURN_S, self._sink.place)
        try:
            return self._sink.put(items)
        finally:
            atomic.unlock(self._turn)

    def _wanted(self, item: Parcel) -> bool:
        topic = item.event.topic
        if self._topics:
            chosen = any(matches(pattern, topic) for pattern in self._topics)
        else:
            chosen = not (is_dead(topic) or topic.startswith(SYSTEM_PREFIX))
        if not chosen:
            self.counts.filtered += 1
            return False
        if self._sink.place in item.via:
            self.counts.looped += 1
            return False
        try:
            self._sink.check(item)
        except Invalid as error:
            if not self._skip_invalid:
                raise InvalidEvent(f"{item.origin}: {error.message}", origin=item.origin) from error
            self.counts.invalid += 1
            return False
        return True


class _Place:
    """What not every place has a use for."""

    rewound = False

    def done(self, note: Json) -> None: ...
    def resume(self, standing: Json) -> None: ...
    def check(self, item: Parcel) -> None: ...
    def close(self) -> None: ...


class SpoolPlace(_Place):
    """A spool directory, as a source or a sink.

    As a source it gives pending and processed events, so that one which was acknowledged early is
    carried all the same. It is not acknowledged for its readers unless ``ack`` says so. The cursor
    is the set of names that were carried: a late publisher may bring a name older than any of them.
    """

    def __init__(self, directory: str, *, create: bool = False, ack: bool = False) -> None:
        self._spool = spools.Spool(directory, create=create)
        self._path = os.path.abspath(directory)
        self._ack = ack
        self.place = _place_id(os.path.join(self._path, ".place"))

    def fetch(self, cursor: Json, limit: int) -> tuple[list[Parcel], Json]:
        done = cursor.get("done", ())
        names = sorted(
            {
                name
                for folder in (self._path, os.path.join(self._path, "processed"))
                for name in _event_names(folder)
                if name not in done
            },
            key=lambda name: (int(name.partition("-")[0]), name),
        )[:limit]
        items = [item for name in names if (item := self._item(name)) is not None]
        return items, {"done": names} if names else {}

    def fold(self, cursor: Json, note: Json) -> Json:
        done: set[str] = cursor.get("done") or set()
        done.update(note.get("done", ()))
        return {"done": done}

    def done(self, note: Json) -> None:
        for name in note.get("done", ()) if self._ack else ():
            with suppress(NotFound):  # acknowledged by someone else, which is as good
                self._spool.ack(name)

    def state_file(self, name: str) -> str:
        return os.path.join(self._path, f".bridge-{name}.journal")

    def put(self, items: list[Parcel]) -> int:
        return sum(self._put(item) for item in items)

    def standing(self) -> Json:
        return {}

    def _item(self, name: str) -> Parcel | None:
        # It may move while we look, and only from the first folder to the second.
        for folder in (self._path, os.path.join(self._path, "processed")):
            with suppress(OSError), open(os.path.join(folder, name), "rb") as file:
                event = from_spool(name, file.read())
                origin = event.headers.get(ORIGIN) or f"{self.place}/{readable(name)}"
                return Parcel(event, origin, self.place)
        return None

    def _put(self, item: Parcel) -> bool:
        us = max(int(item.event.ts.timestamp() * 1_000_000), 0)
        source, kind = word(item.event.actor or "bus"), word(item.event.type or item.event.topic)
        number = zlib.crc32(item.origin.encode()) & 0x7FFFFFFF
        body = to_spool(item)
        while True:
            name = f"{us}-{_short(source)}-{_short(kind)}-{number}.event"
            if self._spool.put(name, body):
                return True
            held = self._item(name)
            if held is None or held.origin == item.origin:
                return False
            us += 1


class NdjsonPlace(_Place):
    """An NDJSON file, as a source or a sink. A file that was cut or replaced is read again from its
    start; what the sink holds of it already is not written twice.
    """

    def __init__(self, events_file: str, *, create: bool = False) -> None:
        self._file = os.path.abspath(events_file)
        folder, name = os.path.split(self._file)
        if not create and not os.path.exists(self._file):
            raise NoBus(f"there is no event log at {events_file}", path=events_file)
        os.makedirs(folder, exist_ok=True)
        self._hidden = os.path.join(folder, f".{name}")
        self.place = _place_id(self._hidden + ".place")
        self._known: set[str] = set()
        self._seen = 0  # how far into the file we know what it holds

    def fetch(self, cursor: Json, limit: int) -> tuple[list[Parcel], Json]:
        mark = ndjson.Mark(**cursor) if cursor else None
        try:
            lines, end = ndjson.read_batch(self._file, mark, limit)
        except StorageError:
            self.rewound = True
            lines, end = ndjson.read_batch(self._file, None, limit)
        items = []
        for number, line in lines:
            value = ndjson.decode_line(line)
            if value is not None:
                digest = hashlib.sha256(line).hexdigest()[:8]
                event = from_line(value)
                origin = event.headers.get(ORIGIN) or f"{self.place}/{number}-{digest}"
                items.append(Parcel(event, origin, self.place))
        note = {"line": end.line, "byte": end.byte, "head": end.head, "tail": end.tail}
        return items, note if lines else {}

    def fold(self, cursor: Json, note: Json) -> Json:  # noqa: ARG002 -- the newest mark is all
        return note

    def state_file(self, name: str) -> str:
        return f"{self._hidden}.bridge-{name}.journal"

    def resume(self, standing: Json) -> None:
        self._seen = standing.get("byte", 0)
        self._look()

    def _look(self) -> None:
        """Take in what came since we last looked."""
        with suppress(FileNotFoundError), open(self._file, "rb") as file:
            if self._seen > os.fstat(file.fileno()).st_size:
                self._seen = 0
            file.seek(self._seen)
            for line in file:
                if not line.endswith(b"\n"):  # half-written: perhaps there is more of it later
                    return
                self._seen += len(line)
                value = ndjson.decode_line(line)
                headers = value.get("headers") if value is not None else None
                if isinstance(headers, dict) and isinstance(headers.get(ORIGIN), str):
                    self._known.add(headers[ORIGIN])

    def put(self, items: list[Parcel]) -> int:
        self._look()
        fresh = [item for item in items if item.origin not in self._known]
        if fresh:
            ndjson.append([to_line(item) for item in fresh], self._file)
            self._seen = os.path.getsize(self._file)  # our own we meet only once
        return len(fresh)

    def standing(self) -> Json:
        return {"byte": self._seen}


class BusPlace(_Place):
    """A bus, as a source or a sink. A folder is known by the id in it and holds the notes of its
    bridges. Any other bus is known by its address, and the notes are kept in the user's state
    folder.
    """

    def __init__(self, url: str, *, create: bool = False, token: str | None = None) -> None:
        scheme, _, place = url.partition(":")
        self._bus: DirectBus | SyncBus
        self._most = BATCH
        if scheme == "file":
            path = os.path.abspath(folder_path(place))
            self._bus = direct = DirectBus(path, create=create)
            self.place = direct.folder.id
            self._notes = os.path.join(path, "bridge")
        else:
            from trunkline.bus import sync

            far = scheme not in ("mongodb", "mongodb+srv")
            options: dict[str, Any] = {"patience_s": _PATIENCE_S} if far else {"create": create}
            if token is not None:
                options["token"] = token
            self._bus = sync.open(url, **options)
            try:
                self._bus.topics()  # a server that is away, or refuses, is told here
            except BaseException:
                self._bus.close()
                raise
            self._most = self._bus.bus.features.batch_max or BATCH
            address = re.sub(r"//[^/@]*@", "//", url)  # the same bus for every user
            self.place = f"{scheme}-{hashlib.sha256(address.encode()).hexdigest()[:16]}"
            home = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
            self._notes = os.path.join(home, "trunkline", "bridges", self.place)
            os.makedirs(os.path.dirname(self._notes), mode=0o700, exist_ok=True)
        self._standing: dict[str, dict[str, int]] = {}  # how far we know what a topic holds
        self._known: dict[str, set[str]] = {}

    def fetch(self, cursor: Json, limit: int) -> tuple[list[Parcel], Json]:
        items: list[Parcel] = []
        note: Json = {}
        for topic, options in sorted(self._bus.topics().items()):
            for partition in range(options.partitions):
                if len(items) >= limit:
                    return items, note
                stem = f"{topic}~{partition}"
                records = self._read(topic, partition, cursor.get(stem, 1), limit - len(items))
                if records:
                    note[stem] = records[-1].offset + 1
                for record in records:
                    where = f"{self.place}/{stem}/{record.offset}"
                    origin = record.event.headers.get(ORIGIN) or where
                    items.append(Parcel(record.event, origin, self.place))
        return items, note

    def fold(self, cursor: Json, note: Json) -> Json:
        return {**cursor, **note}

    def state_file(self, name: str) -> str:
        atomic.make_dir(self._notes)
        return os.path.join(self._notes, f"{name}.journal")

    def resume(self, standing: Json) -> None:
        self._standing = {topic: dict(ends) for topic, ends in standing.items()}
        self._known = {}

    def check(self, item: Parcel) -> None:
        event = to_event(item)
        check_event(event, Limits())
        encode_event(event, Limits())

    def put(self, items: list[Parcel]) -> int:
        by_topic: dict[str, list[Event]] = {}
        events = [to_event(item) for item in items]
        known = {topic: self._known_in(topic) for topic in {event.topic for event in events}}
        for item, event in zip(items, events, strict=True):
            if item.origin not in known[event.topic]:
                by_topic.setdefault(event.topic, []).append(event)
        for topic, events in by_topic.items():
            ends = self._standing.setdefault(topic, {})
            batches = [events[i : i + self._most] for i in range(0, len(events), self._most)]
            for receipt in chain.from_iterable(
                self._bus.publish_many(topic, batch) for batch in batches
            ):
                # A duplicate names an older record, which is no news about where the log ends.
                at = str(receipt.partition)
                ends[at] = max(ends.get(at, 1), receipt.offset + 1)
        return sum(map(len, by_topic.values()))

    def standing(self) -> Json:
        return self._standing

    def close(self) -> None:
        self._bus.close()

    def _known_in(self, topic: str) -> set[str]:
        """The origins a topic holds, from where it was last noted on and up to now."""
        known = self._known.setdefault(topic, set())
        ends = self._standing.setdefault(topic, {})
        options = self._bus.topics().get(topic)
        for partition in range(options.partitions if options else 0):
            at = ends.get(str(partition), 1)
            while records := self._read(topic, partition, at, 1000):
                known.update(r.event.headers.get(ORIGIN, "") for r in records)
                ends[str(partition)] = at = records[-1].offset + 1
        return known

    def _read(self, topic: str, partition: int, start: int, limit: int) -> list[Record]:
        first, end = self._bus.bounds(topic, partition)
        start = max(start, first)
        return self._bus.read(topic, start, limit, partition=partition) if start < end else []


def open_source(url: str, *, ack: bool = False, token: str | None = None) -> Source:
    """``spool:DIR``, ``ndjson:FILE`` or the URL of a bus; it must exist."""
    scheme, place = _split(url)
    if scheme == "spool":
        return SpoolPlace(place, ack=ack)
    return NdjsonPlace(place) if scheme == "ndjson" else BusPlace(url, token=token)


def open_sink(url: str, *, token: str | None = None) -> Target:
    """As ``open_source``; it is made if it is not there."""
    scheme, place = _split(url)
    if scheme == "spool":
        return SpoolPlace(place, create=True)
    if scheme == "ndjson":
        return NdjsonPlace(place, create=True)
    return BusPlace(url, create=True, token=token)


def follow(bridge: Bridge, poll_s: float = POLL_S) -> Iterator[Carried]:
    """Carry for ever; the counts so far after everything that came."""
    while True:
        moved = False
        while bridge.step():
            moved = True
        if moved:
            yield bridge.counts
        time.sleep(poll_s)


def _short(text: str) -> str:
    return text.encode()[:_NAME_PART_BYTES].decode("utf-8", "ignore")


def _event_names(folder: str) -> Iterator[str]:
    """What a spool takes for events; a device or a pipe of such a name is none."""
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".event") and leading_us(os.fsencode(entry.name)) is not None:
                with suppress(OSError):
                    if entry.is_file():
                        yield entry.name


def _split(url: str) -> tuple[str, str]:
    scheme, found, place = url.partition(":")
    is_far = scheme in FAR and place.startswith("//")
    if not found or not place or not (is_far or scheme in ("spool", "ndjson", "file")):
        hint = "use spool:DIR, ndjson:FILE, file:DIR, ws://, nats:// or mongodb://"
        raise InvalidOption(f"cannot bridge {url!r}", value=url, hint=hint)
    return scheme, os.path.expanduser(place)


def _is_only(path: str, sink: Target) -> bool:
    """Whether no other bridge has left notes beside this sink."""
    before, after = sink.state_file("\0").split("\0")
    folder, start = os.path.split(before)
    names = {n for n in os.listdir(folder) if n.startswith(start) and n.endswith(after)}
    return names <= {os.path.basename(path)}


def _place_id(path: str) -> str:
    """The lasting name of a place, made on first use. The process that links it first names it."""
    while True:
        with suppress(FileNotFoundError), open(path, encoding="ascii") as file:
            return file.read().strip()
        temp = f"{path}.{secrets.token_hex(4)}"
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.write(fd, new_id().encode() + b"\n")
            os.fsync(fd)
            with suppress(FileExistsError):
                os.link(temp, path)
        finally:
            os.close(fd)
            os.unlink(temp)
        atomic.sync_dir(os.path.dirname(path))


class _Journal:
    """Where a bridge stands: the fold of all notes. Locked for as long as it is open."""

    def __init__(self, path: str, fold: Any) -> None:
        self._path = path
        self._fold = fold
        self.cursor: Json = {}
        self.standing: Json = {}
        self._lock = os.open(path + ".lock", _FLAGS, 0o600)
        try:
            atomic.lock(self._lock, 1.0, path)
            self._load()
            self._fd = os.open(path, _FLAGS | os.O_APPEND, 0o600)
            atomic.sync_dir(os.path.dirname(path))
        except BaseException:
            os.close(self._lock)
            raise

    def note(self, cursor: Json, standing: Json) -> None:
        self.cursor = self._fold(self.cursor, cursor)
        self.standing = standing
        line = json.dumps({"cursor": cursor, "sink": standing}, separators=(",", ":"))
        atomic.write_all(self._fd, line.encode() + b"\n")
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)
        os.close(self._lock)

    def _load(self) -> None:
        try:
            data = atomic.read_file(self._path)
        except FileNotFoundError:
            return
        whole, _, torn = data.rpartition(b"\n")
        for line in whole.split(b"\n") if whole else ():
            try:
                value = decode(_decode_note, line)
                cursor, self.standing = value["cursor"], value["sink"]
            except (Damaged, KeyError) as error:
                raise Corrupt(
                    f"the notes of a bridge are damaged: {self._path}",
                    path=self._path,
                    hint="remove the file: the bridge then compares everything once",
                ) from error
            self.cursor = self._fold(self.cursor, cursor)
        if torn or len(data) > _COMPACT_BYTES:
            kept = {
                key: sorted(value) if isinstance(value, set) else value
                for key, value in self.cursor.items()
            }
            note = json.dumps({"cursor": kept, "sink": self.standing}, separators=(",", ":"))
            atomic.replace_file(self._path, note.encode() + b"\n" if whole else b"")


@contextmanager
def open_bridge(
    source: str,
    sink: str,
    topics: Iterable[str] = (),
    *,
    ack: bool = False,
    skip_invalid: bool = False,
    tokens: tuple[str | None, str | None] = (None, None),
) -> Iterator[Bridge]:
    """A bridge between two URLs, closed at the end."""
    with ExitStack() as stack:
        start = open_source(source, ack=ack, token=tokens[0])
        stack.callback(start.close)
        end = open_sink(sink, token=tokens[1])
        stack.callback(end.close)
        bridge = Bridge(start, end, topics, skip_invalid=skip_invalid)
        stack.callback(bridge.close)
        yield bridge
