"""One append-only NDJSON file, and an offset file for each consumer that reads it.

Every line is one event. A publisher appends a whole line in one write under the file's lock, so
lines never mix; a line that a dead writer left unfinished is closed first and stays where it is,
unreadable, so line numbers never change. A consumer owns its cursor, ``next_line``, and moves it
only after it has the events in hand: a crash repeats events, it never skips one.

The offset file holds exactly the four members of the contract. What a reader needs beside them, the
byte behind the cursor and a digest of what lies before it, is kept in a hidden file next to it; a
log that was cut or replaced no longer fits the digest and is read again from line 1.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any, BinaryIO, Final, NamedTuple

from trunkline import units
from trunkline.errors import InvalidEvent, InvalidName, InvalidOption, StorageError
from trunkline.log import atomic

EVENTS_FILE: Final = "state/pubsub/events_v0.ndjson"
OFFSETS_DIR: Final = "state/pubsub/offsets"
CLAIM: Final = "coord.claim"
RELEASE: Final = "coord.release"
CLOSEOUT_CREATED: Final = "closeout.created"
GATE_STATUS_CHANGED: Final = "gate.status_changed"
TOPICS: Final = (CLAIM, RELEASE, CLOSEOUT_CREATED, GATE_STATUS_CHANGED)
TTL_S: Final = 600
MAX_EVENTS: Final = 50
CONSUMERS_NEEDED: Final = 3
RECURRING_WINDOW_S: Final = 7 * 86_400.0

_CHUNK = 1 << 20
_EDGE = 4096
_LOCK_TIMEOUT_S = 10.0
_CONTROL = re.compile(r"[\x00-\x1f\x7f/]")
Json = dict[str, Any]


class Mark(NamedTuple):
    """A place between two lines, and what the log must hold before it to be the same log."""

    line: int = 1
    byte: int = 0
    head: str = ""
    tail: str = ""


class Poll(NamedTuple):
    """What one poll found. The cursor moves when it is handed to ``Consumer.commit``."""

    consumer: str
    events_file: str
    offset_file: str
    topics: tuple[str, ...]
    from_line: int
    to_line: int
    next_line: int
    events: list[Json]
    now: datetime
    mark: Mark
    replaced: bool = False

    def result(self) -> Json:
        return {
            "consumer": self.consumer,
            "events_file": self.events_file,
            "offset_file": self.offset_file,
            "topics_filter": list(self.topics),
            "from_line": self.from_line,
            "to_line": self.to_line,
            "next_line": self.next_line,
            "events_returned": self.events,
        }


class ConsumerState(NamedTuple):
    """``polls`` is None for an offset file that another program keeps."""

    name: str
    next_line: int
    lag: int
    updated_at: datetime | None
    polls: int | None


class Adoption(NamedTuple):
    """Whether the bus has earned its place: at least ``needed`` consumers keep coming back."""

    met: bool
    needed: int
    recurring: tuple[str, ...]
    others: tuple[str, ...]

    def __str__(self) -> str:
        count = len(self.recurring)
        names = f" ({', '.join(self.recurring)})" if count else ""
        verdict = "met" if self.met else "not met"
        return f"adoption rule {verdict}: {count} of {self.needed} recurring consumers{names}"


def make_event(
    topic: str,
    scope: str,
    actor: str,
    payload: Json | None = None,
    *,
    ttl_s: int = TTL_S,
    idempotency_key: str = "",
    ts: datetime | None = None,
    event_id: str = "",
) -> Json:
    """An event with its eight members. The same input in the same second has the same id."""
    if not (topic and scope and actor):
        raise InvalidEvent("topic, scope and actor are required")
    if not isinstance(payload, dict | None):
        raise InvalidEvent("payload must be a JSON object", field="payload")
    if isinstance(ttl_s, bool) or not isinstance(ttl_s, int) or ttl_s < 0:
        raise InvalidEvent("ttl_s must be a non-negative integer", field="ttl_s")
    payload = payload or {}
    moment = (ts or datetime.now(UTC)).astimezone(UTC)
    stamp = format_ts(moment)
    try:
        seed = f"{topic}|{scope}|{actor}|{stamp}|{_compact(payload)}".encode()
        (event_id + idempotency_key).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidEvent(f"not a JSON value: {error}") from error
    import hashlib  # short commands do without it

    digest = hashlib.sha256(seed).hexdigest()[:12]
    return {
        "event_id": event_id or f"evt_{moment:%Y%m%dT%H%M%SZ}_{digest}",
        "ts": stamp,
        "topic": topic,
        "scope": scope,
        "actor": actor,
        "payload": payload,
        "ttl_s": ttl_s,
        "idempotency_key": idempotency_key or f"{topic}|{scope}|{actor}|{stamp}",
    }


def publish(event: Json, events_file: str = EVENTS_FILE) -> bytes:
    """Append one event, durably, and return its line. Makes the file and its folder if needed."""
    return append([event], events_file)[0]


def append(events: list[Json], events_file: str = EVENTS_FILE) -> list[bytes]:
    """Append several events with one write: a crash leaves all of them or a torn tail."""
    lines = [_compact(event).encode() + b"\n" for event in events]
    folder = os.path.dirname(os.path.abspath(events_file))
    os.makedirs(folder, exist_ok=True)
    with _locked_log(events_file) as fd:
        size = os.fstat(fd).st_size
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        block = (b"\n" if torn else b"") + b"".join(lines)
        try:
            atomic.write_all(fd, block)
            os.fsync(fd)
        except OSError as error:
            raise atomic.storage_error(error, events_file) from error
    if size == 0:
        atomic.sync_dir(folder)
    return lines


class Consumer:
    """A named reader with its own cursor. ``InvalidName`` for a name that is no file name.

    Hold ``lock`` around a poll and its commit if the same name may run twice at a time.
    """

    def __init__(
        self, name: str, events_file: str = EVENTS_FILE, offsets_dir: str = OFFSETS_DIR
    ) -> None:
        self.name = check_consumer(name)
        self.events_file = _as_given(events_file)
        self.offset_file = _as_given(os.path.join(offsets_dir, f"{name}.json"))
        self._memo_file = os.path.join(offsets_dir, f".{name}.cursor")
        self._offsets_dir = offsets_dir

    @contextmanager
    def lock(self, timeout_s: float = _LOCK_TIMEOUT_S) -> Iterator[None]:
        self.make_files()
        path = os.path.join(self._offsets_dir, f".{self.name}.lock")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            atomic.lock(fd, timeout_s, path)
            self._sweep()
            yield
        finally:
            os.close(fd)

    def _sweep(self) -> None:
        """Remove what a killed commit of this consumer left; its lock says that none is running."""
        own = (f"{self.name}.json", f".{self.name}.cursor")
        for name in os.listdir(self._offsets_dir):
            # Exactly that: "a.json.json" is the offset of a consumer called "a.json".
            if name.endswith(".tmp") and name[:-13] in own:
                with suppress(FileNotFoundError):
                    os.unlink(os.path.join(self._offsets_dir, name))

    def make_files(self) -> None:
        os.makedirs(os.path.dirname(os.path.abspath(self.events_file)), exist_ok=True)
        os.makedirs(self._offsets_dir, exist_ok=True)
        os.close(_open_file(self.events_file, os.O_WRONLY | os.O_CREAT))

    def poll(
        self,
        topics: Iterable[str] = (),
        max_events: int = MAX_EVENTS,
        now: datetime | None = None,
    ) -> Poll:
        """Read from the cursor on, without moving it."""
        if max_events < 0:
            raise InvalidOption(f"max_events={max_events}", name="max_events", value=max_events)
        self.make_files()
        now = now or datetime.now(UTC)
        wanted = frozenset(topics)
        from_line, memo = self._cursor()
        replaced = False
        with _open_to_read(self.events_file) as file:
            start = Mark()
            if memo is not None:
                replaced = not _fits(file, memo)
                start = Mark() if replaced else memo
            if replaced:
                from_line = 1
            found, next_line, total, mark = _collect(
                file, start, from_line, wanted, max_events, now
            )
        return Poll(
            consumer=self.name,
            events_file=self.events_file,
            offset_file=self.offset_file,
            topics=tuple(sorted(wanted)),
            from_line=from_line,
            to_line=total,
            next_line=next_line,
            events=found,
            now=now,
            mark=mark,
            replaced=replaced,
        )

    def commit(self, poll: Poll) -> None:
        """Move the cursor past what ``poll`` returned. Atomic and durable."""
        _, _, polls = self._memo()
        offset = {
            "consumer": self.name,
            "events_file": self.events_file,
            "next_line": poll.next_line,
            "updated_at": format_ts(poll.now),
        }
        mark = poll.mark
        memo = {
            "next_line": poll.next_line,
            "line": mark.line,
            "byte": mark.byte,
            "head": mark.head,
            "tail": mark.tail,
            "polls": polls + 1,
        }
        # The memo only counts while it names the same next_line, so the order does not matter for
        # safety; this one makes a crash in between cost a scan from the start, nothing more.
        for path, value in ((self.offset_file, offset), (self._memo_file, memo)):
            text = json.dumps(value, indent=2, sort_keys=True) + "\n"
            atomic.replace_file(os.path.abspath(path), text.encode())
            self._share(path)

    def _share(self, path: str) -> None:
        """Let users that may read the log read how far a consumer is."""
        with suppress(OSError):
            os.chmod(path, 0o600 | (os.stat(self.events_file).st_mode & 0o044))

    def _cursor(self) -> tuple[int, Mark | None]:
        offset = _load(self.offset_file)
        line = offset.get("next_line") if offset is not None else None
        next_line = max(1, line) if isinstance(line, int) else 1
        noted, mark, _ = self._memo()
        return next_line, mark if noted == next_line else None

    def _memo(self) -> tuple[int, Mark | None, int]:
        memo = _load(self._memo_file) or {}
        try:
            mark = Mark(int(memo["line"]), int(memo["byte"]), memo["head"], memo["tail"])
            return int(memo["next_line"]), mark, int(memo["polls"])
        except (KeyError, TypeError, ValueError):
            return 0, None, 0


def read_batch(
    events_file: str, mark: Mark | None = None, limit: int = 1000
) -> tuple[list[tuple[int, bytes]], Mark]:
    """Up to ``limit`` finished lines behind ``mark``, with their numbers, and the mark behind them.

    For readers that keep a mark of their own. ``StorageError`` when the log in front of the mark is
    not what it was: it was cut or replaced.
    """
    mark = mark or Mark()
    found: list[tuple[int, bytes]] = []
    try:
        file = _open_to_read(events_file)
    except FileNotFoundError:
        if mark.byte:
            raise StorageError(f"the log is gone: {events_file}", path=events_file) from None
        return found, mark
    with file:
        if not _fits(file, mark):
            raise StorageError(f"the log was cut or replaced: {events_file}", path=events_file)
        end = mark
        for number, byte, line, whole in _lines(file, mark):
            if not whole or len(found) >= limit:
                break
            found.append((number, line))
            end = Mark(number + 1, byte + len(line) + 1)
        return found, _seal(file, end) if found else mark


def fits(events_file: str, mark: Mark) -> bool:
    """Whether the log in front of ``mark`` is still the one that the mark was made in."""
    try:
        with _open_to_read(events_file) as file:
            return _fits(file, mark)
    except FileNotFoundError:
        return mark.byte == 0


def replay(
    events_file: str = EVENTS_FILE,
    topics: Iterable[str] = (),
    *,
    from_line: int = 1,
    to_line: int | None = None,
    now: datetime | None = None,
) -> Iterator[Json]:
    """Every event of a range of lines, again, without touching any cursor. Expired ones are left
    out only when ``now`` is given.
    """
    wanted = frozenset(topics)
    with _open_to_read(events_file) as file:
        for number, _, line, _ in _lines(file, Mark()):
            if number < from_line:
                continue
            if to_line is not None and number > to_line:
                return
            event = decode_line(line)
            if event is None or not _chosen(event, wanted):
                continue
            if now is None or not is_expired(event, now):
                event["_line"] = number
                yield event


def consumers(
    events_file: str = EVENTS_FILE, offsets_dir: str = OFFSETS_DIR
) -> tuple[int, list[ConsumerState]]:
    """The number of lines, and every consumer of this file with its lag, by name."""
    total = 0
    if os.path.exists(events_file):
        with _open_to_read(events_file) as file:
            total = _collect(file, Mark(), 1, frozenset(), 0, datetime.now(UTC))[2]
    found: list[ConsumerState] = []
    for entry in sorted(os.listdir(offsets_dir)) if os.path.isdir(offsets_dir) else []:
        name = entry.removesuffix(".json")
        if entry.startswith(".") or name == entry:
            continue
        reader = Consumer(name, events_file, offsets_dir)
        offset = _load(reader.offset_file) or {}
        if not _is_same(offset.get("events_file"), events_file):
            continue
        next_line, _ = reader._cursor()
        _, mark, polls = reader._memo()
        found.append(
            ConsumerState(
                name=name,
                next_line=next_line,
                lag=max(0, total + 1 - next_line),
                updated_at=find_ts(offset.get("updated_at")),
                polls=polls if mark is not None else None,
            )
        )
    return total, found


def adoption(
    events_file: str = EVENTS_FILE,
    offsets_dir: str = OFFSETS_DIR,
    *,
    now: datetime | None = None,
    window_s: float = RECURRING_WINDOW_S,
) -> Adoption:
    """Whether at least three consumers recur: seen within ``window_s``, and more than once as far
    as that is known (an offset file kept by another program counts as such).
    """
    now = now or datetime.now(UTC)
    recurring: list[str] = []
    others: list[str] = []
    for state in consumers(events_file, offsets_dir)[1]:
        at = state.updated_at
        fresh = at is not None and (now - at).total_seconds() <= window_s
        came_back = state.polls is None or state.polls > 1
        (recurring if fresh and came_back else others).append(state.name)
    return Adoption(
        met=len(recurring) >= CONSUMERS_NEEDED,
        needed=CONSUMERS_NEEDED,
        recurring=tuple(recurring),
        others=tuple(others),
    )


def check_consumer(name: str) -> str:
    if not name or name.startswith(".") or _CONTROL.search(name) or len(os.fsencode(name)) > 200:
        raise InvalidName(
            f"not a consumer name: {name[:80]!r}",
            name=name,
            hint="it becomes a file name: no '/', no control characters, no leading dot, 200 bytes",
        )
    return name


def parse_ts(text: str) -> datetime:
    """RFC 3339 with any offset, as UTC. ``InvalidEvent`` without a time zone."""
    try:
        return units.read_time(text, zone=None).astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise InvalidEvent(f"invalid timestamp: {error}", field="ts") from error


def format_ts(moment: datetime) -> str:
    return units.write_time(moment, fraction=False)


def is_expired(event: Json, now: datetime) -> bool:
    """Expired from ``ts + ttl_s`` on. What has no usable ``ts`` or ``ttl_s`` never expires."""
    ttl_s, moment = event.get("ttl_s"), find_ts(event.get("ts"))
    if moment is None or not isinstance(ttl_s, int) or ttl_s <= 0:
        return False
    try:
        return now >= moment + timedelta(seconds=ttl_s)
    except OverflowError:
        return False


def _chosen(event: Json, wanted: frozenset[str]) -> bool:
    topic = event.get("topic")  # of a foreign line: anything JSON has
    return not wanted or (isinstance(topic, str) and topic in wanted)


def _compact(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _as_given(path: str) -> str:
    """The path as it was given, without what says nothing: ``./``, ``//``, a last ``/``."""
    from pathlib import PurePath  # here: a claim does without

    return str(PurePath(path))


def _is_same(noted: Any, events_file: str) -> bool:
    """Whether an offset is of this log. A path that was noted relative to some other folder may
    still mean it.
    """
    if not isinstance(noted, str):
        return True
    here = os.path.realpath(events_file)
    if os.path.realpath(noted) == here:
        return True
    from pathlib import PurePath

    return PurePath(here).match(noted)


def find_ts(text: Any) -> datetime | None:
    """The time, or None if the value of a foreign line is none."""
    try:
        return parse_ts(text) if isinstance(text, str) else None
    except InvalidEvent:
        return None


def decode_line(line: bytes) -> Json | None:
    """The event of a line, or None when it holds none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _load(path: str) -> Json | None:
    try:
        with _open_to_read(path) as file:
            return decode_line(file.read())
    except OSError:
        return None


def _open_file(path: str, flags: int) -> int:
    """A file descriptor. A pipe or a device in the file's place is refused: it might never end."""
    try:
        fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno != errno.ENXIO:  # a pipe that nobody reads
            raise
        raise StorageError(f"not a file: {path}", path=path) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise StorageError(f"not a file: {path}", path=path)
    return fd


def _open_to_read(path: str) -> BinaryIO:
    return open(_open_file(path, os.O_RDONLY), "rb")


@contextmanager
def _locked_log(path: str) -> Iterator[int]:
    """The log, open for appending and locked; opened again if it was replaced meanwhile."""
    while True:
        fd = _open_file(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            try:
                same = os.path.samestat(os.fstat(fd), os.stat(path))
            except FileNotFoundError:
                same = False
            if same:
                yield fd
                return
        finally:
            os.close(fd)


def _lines(file: Any, mark: Mark) -> Iterator[tuple[int, int, bytes, bool]]:
    """(number, first byte, line, whether it ends in a newline) from ``mark`` on.

    Lines end at b"\\n" and nowhere else: a line separator inside a JSON text is part of it.
    """
    file.seek(mark.byte)
    number, at, rest = mark.line, mark.byte, b""
    while chunk := file.read(_CHUNK):
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield number, at, line, True
            number, at = number + 1, at + len(line) + 1
    if rest:
        yield number, at, rest, False


def _collect(
    file: Any, start: Mark, from_line: int, wanted: frozenset[str], limit: int, now: datetime
) -> tuple[list[Json], int, int, Mark]:
    """Events from ``from_line`` on, at most ``limit``; the next line to read; how many lines there
    are; and the mark of the last whole line before the next one.
    """
    found: list[Json] = []
    next_line, total, closed = from_line, start.line - 1, start
    full = limit == 0
    for number, byte, line, whole in _lines(file, start):
        if not whole and decode_line(line) is None:
            break  # half-written: not a line yet
        total = number
        if full:
            continue
        closed = Mark(number + 1, byte + len(line) + 1) if whole else Mark(number, byte)
        if number < from_line:
            continue
        next_line = number + 1
        event = decode_line(line)
        if event is None or not _chosen(event, wanted):
            continue
        if not is_expired(event, now):
            event["_line"] = number
            found.append(event)
            full = len(found) >= limit
    return found, min(next_line, total + 1), total, _seal(file, closed)


def _seal(file: Any, mark: Mark) -> Mark:
    """The mark with digests of the first and the last bytes in front of it."""
    edge = min(mark.byte, _EDGE)
    file.seek(0)
    head = file.read(edge)
    file.seek(mark.byte - edge)
    tail = file.read(edge)
    import hashlib

    return Mark(
        mark.line, mark.byte, hashlib.sha256(head).hexdigest(), hashlib.sha256(tail).hexdigest()
    )


def _fits(file: Any, mark: Mark) -> bool:
    if mark.byte == 0:
        return True
    sealed = _seal(file, mark)
    return (sealed.head, sealed.tail) == (mark.head, mark.tail)
