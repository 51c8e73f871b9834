"""``trunkline backup`` and ``restore``: a bus folder as one copy, taken while others write to it.

A copy holds groups first and logs after them, so that no group is ahead of its log. Of a log it
holds what its head shows at one moment: finished files, and the last one up to the head's end. The
files are opened together and read from there, so that removing one meanwhile takes nothing away.

An archive comes from anywhere: only plain files under the names a bus has are taken from it, and no
more of them than it could honestly hold.
"""

from __future__ import annotations

import argparse
import gzip
import io
import os
import re
import secrets
import shutil
import stat
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import IO, Any, NamedTuple, Protocol

from msgspec.structs import replace

from trunkline.cli import ERROR, OK, Commands, leaf
from trunkline.cli.arguments import bus_path, open_folder
from trunkline.cli.folder import verify_topics
from trunkline.cli.render import Printer, Progress, amount, progress, size
from trunkline.delivery.deadletters import keeps_books
from trunkline.errors import Conflict, InvalidOption, NoBus, StorageError
from trunkline.folder import Folder
from trunkline.folder.group_file import GroupFile
from trunkline.log import atomic, layout
from trunkline.log import head as heads
from trunkline.log.segment import Entry, Segment, index_frames, index_line
from trunkline.names import GroupKey
from trunkline.options import StoreOptions

_CHUNK = 1024 * 1024
_ARCHIVE = (".tar.gz", ".tgz")
_OTHER_ARCHIVES = (".tar", ".gz", ".zip", ".zst", ".xz", ".bz2", ".7z")
_NAME = re.compile(
    r"(?:bus|topics)\.json|(?:wal|dlq|offsets|quarantine)/[A-Za-z0-9_~-][A-Za-z0-9_.~-]{0,254}"
    r"|tlog/(?:offsets|partitions)|tlog/(?:wal|dlq)/[A-Za-z0-9_~-][A-Za-z0-9_.~-]{0,254}"
    r"/(?:checkpoint|removed\.[0-9a-f]{16}|tile/\d{1,2}/(?:x\d{3}/){0,6}\d{3}(?:\.p/\d{1,3})?)"
)
_TREES = "tlog"  # what was signed: see guard/tree
_FOLDERS = ("wal", "dlq", "offsets", "quarantine")
_FILES_MAX = 1_000_000
_RATIO_MAX = 200  # JSON lines compress 5 to 30 times, the same event over and over 100 times
_RATIO_FREE = 64 * 1024 * 1024  # a small archive may hold this much whatever its ratio
_TRIES = 20


def register(commands: Commands[Any]) -> None:
    backup = leaf(commands, "backup", run_backup, "copy a bus folder, also while it is written")
    backup.add_argument("dest", metavar="DEST", help="a new folder, or a .tar.gz or .tgz file")
    backup.add_argument("--force", action="store_true", help="replace an archive that is there")

    restore = leaf(commands, "restore", run_restore, "make a bus folder from a backup")
    restore.add_argument("source", metavar="SRC", help="a folder or archive made by backup")
    restore.add_argument("dest", metavar="DEST", help="the new bus folder")
    restore.add_argument("--force", action="store_true", help="replace the folder that is there")
    restore.add_argument("--dry-run", action="store_true", help="only check the source")


class Sink(Protocol):
    """Where the files of a copy go."""

    def put(self, name: str, file: IO[bytes], length: int) -> None: ...


class _ToFolder:
    def __init__(self, path: str) -> None:
        self._path = path
        atomic.make_dir(path)

    def put(self, name: str, file: IO[bytes], length: int) -> None:
        path = os.path.join(self._path, name)
        atomic.make_dir(os.path.dirname(path))
        fd = atomic.create_file(path, os.O_WRONLY)
        try:
            while length > 0:
                data = file.read(min(_CHUNK, length))
                if not data:
                    raise StorageError(f"{name} is shorter than it says")
                atomic.write_all(fd, data)
                length -= len(data)
            atomic.sync(fd)
        except OSError as error:
            raise atomic.storage_error(error, path) from error
        finally:
            os.close(fd)


class _ToArchive:
    def __init__(self, tar: tarfile.TarFile, now: float) -> None:
        self._tar = tar
        self._now = now

    def put(self, name: str, file: IO[bytes], length: int) -> None:
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode, entry.mtime = length, 0o600, int(self._now)
        self._tar.addfile(entry, file)


# -- backup ------------------------------------------------------------------------------------


def run_backup(args: argparse.Namespace) -> int:
    given = os.path.abspath(args.dest)  # it says what is asked for, not what a link of it leads to
    dest, packed = os.path.realpath(given), given.endswith(_ARCHIVE)
    if not packed and given.endswith(_OTHER_ARCHIVES):
        raise InvalidOption("an archive ends in .tar.gz or .tgz", hint="any other name is a folder")
    _check_free(dest, packed=packed, force=args.force)
    temp = f"{dest}.{secrets.token_hex(4)}.tmp"
    with closing(open_folder(args)) as folder:
        home = os.path.realpath(folder.path)
        if os.path.commonpath([dest, home]) == home:
            raise InvalidOption("a bus cannot hold its own backup", hint="another place for DEST")
        atomic.make_dir(os.path.dirname(dest))
        try:
            with progress(args, "copying") as step, _sink(temp, packed, folder) as sink:
                files, count = _copy(folder, sink, step)
            atomic.move_file(temp, dest)
        finally:
            _discard(temp)
    row = {"path": dest, "files": files, "bytes": count}
    Printer(args).row(row, f"copied {amount(files, 'file')}, {size(count)}, to {dest}")
    return OK


def _check_free(dest: str, *, packed: bool, force: bool) -> None:
    if packed:
        if os.path.lexists(dest) and not (force and os.path.isfile(dest)):
            raise Conflict(f"{dest} is there already", hint="--force replaces it")
    elif os.path.lexists(dest) and not (os.path.isdir(dest) and not os.listdir(dest)):
        raise Conflict(f"{dest} is there already and not an empty folder")


@contextmanager
def _sink(temp: str, packed: bool, folder: Folder) -> Iterator[Sink]:
    if not packed:
        yield _ToFolder(temp)
        atomic.sync_dir(temp)
        return
    fd = atomic.create_file(temp, os.O_WRONLY)
    with os.fdopen(fd, "wb") as file:
        with tarfile.open(fileobj=file, mode="w:gz", compresslevel=6) as tar:
            yield _ToArchive(tar, folder.clock.now().timestamp())
        file.flush()
        atomic.sync(fd)


def _discard(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.exists(path):
        os.unlink(path)


def _copy(folder: Folder, sink: Sink, step: Progress) -> tuple[int, int]:
    """Returns how many files and bytes were copied."""
    files = count = 0

    def put(name: str, file: IO[bytes], length: int) -> None:
        nonlocal files, count
        sink.put(name, file, length)
        files, count = files + 1, count + length

    _copy_trees(folder, put)  # first: a checkpoint speaks of no more than the log that is copied
    # A redriven letter is given to its group, then closed: a copy that has the books first loses
    # none.
    for key in sorted(folder.groups(), key=lambda key: (not keeps_books(key), key)):
        _copy_group(folder, key, put)
    _copy_file(folder.path, "topics.json", put)
    partitions = _partitions(folder)
    for done, (topic, partition) in enumerate(partitions):
        _copy_partition(folder, topic, partition, put)
        step(done + 1, len(partitions))
    for name in sorted(folder.names("quarantine")):
        _copy_file(folder.path, f"quarantine/{name}", put)
    _copy_file(folder.path, "bus.json", put)
    return files, count


def _copy_trees(folder: Folder, put: _Put) -> None:
    """The signed offsets and list of partitions, and each tree as it is between two signatures."""
    root = os.path.join(folder.path, _TREES)
    for name in ("offsets", "partitions"):
        _copy_file(folder.path, f"{_TREES}/{name}", put)
    for where, _, names in sorted(os.walk(root)):
        if "checkpoint" not in names or "lock" not in names:
            continue
        lock = os.path.join(where, "lock")
        fd = atomic.open_file(lock, os.O_RDWR)
        try:
            atomic.lock(fd, folder.options.lock_timeout_s, lock, shared=True)
            for inner, _, files in sorted(os.walk(where)):
                for file in sorted(files):
                    name = os.path.relpath(os.path.join(inner, file), folder.path)
                    if _NAME.fullmatch(name):
                        _copy_file(folder.path, name, put)
        finally:
            os.close(fd)


class _Put(Protocol):
    def __call__(self, name: str, file: IO[bytes], length: int) -> None: ...


def _copy_file(root: str, name: str, put: _Put) -> None:
    try:
        fd = atomic.open_file(os.path.join(root, name), os.O_RDONLY)
    except FileNotFoundError:
        return
    with os.fdopen(fd, "rb") as file:
        put(name, file, os.fstat(fd).st_size)


def _copy_group(folder: Folder, key: GroupKey, put: _Put) -> None:
    """A group's files as they are between two steps of its members."""
    timeout_s = folder.options.lock_timeout_s
    file = GroupFile(folder.path, key, folder.clock, timeout_s, read_only=True)
    with closing(file), file.locked():
        for ending in (".json", ".json.bak", ".journal"):
            _copy_file(folder.path, layout.group_stem(*key) + ending, put)


def _partitions(folder: Folder) -> list[tuple[str, int]]:
    """Every partition that has files, whether its topic is defined or not."""
    topics = sorted(folder.topics().items())
    return [(topic, n) for topic, options in topics for n in range(options.partitions)]


class _Opened(NamedTuple):
    name: str
    file: IO[bytes]
    length: int


def _copy_partition(folder: Folder, topic: str, partition: int, put: _Put) -> None:
    for _ in range(_TRIES):
        with ExitStack() as stack:
            try:
                head, opened = _open_partition(folder, topic, partition, stack)
            except FileNotFoundError:  # a file went while they were opened: look again
                continue
            for name, file, length in opened:
                put(name, file, length)
            if head is not None:
                line = heads.encode(head)
                stem = layout.log_stem(topic, partition)
                put(f"{stem}.head", io.BytesIO(line), len(line))
            return
    raise StorageError(f"the files of {topic}/{partition} keep changing", hint="try again")


def _open_partition(
    folder: Folder, topic: str, partition: int, stack: ExitStack
) -> tuple[heads.Head | None, list[_Opened]]:
    reader = folder.fresh_reader(topic, partition)
    stack.callback(reader.close)
    head = reader.head()
    opened: list[_Opened] = []
    for segment in reader.files():
        if segment.number > head.segment:
            continue
        active = segment.number == head.segment and not segment.bad
        name = os.path.relpath(segment.path, folder.path)
        file = stack.enter_context(os.fdopen(atomic.open_file(segment.path, os.O_RDONLY), "rb"))
        length = head.end if active else os.fstat(file.fileno()).st_size
        opened.append(_Opened(name, file, length))
        if not segment.bad:
            index = b"".join(map(index_line, _entries(segment, file, length)))
            index_name = os.path.relpath(segment.index_path, folder.path)
            opened.append(_Opened(index_name, io.BytesIO(index), len(index)))
    if reader.head().start != head.start:
        raise FileNotFoundError
    if not opened and head == heads.Head():
        return None, opened
    return replace(head, durable=head.end), opened


def _entries(segment: Segment, file: IO[bytes], length: int) -> list[Entry]:
    """The index of what was opened. The one beside a compressed file is trusted to find its
    frames, and may by now be that of a newer file: it is made anew.
    """
    if segment.packed:
        entries = index_frames(segment.path, file.read(length))
        file.seek(0)
        return entries
    return [entry for entry in segment.entries() if entry.position < length]


# -- restore -----------------------------------------------------------------------------------


def run_restore(args: argparse.Namespace) -> int:
    source = os.path.abspath(args.source)
    place = bus_path(args.dest) if args.dest.startswith("file:") else args.dest
    dest = os.path.realpath(place)  # not a link to it: what it leads to is the bus
    if not os.path.exists(source):
        raise NoBus(f"there is no backup at {source}")
    taken = os.path.lexists(dest) and not (os.path.isdir(dest) and not os.listdir(dest))
    if taken:
        if not args.force:
            raise Conflict(f"{dest} is not empty", hint="--force replaces what is there")
        _check_unused(dest)
    atomic.make_dir(os.path.dirname(dest))
    temp = f"{dest}.{secrets.token_hex(4)}.tmp"
    out = Printer(args)
    try:
        with progress(args, "restoring") as step:
            files, count = _unpack(source, temp, step)
            problems = _check(temp, args, step)
        for problem in problems:
            out.note(problem)
        if not args.dry_run:
            if taken:
                old = f"{dest}.{secrets.token_hex(4)}.old"
                try:
                    atomic.move_file(dest, old)
                    atomic.move_file(temp, dest)
                except BaseException:
                    if not os.path.lexists(dest):
                        atomic.move_file(old, dest)
                    raise
                _discard(old)
            else:
                atomic.move_file(temp, dest)
    finally:
        _discard(temp)
    row = {"path": dest, "files": files, "bytes": count, "dry_run": args.dry_run}
    verb = "would restore" if args.dry_run else "restored"
    out.row(
        row | {"problems": problems}, f"{verb} {amount(files, 'file')}, {size(count)}, to {dest}"
    )
    return ERROR if problems else OK


def _check_unused(dest: str) -> None:
    members = os.path.join(dest, "members")
    names = os.listdir(members) if os.path.isdir(members) else []
    if any(atomic.is_locked(os.path.join(members, name)) for name in names):
        raise Conflict(f"a running process uses {dest}", hint="stop it first")


def _check(path: str, args: argparse.Namespace, step: Progress) -> list[str]:
    """Open what was restored and check all of it."""
    if not os.path.exists(os.path.join(path, "bus.json")):
        raise InvalidOption("this is no backup of a bus", hint="bus.json is missing")
    options = StoreOptions(create=False, allow_network=args.allow_network)
    with closing(Folder(path, options)) as folder:
        topics = {name: options.partitions for name, options in folder.topics().items()}
        return [
            f"{finding.path} byte {finding.position}: {finding.problem}"
            for finding in verify_topics(folder, topics, step)
            if finding.severe
        ]


def _unpack(source: str, temp: str, step: Progress) -> tuple[int, int]:
    sink = _ToFolder(temp)
    names: set[str] = set()
    count = 0
    entries = _walk(source) if os.path.isdir(source) else _read_archive(source)
    try:
        for name, file, length in entries:
            if name in names or len(names) >= _FILES_MAX:
                raise InvalidOption(f"the backup holds {name} twice, or too many files")
            names.add(name)
            sink.put(name, file, length)
            count += length
            step(len(names), 0)
    except (tarfile.TarError, zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise InvalidOption(f"not a readable archive: {error}: nothing was restored") from None
    return len(names), count


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name) or ".." in name.split("/"):
        raise InvalidOption(f"a backup of a bus has no {name[:80]!r}: it was not restored")
    return name


def _walk(source: str) -> Iterator[_Opened]:
    for place in ("", *_FOLDERS):
        folder = os.path.join(source, place)
        for entry in (
            sorted(os.scandir(folder), key=lambda e: e.name) if os.path.isdir(folder) else ()
        ):
            name = os.path.join(place, entry.name)
            if not place and (entry.name in _FOLDERS or not _NAME.fullmatch(entry.name)):
                continue  # a folder in use holds members, a reserve: they are not restored
            if name.endswith((".lock", ".tmp")):
                continue
            if not stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
                raise InvalidOption(f"not a plain file: {name}: nothing was restored")
            with os.fdopen(atomic.open_file(entry.path, os.O_RDONLY), "rb") as file:
                yield _Opened(_checked(name), file, os.fstat(file.fileno()).st_size)
    yield from _walk_trees(source)


def _walk_trees(source: str) -> Iterator[_Opened]:
    for where, _, names in sorted(os.walk(os.path.join(source, _TREES))):
        for file in sorted(names):
            path = os.path.join(where, file)
            name = os.path.relpath(path, source)
            if file == "lock" or file.endswith(".tmp"):
                continue
            with os.fdopen(atomic.open_file(path, os.O_RDONLY), "rb") as opened:
                yield _Opened(_checked(name), opened, os.fstat(opened.fileno()).st_size)


def _read_archive(source: str) -> Iterator[_Opened]:
    allowed = max(_RATIO_FREE, _RATIO_MAX * os.path.getsize(source))
    seen = 0
    with tarfile.open(source, "r|*") as tar:
        for entry in tar:
            if entry.isdir() and entry.name.rstrip("/") in _FOLDERS:
                continue
            name = _checked(entry.name)
            if entry.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
                raise InvalidOption(f"not a plain file: {name}: nothing was restored")
            seen += entry.size
            if seen > allowed or entry.size < 0:
                raise InvalidOption(
                    f"the archive would unpack to more than {size(allowed)}, which no backup "
                    "of that size does: nothing was restored"
                )
            file = tar.extractfile(entry)
            assert file is not None
            yield _Opened(name, file, entry.size)
