"""The root of a bus folder: where it is, whose it is, and whether this process has it open."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from enum import Enum

from trunkline.clock import Clock, SystemClock
from trunkline.errors import Closed, NoBus, StorageError, StorageFull, TrunklineError
from trunkline.event import new_id
from trunkline.explain import spelt
from trunkline.folder import identity
from trunkline.log import atomic
from trunkline.options import StoreOptions

_FOLDERS = ("wal", "offsets", "dlq", "members")
_OURS = (*_FOLDERS, "reserve", "lost+found")
_OURS_BEGIN = ("bus.json", "topics.json", "reserve.", ".")  # bus.json.1a2b3c4d.tmp, .gitignore


class FolderLife(Enum):
    OPEN = "open"
    CLOSED = "closed"


class Root:
    """Opens the folder, and makes it if there is none and the options say so."""

    def __init__(self, path: str, options: StoreOptions | None, clock: Clock | None) -> None:
        self.path = os.path.abspath(path)
        self.options = options or StoreOptions()
        self.clock = clock or SystemClock()
        self._life = FolderLife.OPEN
        self._pid = os.getpid()
        try:
            self.id = self._open()
        except NotADirectoryError as error:
            why = f"there is no bus at {self.path}: it is, or is in, a file"
            raise NoBus(why, path=self.path, hint="a bus is a folder") from error
        except OSError as error:
            kind = StorageFull if error.errno in atomic.FULL else StorageError
            why = f"{self.path} cannot be opened: {error.strerror}"
            hint = f"see its permissions: ls -ld {self.path}" if error.errno == errno.EACCES else ""
            raise kind(why, path=self.path, errno=error.errno, hint=hint) from error

    def _open(self) -> str:
        path = os.path.join(self.path, "bus.json")
        try:
            os.stat(path)
        except FileNotFoundError:
            # A folder without the file is adopted if it looks like a bus, made if it is empty.
            if not self.options.create and not os.path.isdir(os.path.join(self.path, "wal")):
                why = f"there is no bus at {self.path}"
                raise NoBus(why, path=self.path, hint="trunkline init makes one") from None
            atomic.make_dir(self.path)
            self._refuse_strangers()
        kind = atomic.network_kind(self.path)
        if kind is not None and not self.options.allow_network:
            raise StorageError(
                f"{self.path} is on a network file system ({kind}), where locks cannot be trusted",
                path=self.path,
                hint="use a local disk, or allow_network=True if one process uses it at a time",
            )
        try:
            self._make(path)
        except OSError as error:
            if self.options.create or error.errno not in atomic.READ_ONLY:
                raise  # else the records can be read
        return identity.read(path)

    def _refuse_strangers(self) -> None:
        """A bus has a folder of its own: a folder with other files is none by mistake."""
        names = os.listdir(self.path)
        if "wal" in names and any(n.endswith((".head", ".jsonl")) for n in self.names("wal")):
            return  # a bus that lost its bus.json
        found = sorted(n for n in names if n not in _OURS and not n.startswith(_OURS_BEGIN))
        if found:
            raise NoBus(
                f"there is no bus at {self.path}, and it has other files: {spelt(found[0])}",
                path=self.path,
                hint=f"name a folder of its own, such as file:{os.path.join(self.path, 'bus')}",
            )

    def _make(self, path: str) -> None:
        for name in _FOLDERS:
            atomic.make_dir(os.path.join(self.path, name))
        if not os.path.exists(path):
            with self.locked():
                if not os.path.exists(path):
                    now = self.clock.now().isoformat()
                    atomic.replace_file(path, identity.encode(new_id(), now))

    def problem(self) -> str:
        """Why nothing can be written any more: the folder was removed, replaced or made read-only
        since it was opened. "" if none of that happened.
        """
        path = os.path.join(self.path, "bus.json")
        try:
            if not os.path.isfile(path):
                return f"the folder {self.path} is gone" if self.id else ""
            if identity.read(path) != self.id:
                return f"another bus has taken the place of {self.path}"
            space = os.statvfs(self.path)
            if space.f_flag & os.ST_RDONLY or not os.access(self.path, os.W_OK):
                return f"the folder {self.path} is read-only"
        except (OSError, TrunklineError) as error:
            return f"the folder {self.path} cannot be read: {error}"
        return ""

    def names(self, place: str) -> list[str]:
        """The files of a folder in it; none if this process may only read, and the folder was
        never made.
        """
        path = os.path.join(self.path, place)
        try:
            return os.listdir(path)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise atomic.storage_error(error, path) from error

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """The lock of the folder itself, for files that are neither a partition's nor a group's."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            atomic.lock(fd, self.options.lock_timeout_s, self.path)
            yield
        finally:
            os.close(fd)

    @property
    def is_forked(self) -> bool:
        """Whether another process opened it, and this one is its child."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """``Closed`` unless this process has the folder open."""
        if os.getpid() != self._pid:
            raise Closed("this bus was opened before a fork", hint="open it again in the child")
        if self._life is not FolderLife.OPEN:
            raise Closed("the bus is closed")

    def close(self) -> bool:
        """End its use. False if it was closed before."""
        was, self._life = self._life, FolderLife.CLOSED
        return was is FolderLife.OPEN
