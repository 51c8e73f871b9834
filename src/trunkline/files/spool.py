"""A directory as a priority queue: one file per event, no process running.

Publishing writes a hidden file, syncs it and renames it, so a reader sees whole events or nothing.
Acknowledging renames the file into ``processed/``: of several that try, one succeeds, and the event
is gone for everybody. Names and contents are those of ``nbs-bus``, and the original program may
work on the same directory at the same time.

``nbs-bus`` starts once per event, so this module imports next to nothing: no typing, no json, and
``trunkline.errors`` only when there is an error to raise.
"""

from __future__ import annotations

import _thread
import errno
import os
import stat
import time

from trunkline.files.event_file import (
    PRIORITIES,
    SECONDS_MAX,
    SPACES,
    Content,
    SpoolConfig,
    as_bytes,
    compose,
    header,
    leading_us,
    parse,
    parse_config,
    read_head,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

PROCESSED = b"processed"
CONFIG = b"config.yaml"
# Neither ends with ".event" and starts with digits, so no implementation takes it for an event.
LOCK = b".lock"
_NOTICED = b".config.noticed"
_PRUNED = b".pruned"
_PRUNE_EVERY_NS = 10_000_000_000
_CONFIG_BYTES = 65_536
TEMP = b".tmp-"
SUFFIX = b".event"

_TEMP_AGE_US = 3_600_000_000
_WATCH_SLICE_S = 1.0


class Pending:
    """One event that waits: what ``check`` shows of it."""

    __slots__ = ("name", "priority", "source", "timestamp_us", "type")

    def __init__(self, name: bytes, rank: int, source: bytes, type_: bytes, us: int) -> None:
        self.name = os.fsdecode(name)
        self.priority = PRIORITIES[rank]
        self.source = os.fsdecode(source)
        self.type = os.fsdecode(type_)
        self.timestamp_us = us

    def __repr__(self) -> str:
        return f"Pending({self.name!r}, {self.priority})"


class Pruned:
    """What ``prune`` did. ``found`` is False when there is no ``processed/`` at all."""

    __slots__ = ("count", "failed", "found", "limit_bytes", "total_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self.count = 0
        self.total_bytes = 0
        self.limit_bytes = limit_bytes
        self.found = True
        self.failed: list[tuple[str, str]] = []


class Status:
    """``last_us`` is when something was last published or acknowledged; 0 if nothing ever was."""

    __slots__ = (
        "ack_timeout_s",
        "counts",
        "last_us",
        "oldest_us",
        "processed",
        "processed_bytes",
        "stale",
    )

    def __init__(self) -> None:
        self.last_us = 0
        self.counts = [0, 0, 0, 0]
        self.oldest_us = 0
        self.processed = 0
        self.processed_bytes = 0
        self.stale = 0
        self.ack_timeout_s = 0

    @property
    def pending(self) -> int:
        return sum(self.counts)


class Spool:
    """One events directory, which must exist (``NoBus`` otherwise)."""

    def __init__(self, directory: str | bytes, *, create: bool = False) -> None:
        self.path = os.fsencode(directory)
        if create:
            os.makedirs(self.path, exist_ok=True)
        if not os.path.isdir(self.path):
            from trunkline.errors import NoBus

            where = os.fsdecode(self.path)
            found = os.path.exists(self.path)
            what = "not a directory" if found else "events directory not found"
            raise NoBus(f"{what}: {where}", path=where)

    def publish(
        self,
        source: str | bytes,
        type_: str | bytes,
        priority: str = "normal",
        payload: str | bytes = b"",
        *,
        dedup_window_s: int | None = None,
        dedup_key: str | None = None,
    ) -> str:
        """Write one event and return its file name; it is on disk when this returns.

        ``dedup_window_s`` None means what ``config.yaml`` says. Raises ``Duplicate`` when a
        pending event no older than the window has the same key. ``dedup_key`` None means
        ``<source>:<type>``; an empty one leaves the field out, which makes the event unique.
        """
        source, type_, key = _check_event(source, type_, priority, dedup_key)
        window_s = self.config().dedup_window_s if dedup_window_s is None else dedup_window_s
        if not 0 <= window_s <= SECONDS_MAX:
            from trunkline.errors import InvalidOption

            raise InvalidOption(f"dedup_window_s={window_s}", name="dedup_window_s")
        body = compose(source, type_, priority, key, as_bytes(payload))
        seen: set[bytes] = set()
        window_us = window_s * 1_000_000 if key else 0
        if window_us:
            self._refuse_duplicate(key, window_us, seen)
        self._make_processed()
        if b"/" in source + type_ or b"\0" in source + type_:
            from trunkline.errors import InvalidName

            raise InvalidName("a source or type holds no '/'", name=os.fsdecode(source + type_))
        us, temp = self._write_temp(body)
        name = b"%d-%b-%b-%d.event" % (us, source, type_, os.getpid())
        try:
            self._show(temp, name, key, window_us, seen)
        except BaseException:
            _unlink(os.path.join(self.path, temp))
            raise
        return os.fsdecode(name)

    def put(self, name: str, body: bytes) -> bool:
        """Write a whole event file under a given name unless that name was there before, pending
        or processed. For those that carry events from elsewhere, and may do so twice.
        """
        raw = _check_name(name)
        if self.has(name):
            return False
        self._make_processed()
        _, temp = self._write_temp(body)
        _rename(os.path.join(self.path, temp), os.path.join(self.path, raw))
        _sync_dir(self.path)
        return True

    def has(self, name: str) -> bool:
        raw = os.fsencode(name)
        # Pending first: an event only ever moves from there to processed/.
        return os.path.exists(os.path.join(self.path, raw)) or os.path.exists(
            os.path.join(self.path, PROCESSED, raw)
        )

    def pending(self, source: str = "") -> list[Pending]:
        """What waits, highest priority first, then oldest first."""
        wanted = os.fsencode(source)
        rows = [row for row in self._scan() if not wanted or row[3] == wanted]
        rows.sort()
        return [Pending(name, rank, src, kind, us) for rank, us, name, src, kind in rows]

    def read(self, name: str) -> bytes:
        """The bytes of a pending event. Raises ``NotFound``, or ``InvalidName`` for a path."""
        try:
            path = os.path.join(self.path, _check_name(name))
            # A link that somebody planted leads elsewhere, and a FIFO would never end.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with open(os.open(path, flags), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise _not_found(name)
                return file.read()
        except OSError:
            raise _not_found(name) from None

    def get(self, name: str) -> Content:
        return parse(self.read(name))

    def ack(self, name: str) -> None:
        """Move an event to ``processed/``. Of several that try, all but one get ``NotFound``."""
        raw = _check_name(name)
        self._make_processed()
        if not self._move(raw):
            raise _not_found(name)
        self._sync_moves()
        self.retain()

    def ack_all(self, source: str = "") -> int:
        """Acknowledge what waits now; returns how many of them this call acknowledged."""
        wanted = os.fsencode(source)
        names = [row[2] for row in self._scan() if not wanted or row[3] == wanted]
        if not names:
            return 0
        self._make_processed()
        count = sum(self._move(name) for name in names)
        if count:
            self._sync_moves()
            self.retain(at_once=True)
        return count

    def prune(self, max_bytes: int | None = None) -> Pruned:
        """Delete the oldest processed events until the rest fits; pending ones are never touched.

        Hidden files of publishers that died more than an hour ago go as well.
        """
        limit = self.config().retention_max_bytes if max_bytes is None else max_bytes
        result = Pruned(limit)
        self._sweep_temps()
        processed = os.path.join(self.path, PROCESSED)
        if not os.path.exists(processed):
            result.found = False
            return result
        rows = sorted((us, name, size) for name, us, size in _files(processed) if us is not None)
        result.total_bytes = sum(size for _, _, size in rows)
        for _, name, size in rows:
            if result.total_bytes <= limit:
                break
            try:
                os.unlink(os.path.join(processed, name))
            except FileNotFoundError:  # another prune was faster: it is gone, and not by us
                result.total_bytes -= size
            except OSError as error:
                result.failed.append((os.fsdecode(name), os.strerror(error.errno or 0)))
            else:
                result.total_bytes -= size
                result.count += 1
        return result

    def retain(self, *, at_once: bool = False) -> None:
        """Prune where ``config.yaml`` says how much is kept: at most every ten seconds, unless
        ``at_once``, because a look at all that was processed takes its time.
        """
        if not self.config().keeps_bytes:
            return
        note = os.path.join(self.path, _PRUNED)
        try:
            due = at_once or time.time_ns() - os.stat(note).st_mtime_ns > _PRUNE_EVERY_NS
        except OSError:
            due = True
        if due:
            try:
                self.prune()
                os.close(os.open(note, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))
                os.utime(note)
            except OSError:  # the next command tries again: what was acknowledged stays so
                pass

    def notice_config(self) -> str | None:
        """Publish ``config-change`` if ``config.yaml`` is another one than was last noticed; the
        name of the event. The first look only takes note.
        """
        note = os.path.join(self.path, _NOTICED)
        now, before = _read(os.path.join(self.path, CONFIG)), _read(note)
        if now == before or (now is None and before is None):
            return None
        try:
            fd = self._lock()
        except OSError:  # this user may only read
            return None
        try:
            now, before = _read(os.path.join(self.path, CONFIG)), _read(note)
            if now == before:
                return None
            told = None
            if before is not None:
                told = self.publish(
                    "nbs-bus", "config-change", payload=now or b"", dedup_window_s=0
                )
            temp = note + b".%d" % os.getpid()
            with open(temp, "wb") as file:
                file.write(now or b"")
            os.replace(temp, note)  # noqa: TID251 -- nbs-bus starts without log.atomic
            return told
        except OSError:
            return None
        finally:
            os.close(fd)

    def status(self) -> Status:
        result = Status()
        result.ack_timeout_s = timeout_s = self.config().ack_timeout_s
        now_us = time.time_ns() // 1000
        for rank, us, *_ in self._scan():
            result.counts[rank] += 1
            result.last_us = max(result.last_us, us)
            if result.pending == 1 or us < result.oldest_us:
                result.oldest_us = us
            result.stale += timeout_s > 0 and now_us - us > timeout_s * 1_000_000
        processed = os.path.join(self.path, PROCESSED)
        if os.path.isdir(processed):
            for _, us_of, size in _files(processed):
                result.processed += 1
                result.processed_bytes += size
                result.last_us = max(result.last_us, us_of or 0)
            if result.processed:  # an acknowledgement moves a file there
                moved_us = os.stat(processed).st_mtime_ns // 1000
                result.last_us = max(result.last_us, moved_us)
        return result

    def config(self) -> SpoolConfig:
        text = _read(os.path.join(self.path, CONFIG))
        return SpoolConfig() if text is None else parse_config(text)

    def wait(self, source: str = "", timeout_s: float | None = None) -> list[Pending]:
        """Block until something is pending and return it; an empty list when time is up.

        inotify wakes it where there is any and ``config.yaml`` does not say ``notify: poll``;
        otherwise it looks every ``poll-interval`` seconds.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        rows = self.pending(source)
        if rows or timeout_s == 0:
            return rows
        for _ in self._ticks(deadline):
            self.notice_config()
            rows = self.pending(source)
            if rows:
                return rows
        return []

    def _ticks(self, deadline: float | None) -> Iterator[None]:
        """One tick after each change of the directory, and now and then without one."""
        config = self.config()
        poll_s = max(config.poll_s, 0.05)
        watch = None
        if config.notify != "poll":
            import select

            from trunkline.folder.inotify import Inotify

            try:
                watch = Inotify([os.fsdecode(self.path)])
                # A change in the moment before the watch began would go unseen, and so would one
                # that the kernel dropped: the slice bounds how long either can stay so.
                poll_s = min(_WATCH_SLICE_S, poll_s)
            except OSError:  # none is left, or the system has none
                pass
        try:
            while (left := _left(deadline)) > 0:
                if watch is None:
                    time.sleep(min(poll_s, left))
                else:
                    select.select([watch.fd], [], [], min(poll_s, left))
                    watch.changes()
                yield
        finally:
            if watch is not None:
                watch.close()

    def _scan(self) -> Iterator[tuple[int, int, bytes, bytes, bytes]]:
        """(rank, µs, name, source, type) of every pending event, in no order."""
        base = self.path + b"/"
        for name, us, _ in _files(self.path, sizes=False):
            if us is None:
                continue
            head = read_head(base + name)
            if head is not None:
                fields = header(head)
                rank = _RANK.get(fields.get(b"priority", b""), 2)
                yield rank, us, name, fields.get(b"source", b""), fields.get(b"type", b"")

    def _refuse_duplicate(self, key: bytes, window_us: int, seen: set[bytes]) -> None:
        cutoff = time.time_ns() // 1000 - window_us
        for name, us, _ in _files(self.path, sizes=False):
            if us is None or us < cutoff or name in seen:
                continue
            head = read_head(os.path.join(self.path, name))
            if head is not None and header(head).get(b"dedup-key") == key:
                from trunkline.errors import Duplicate

                raise Duplicate(
                    f"event {os.fsdecode(key)} dropped (duplicate within window)",
                    key=os.fsdecode(key),
                    name=os.fsdecode(name),
                )
            seen.add(name)

    def _show(self, temp: bytes, name: bytes, key: bytes, window_us: int, seen: set[bytes]) -> None:
        source, target = os.path.join(self.path, temp), os.path.join(self.path, name)
        if not window_us:
            _rename(source, target)
        else:
            # The slow part, writing and syncing, is over. Of two that race, the second to get the
            # lock looks at what the first one showed and drops its own.
            fd = self._lock()
            try:
                self._refuse_duplicate(key, window_us, seen)
                _rename(source, target)
            finally:
                os.close(fd)
        _sync_dir(self.path)

    def _lock(self) -> int:
        import fcntl

        # Never unlinked: removing it would let two holders lock two different files.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(os.path.join(self.path, LOCK), flags, 0o666)
        fcntl.flock(fd, fcntl.LOCK_EX)
        return fd

    def _make_processed(self) -> None:
        try:  # noqa: SIM105 -- contextlib is an import too many
            os.mkdir(os.path.join(self.path, PROCESSED), 0o755)
        except FileExistsError:
            pass

    def _write_temp(self, body: bytes) -> tuple[int, bytes]:
        """Write and sync ``body`` under a hidden name that nobody else has; returns its time too.

        The time is unique in this process, so no two of its events can share a name.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        while True:
            us = _next_us()
            temp = b"%b%d-%d.event" % (TEMP, us, os.getpid())
            path = os.path.join(self.path, temp)
            try:
                fd = os.open(path, flags, 0o666)
                break
            except FileExistsError:  # another container with our process id
                continue
        try:
            view = memoryview(body)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        except BaseException:
            _unlink(path)
            raise
        finally:
            os.close(fd)
        return us, temp

    def _move(self, name: bytes) -> bool:
        source, target = os.path.join(self.path, name), os.path.join(self.path, PROCESSED, name)
        try:
            os.rename(source, target)  # noqa: TID251 -- as in _rename
        except FileNotFoundError:
            return False
        return True

    def _sync_moves(self) -> None:
        # The new name first: a crash in between may show an event twice, never not at all.
        _sync_dir(os.path.join(self.path, PROCESSED))
        _sync_dir(self.path)

    def _sweep_temps(self) -> None:
        oldest = time.time_ns() // 1000 - _TEMP_AGE_US
        for name in os.listdir(self.path):
            if name.startswith(TEMP) and name.endswith(SUFFIX):
                us = leading_us(name[len(TEMP) :])
                if us is not None and us < oldest:
                    _unlink(os.path.join(self.path, name))


_RANK = {name.encode(): rank for rank, name in enumerate(PRIORITIES)}
_last_us = 0
_us_lock = _thread.allocate_lock()
os.register_at_fork(after_in_child=lambda: _us_lock.release() if _us_lock.locked() else None)


def _next_us() -> int:
    global _last_us
    with _us_lock:
        _last_us = max(time.time_ns() // 1000, _last_us + 1)
        return _last_us


def _check_event(
    source: str | bytes, type_: str | bytes, priority: str, dedup_key: str | None
) -> tuple[bytes, bytes, bytes]:
    source, type_ = as_bytes(source), as_bytes(type_)
    for label, text in (("source", source), ("type", type_)):
        if not text or any(byte in SPACES for byte in text):
            from trunkline.errors import InvalidName

            what = f"not contain whitespace: '{os.fsdecode(text)}'" if text else "not be empty"
            raise InvalidName(f"{label} must {what}", name=os.fsdecode(text))
    if priority not in PRIORITIES:
        from trunkline.errors import InvalidOption

        raise InvalidOption(
            f"invalid priority '{priority}' (use: {', '.join(PRIORITIES)})", name="priority"
        )
    key = b"%b:%b" % (source, type_) if dedup_key is None else as_bytes(dedup_key)
    if b"\n" in key:
        from trunkline.errors import InvalidName

        raise InvalidName("a dedup key is one line", name=dedup_key)
    return source, type_, key


def _check_name(name: str) -> bytes:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        from trunkline.errors import InvalidName

        raise InvalidName(f"invalid event filename (path traversal): {name}", name=name)
    if name.startswith("."):  # our lock, and what a publisher has not finished
        raise _not_found(name)
    return os.fsencode(name)


def _not_found(name: str) -> Exception:
    from trunkline.errors import NotFound

    return NotFound(f"event not found: {name}", name=name)


def _files(path: bytes, *, sizes: bool = True) -> Iterator[tuple[bytes, int | None, int]]:
    """(name, µs of the name or None, size) of the regular files that look like events."""
    with os.scandir(path) as entries:
        for entry in entries:
            name = entry.name
            if len(name) < 7 or name[-6:] != SUFFIX:
                continue
            try:
                if entry.is_file():
                    yield name, leading_us(name), entry.stat().st_size if sizes else 0
            except OSError:  # it went away while we looked
                continue


def _read(path: bytes) -> bytes | None:
    """What the file begins with. A pipe in its place is not waited for."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            return file.read(_CONFIG_BYTES)
    except OSError:
        return None


def _left(deadline: float | None) -> float:
    return 3600.0 if deadline is None else deadline - time.monotonic()


def _rename(source: bytes, target: bytes) -> None:
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
    # log.atomic would cost its imports on every nbs-bus call, and its files are private (0600);
    # these belong to every program that works on the directory.
    os.rename(source, target)  # noqa: TID251


def _unlink(path: bytes) -> None:
    try:  # noqa: SIM105 -- contextlib is an import too many
        os.unlink(path)
    except OSError:
        pass


def _sync_dir(path: bytes) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
