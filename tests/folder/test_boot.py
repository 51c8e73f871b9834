"""``durability: os`` and a power cut: the log may fall back, and a group's journal may not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from trunkline.codec import encode_event
from trunkline.event import Event
from trunkline.folder import Folder
from trunkline.group import Group
from trunkline.names import GroupKey
from trunkline.options import GroupOptions, Limits, StoreOptions, TopicOptions
from trunkline.testing import ManualClock

KEY = GroupKey("t", 0, "g")


def opened(path: Path, boot: str) -> Folder:
    options = StoreOptions(reserve_bytes=0)
    return Folder(os.fspath(path / "bus"), options, ManualClock(boot=boot))


def publish(folder: Folder, first: int, last: int) -> int:
    """Returns the offset of the last one."""
    for n in range(first, last + 1):
        event = Event(topic="t", payload=n)
        placed = folder.append("t", 0, [encode_event(event, Limits())], [event])
    return placed.offsets()[-1]


def unsettled(folder: Folder, last: int) -> list[int]:
    def look(group: Group) -> list[int]:
        return [offset for offset in range(1, last + 1) if not group.is_settled(offset)]

    return folder.step(KEY, look)


def settle(folder: Folder, first: int, last: int) -> None:
    folder.step(KEY, lambda group: group.settle(range(first, last + 1)))


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    """30 records were settled; a power cut took 20 of them and the head that spoke of them."""
    folder = opened(tmp_path, "boot-1")
    folder.define("t", TopicOptions(durability="os"))
    folder.step(KEY, lambda group: group.define(GroupOptions(), 0))
    publish(folder, 1, 10)
    folder.close()
    shutil.copytree(tmp_path / "bus" / "wal", tmp_path / "wal")
    folder = opened(tmp_path, "boot-1")
    publish(folder, 11, 30)
    settle(folder, 1, 30)
    folder.close()
    shutil.rmtree(tmp_path / "bus" / "wal")
    shutil.move(tmp_path / "wal", tmp_path / "bus" / "wal")
    return tmp_path


def test_records_published_after_a_power_cut_are_delivered(cut: Path) -> None:
    folder = opened(cut, "boot-2")
    assert publish(folder, 31, 55) == 35
    folder.close()
    folder = opened(cut, "boot-2")
    assert unsettled(folder, 35) == list(range(11, 36))
    folder.close()


def test_a_group_that_is_opened_first_does_not_stand_ahead_of_its_log(cut: Path) -> None:
    folder = opened(cut, "boot-2")
    assert unsettled(folder, 10) == []
    publisher = opened(cut, "boot-2")
    publish(publisher, 31, 55)
    assert unsettled(folder, 35) == list(range(11, 36))
    settle(folder, 11, 35)
    publisher.close()
    folder.close()

    folder = opened(cut, "boot-2")
    assert unsettled(folder, 35) == []
    folder.close()


def test_a_boot_without_a_loss_delivers_nothing_again(tmp_path: Path) -> None:
    idle = KEY._replace(group="idle")
    for number in range(4):
        folder = opened(tmp_path, f"boot-{number}")
        folder.define("t", TopicOptions(durability="os"))
        folder.step(KEY, lambda group: group.define(GroupOptions(), 0))
        last = publish(folder, 1, 5)
        if number == 1:  # and never again
            folder.step(idle, lambda group: group.define(GroupOptions(), 0))
            folder.step(idle, lambda group: group.settle(range(1, 8)))
        settle(folder, last - 4, last)
        folder.close()
    folder = opened(tmp_path, "boot-9")
    assert unsettled(folder, 20) == []
    assert folder.step(idle, lambda group: group.floor) == 7
    assert folder.head("t", 0).epoch == 5
    folder.close()


def test_a_log_that_is_always_synced_has_one_epoch(tmp_path: Path) -> None:
    for number in range(3):
        folder = opened(tmp_path, f"boot-{number}")
        publish(folder, 1, 2)
        assert (folder.head("t", 0).epoch, folder.head("t", 0).boot) == (1, "")
        folder.close()


def test_a_log_that_falls_back_under_the_same_boot_is_noticed(cut: Path) -> None:
    """Such as a device, or a machine's image, that is put back to an earlier state."""
    folder = opened(cut, "boot-1")
    assert publish(folder, 31, 55) == 35
    folder.close()
    folder = opened(cut, "boot-1")
    assert folder.head("t", 0).epoch == 2
    assert unsettled(folder, 35) == list(range(11, 36))
    settle(folder, 11, 35)
    assert publish(folder, 56, 56) == 36
    folder.close()

    folder = opened(cut, "boot-1")
    assert publish(folder, 57, 57) == 37
    assert folder.head("t", 0).epoch == 2  # nothing fell back since
    assert unsettled(folder, 37) == [36, 37]
    folder.close()
