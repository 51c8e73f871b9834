"""Errors of the operating system, as whoever uses a store meets them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from trunkline.errors import StorageError
from trunkline.event import Event
from trunkline.folder import Folder
from trunkline.group import Group
from trunkline.names import GroupKey
from trunkline.options import GroupOptions, StoreOptions, TopicOptions
from trunkline.store.file import FileStore

TOPIC = "t"
KEY = GroupKey(TOPIC, 0, "g")


@contextlib.contextmanager
def no_more_files() -> Iterator[None]:
    """No file can be opened meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[FileStore]:
    store = FileStore(os.fspath(tmp_path), reserve_bytes=0)
    await store.append("known", [Event(topic="known")])
    await asyncio.to_thread(int)  # a first thread takes files, too
    yield store
    await store.close()


@pytest.mark.parametrize(
    "use",
    [
        lambda store: store.append(TOPIC, [Event(topic=TOPIC)]),
        lambda store: store.read(TOPIC, 0, 1, 1),
        lambda store: store.bounds(TOPIC, 0),
        lambda store: store.seek(TOPIC, 0, datetime.now(UTC)),
        lambda store: store.trim("known", 0, 2),
        lambda store: store.update(KEY, lambda group: group.floor),
        lambda store: store.groups(),
        lambda store: store.topics(),
        lambda store: store.define(TOPIC, TopicOptions(partitions=2)),
        lambda store: store.define("known", None),
    ],
    ids=[
        "append",
        "read",
        "bounds",
        "seek",
        "trim",
        "update",
        "groups",
        "topics",
        "define",
        "remove",
    ],
)
async def test_without_a_file_to_open_it_is_the_storage_that_fails(
    store: FileStore, use: Callable[[FileStore], Any]
) -> None:
    with no_more_files(), pytest.raises(StorageError) as caught:
        await asyncio.wait_for(use(store), 20)
    assert caught.value.errno == errno.EMFILE
    await asyncio.wait_for(use(store), 20)


async def test_a_step_that_was_taken_does_not_fail_for_want_of_a_new_journal(
    tmp_path: Path,
) -> None:
    """Else nobody would know of the leases that it took."""
    store = FileStore(os.fspath(tmp_path), reserve_bytes=0, snapshot_bytes=1024)
    await store.update(KEY, lambda group: group.define(GroupOptions(), 0))
    with no_more_files():
        for offset in range(1, 60):
            step = partial(Group.settle, offsets=[offset])
            assert await store.update(KEY, step) == [offset]
    await store.close()


async def test_a_publisher_does_not_wait_for_ever_for_options_that_cannot_be_read(
    store: FileStore,
) -> None:
    other = Folder(store.folder.path, StoreOptions(reserve_bytes=0))
    other.define("another", TopicOptions(partitions=2))
    other.close()
    first = store.append("known", [Event(topic="known")])
    store.folder._topics._look_at = 0.0  # the tenth of a second is over
    with no_more_files(), pytest.raises(StorageError, match=r"topics\.json"):
        await asyncio.wait_for(first, 20)
    assert (await asyncio.wait_for(store.append("known", [Event(topic="known")]), 20))[0].offset
