"""Where a lake's files are: a folder of this machine, or a bucket of an object store.

An object store (``s3://bucket/lake``) is reached by delta-rs for commits and by Arrow for files, so
neither Java nor Hadoop has to know it. Its settings are the variables ``AWS_…`` of the driver, and
executors get them with their work. A commit is a put that fails if the version is there, so that of
two writers one is second.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass, field
from functools import cache
from typing import IO, Any

import pyarrow.fs as pa_fs

from trunkline.errors import InvalidOption
from trunkline.log import atomic

SCHEMES = ("s3://",)


def is_object_store(url: str) -> bool:
    return url.startswith(SCHEMES)


@dataclass(frozen=True)
class Storage:
    """A place for files. Paths are relative to ``root`` and use ``/``."""

    root: str
    options: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, url: str) -> Storage:
        if is_object_store(url):
            names = [name for name in os.environ if name.startswith("AWS_")]
            return cls(url.rstrip("/"), {name: os.environ[name] for name in names})
        if "://" in url.removeprefix("file://"):
            raise InvalidOption(
                f"a lake is a folder or an object store, not {url!r}",
                hint="for example .lake, or s3://bucket/lake",
            )
        return cls(os.path.abspath(url.removeprefix("file://").removeprefix("file:")))

    @property
    def is_local(self) -> bool:
        return not is_object_store(self.root)

    def url(self, *parts: str) -> str:
        return os.path.join(self.root, *parts) if self.is_local else "/".join((self.root, *parts))

    def delta(self, table: str) -> dict[str, Any]:
        """The arguments with which delta-rs opens a table."""
        return {"table_uri": self.url(table), "storage_options": self.options or None}

    def _fs(self) -> Any:
        return _s3(self.root, tuple(sorted(self.options.items())))

    def filesystem(self) -> Any:
        """The place as Arrow sees it, with paths below ``root``."""
        if self.is_local:
            return pa_fs.SubTreeFileSystem(self.root, pa_fs.LocalFileSystem())
        return self._fs()

    def is_there(self) -> bool:
        """Whether something was ever written to it."""
        return os.path.isdir(self.root) if self.is_local else bool(self.files(""))

    def open_new(self, path: str) -> IO[bytes]:
        """A file to write. It is there as a whole once it is closed."""
        if self.is_local:
            atomic.make_dir(os.path.dirname(self.url(path)))
            return open(self.url(path), "xb")
        stream: IO[bytes] = self._fs().open_output_stream(path)
        return stream

    def open_for_reading(self, path: str) -> Any:
        return self.url(path) if self.is_local else self._fs().open_input_file(path)

    def sync(self, path: str) -> None:
        """The file and its name are on the device. An object store has no such step."""
        if not self.is_local:
            return
        fd = os.open(self.url(path), os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        atomic.sync_dir(os.path.dirname(self.url(path)))

    def read(self, path: str) -> bytes | None:
        """The bytes of a small file, None if it is not there."""
        if self.is_local:
            try:
                with open(self.url(path), "rb") as file:
                    return file.read()
            except FileNotFoundError:
                return None
        try:
            with self._fs().open_input_file(path) as file:
                data: bytes = file.read()
                return data
        except FileNotFoundError:
            return None

    def replace(self, path: str, data: bytes) -> None:
        """Write a small file as a whole, in the place of the one that was there."""
        if self.is_local:
            atomic.make_dir(os.path.dirname(self.url(path)))
            atomic.replace_file(self.url(path), data)
            return
        with self._fs().open_output_stream(path) as file:
            file.write(data)

    def files(self, folder: str) -> list[str]:
        """Every file below a folder."""
        if self.is_local:
            found = []
            for place, _, names in os.walk(self.url(folder)):
                found += [os.path.relpath(os.path.join(place, name), self.root) for name in names]
            return sorted(found)
        selector = pa_fs.FileSelector(folder, recursive=True, allow_not_found=True)
        listed = self._fs().get_file_info(selector)
        return sorted(info.path for info in listed if info.type == pa_fs.FileType.File)

    def folders(self, folder: str) -> list[str]:
        """The folders in a folder, by name; those that begin with ``_`` hold no table."""
        if self.is_local:
            place = self.url(folder)
            names = sorted(os.listdir(place)) if os.path.isdir(place) else []
            found = [name for name in names if os.path.isdir(os.path.join(place, name))]
        else:
            start = f"{folder}/" if folder else ""
            paths = (path.removeprefix(start) for path in self.files(folder))
            found = sorted({path.partition("/")[0] for path in paths if "/" in path})
        return [name for name in found if not name.startswith("_")]

    def has(self, path: str) -> bool:
        if self.is_local:
            return os.path.isfile(self.url(path))
        return bool(self._fs().get_file_info(path).type == pa_fs.FileType.File)

    def size(self, path: str) -> int:
        if self.is_local:
            return os.path.getsize(self.url(path))
        return int(self._fs().get_file_info(path).size)

    def remove(self, paths: list[str]) -> None:
        fs = None if self.is_local else self._fs()
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.url(path)) if fs is None else fs.delete_file(path)

    def remove_folder(self, folder: str) -> None:
        if self.is_local:
            shutil.rmtree(self.url(folder), ignore_errors=True)
        else:
            self.remove(self.files(folder))

    def copy(self, source: str, target: str) -> None:
        if self.is_local:
            atomic.make_dir(os.path.dirname(self.url(target)))
            os.link(self.url(source), self.url(target))
            atomic.sync_dir(os.path.dirname(self.url(target)))
        else:
            data = self.read(source)
            assert data is not None
            self.replace(target, data)


@cache
def _s3(root: str, options: tuple[tuple[str, str], ...]) -> Any:
    """The object store as Arrow sees it, with paths below ``root``."""
    given = dict(options)
    endpoint = given.get("AWS_ENDPOINT_URL_S3") or given.get("AWS_ENDPOINT_URL") or ""
    scheme, _, host = endpoint.rpartition("://")
    found = pa_fs.S3FileSystem(
        access_key=given.get("AWS_ACCESS_KEY_ID"),
        secret_key=given.get("AWS_SECRET_ACCESS_KEY"),
        session_token=given.get("AWS_SESSION_TOKEN"),
        region=given.get("AWS_REGION") or given.get("AWS_DEFAULT_REGION"),
        scheme=scheme or "https",
        endpoint_override=host.rstrip("/") or None,
        background_writes=False,
    )
    return pa_fs.SubTreeFileSystem(root.partition("://")[2], found)
