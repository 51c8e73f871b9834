"""One holder at a time, for a lake in a folder or in an object store.

In a folder a lock of the system is held; it goes with its process. An object store has none. There
a small Delta table names the holder and until when; a process that wants it commits its own name,
and of two at once one commit fails. The holder renews its time while it runs. What a killed holder
left ends after ``LEASE_S``.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from trunkline.check import load_extra
from trunkline.errors import Conflict, LockTimeout
from trunkline.log import atomic

if TYPE_CHECKING:
    from trunkline.spark.lake.storage import Storage

LEASE_S: Final = 60.0
_HOLDER: Final = "trunkline.holder"
_UNTIL: Final = "trunkline.until"
_FOLDER: Final = "_checks"


@contextmanager
def hold(storage: Storage, name: str) -> Iterator[None]:
    """Hold the lock ``name`` of a lake; ``Conflict`` if another has it."""
    taken = Conflict(
        f"pipeline {name} runs already on {storage.root}",
        hint="wait for it, or name another --lake",
    )
    if storage.is_local:
        with _in_folder(storage, name, taken):
            yield
    else:
        with _in_store(storage, name, taken):
            yield


@contextmanager
def _in_folder(storage: Storage, name: str, taken: Conflict) -> Iterator[None]:
    atomic.make_dir(storage.url(_FOLDER))
    path = storage.url(_FOLDER, f"{name}.lock")
    fd = atomic.open_file(path, os.O_RDWR | os.O_CREAT)
    try:
        try:
            atomic.lock(fd, 0.0, path)
        except LockTimeout:
            raise taken from None
        yield
    finally:
        os.close(fd)


@contextmanager
def _in_store(storage: Storage, name: str, taken: Conflict) -> Iterator[None]:
    lock = _StoreLock(storage, f"{_FOLDER}/{name}.lock")
    if not lock.take():
        taken.hint += f"; that of a killed run ends after {LEASE_S:.0f} s"
        raise taken
    ended = threading.Event()
    keeper = threading.Thread(target=lock.renew, args=(ended,), daemon=True)
    keeper.start()
    try:
        yield
    finally:
        ended.set()
        keeper.join()
        lock.free()


class _StoreLock:
    def __init__(self, storage: Storage, path: str) -> None:
        self._delta = load_extra("deltalake", "spark")
        self._where = storage.delta(path)
        self._me = uuid.uuid4().hex

    def take(self) -> bool:
        """Whether it is ours now."""
        field = self._delta.Field("holder", "string")
        self._delta.DeltaTable.create(
            **self._where, schema=self._delta.Schema([field]), mode="ignore"
        )
        table = self._delta.DeltaTable(**self._where)
        found = table.metadata().configuration
        if float(found.get(_UNTIL, 0)) > time.time_ns() / 1e9 and found.get(_HOLDER) != self._me:
            return False
        return self._write(table, LEASE_S)

    def renew(self, ended: threading.Event) -> None:
        while not ended.wait(LEASE_S / 4):
            with suppress(Exception):  # a store that is away for a moment: try again
                self._write(self._delta.DeltaTable(**self._where), LEASE_S)

    def free(self) -> None:
        with suppress(Exception):  # else it ends by itself
            self._write(self._delta.DeltaTable(**self._where), 0.0)

    def _write(self, table: Any, lease_s: float) -> bool:
        """Change the holder, unless another commit was first."""
        until = time.time_ns() / 1e9 + lease_s
        try:
            table.alter.set_table_properties(
                {_HOLDER: self._me, _UNTIL: f"{until:.3f}"},
                raise_if_not_exists=False,
                commit_properties=self._delta.CommitProperties(max_commit_retries=0),
            )
        except self._delta.exceptions.CommitFailedError:
            return False
        return True
