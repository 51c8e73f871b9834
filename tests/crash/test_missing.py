"""A file that is gone, or came back from a backup: the gap is reported, never skipped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import trunkline
from trunkline.errors import Conflict, Corrupt, StorageError, TrunklineError
from trunkline.folder import Folder
from trunkline.log.writer import PartitionWriter
from trunkline.options import TopicOptions

from . import sample
from .promises import OPTIONS, StillClock, append, records_of, values
from .scenes import KEY, TOPIC
from .test_rot import FILES, SETTLED, WHOLE

_DATA = ("wal/t.00000001.jsonl.zst", "wal/t.00000002.jsonl", "wal/t.00000003.jsonl")


@pytest.fixture
def good(tmp_path: Path) -> dict[str, bytes]:
    sample.make(os.fspath(tmp_path / "good"))
    return sample.load(os.fspath(tmp_path / "good"))


@pytest.mark.parametrize("name", FILES)
def test_one_file_is_gone(name: str, good: dict[str, bytes], tmp_path: Path) -> None:
    root = os.fspath(tmp_path / "bus")
    sample.put({k: v for k, v in good.items() if k != name}, root)
    view = sample.look(root)
    if name in _DATA:
        assert isinstance(view.records, Corrupt)
        assert isinstance(view.repaired, Corrupt), "the gap is not forgotten by going on"
        assert "in no readable file" in str(view.records)
    else:
        assert view.records == WHOLE
        assert view.repaired == WHOLE | {12: 12}
        assert not isinstance(view.settled, set) or view.settled <= SETTLED
    if name.endswith((".json", ".bak")) and name.startswith("offsets"):
        assert view.settled == SETTLED


def test_the_last_segment_is_gone_and_no_offset_is_used_again(
    good: dict[str, bytes], tmp_path: Path
) -> None:
    root = os.fspath(tmp_path / "bus")
    sample.put({k: v for k, v in good.items() if k != "wal/t.00000003.jsonl"}, root)
    folder = Folder(root, OPTIONS, StillClock())
    with pytest.raises(Corrupt) as caught:
        append(folder, TOPIC, [12])
    assert "t.00000003.jsonl" in str(caught.value)
    assert append(folder, TOPIC, [12]) == {12: 12}
    assert os.path.exists(f"{root}/wal/t.00000002.jsonl"), "an intact file is left alone"
    assert [record.offset for record in folder.read(TOPIC, 0, 5, 10)] == [5, 6, 7, 8]
    with pytest.raises(Corrupt):
        folder.read(TOPIC, 0, 9, 10)
    assert [record.offset for record in folder.read(TOPIC, 0, 12, 10)] == [12]
    folder.close()


def test_all_that_there_was_is_gone(tmp_path: Path) -> None:
    """One segment and a head that speaks of it: nothing else knows."""
    root = os.fspath(tmp_path)
    folder = Folder(root, OPTIONS, StillClock())
    append(folder, TOPIC, [1, 2, 3])
    folder.close()
    os.unlink(f"{root}/wal/t.00000001.jsonl")
    folder = Folder(root, OPTIONS, StillClock())
    with pytest.raises(Corrupt):
        records_of(folder, TOPIC)
    with pytest.raises(Corrupt):
        append(folder, TOPIC, [4])
    assert append(folder, TOPIC, [4]) == {4: 4}
    folder.close()


@pytest.mark.parametrize("name", ["offsets/t__g.journal", "offsets/t__g.json", "wal/t.head"])
def test_one_file_is_an_older_one(name: str, good: dict[str, bytes], tmp_path: Path) -> None:
    """What it says less than the others, the others say; what only it said is done again."""
    root = os.fspath(tmp_path / "bus")
    sample.put(good, root)
    folder = Folder(root, OPTIONS, StillClock())
    append(folder, TOPIC, [12])
    folder.step(KEY, lambda group: group.settle([5, 8, 9]))
    for _ in range(40):  # enough for a new generation
        folder.step(KEY, lambda group: group.seek(group.floor))
    folder.close()
    with open(os.path.join(root, name), "wb") as file:
        file.write(good[name])
    view = sample.look(root)
    if not isinstance(view.records, TrunklineError):
        assert view.records == WHOLE | {12: 12} or name == "wal/t.head"
    assert view.repaired == WHOLE | {12: 12, 13: 12}
    for error in view.errors:
        assert isinstance(error, StorageError)
        assert "t__g" in str(error)


def test_an_old_segment_in_the_place_of_a_new_one(tmp_path: Path) -> None:
    root = os.fspath(tmp_path)
    folder = Folder(root, OPTIONS, StillClock())
    append(folder, TOPIC, [1])
    before = Path(root, "wal/t.00000001.jsonl").read_bytes()
    append(folder, TOPIC, [2])
    folder.close()
    Path(root, "wal/t.00000001.jsonl").write_bytes(before)
    folder = Folder(root, OPTIONS, StillClock())
    with pytest.raises(Corrupt):
        append(folder, TOPIC, [3])
    assert append(folder, TOPIC, [3]) == {3: 3}
    folder.close()


async def test_a_group_that_is_beyond_the_end_of_the_log_says_so(tmp_path: Path) -> None:
    root = os.fspath(tmp_path / "bus")
    async with trunkline.connect(f"file:{root}") as bus:
        await bus.publish_many("t", [1, 2, 3])
        async with bus.subscribe("t", group="g") as deliveries:
            async for delivery in deliveries:
                await delivery.ack()
                if delivery.offset == 3:
                    break
    for name in ("t.head", "t.00000001.jsonl", "t.00000001.index"):
        os.unlink(f"{root}/wal/{name}")
    async with trunkline.connect(f"file:{root}") as bus:
        await bus.publish("t", 4)
        with pytest.raises(Conflict, match="settled offset 3"):
            async with bus.subscribe("t", group="g"):
                pass


def test_offsets_that_a_power_cut_took_back_are_delivered_when_they_are_used_again(
    tmp_path: Path,
) -> None:
    """Only records that were never synced can be lost like this; the group must notice."""
    root = os.fspath(tmp_path)
    folder = Folder(root, OPTIONS, StillClock())
    folder.define(TOPIC, TopicOptions(durability="os"))
    append(folder, TOPIC, [1])
    folder.writer(TOPIC, 0).sync()
    size = os.stat(f"{root}/wal/t.00000001.jsonl").st_size
    append(folder, TOPIC, [2, 3, 4])
    folder.step(KEY, lambda group: group.define(trunkline.GroupOptions(), 0))
    folder.step(KEY, lambda group: group.settle([1, 2, 3]))
    folder.sync_groups()
    os.truncate(f"{root}/wal/t.00000001.jsonl", size)
    folder.abandon()
    folder = Folder(root, OPTIONS, StillClock())
    assert values(records_of(folder, TOPIC)) == {1: 1}
    assert append(folder, TOPIC, [5, 6, 7, 8]) == {2: 5, 3: 6, 4: 7, 5: 8}
    group = folder.group(KEY)
    assert group.floor == 1
    assert not group.is_settled(2)
    folder.close()
    again = Folder(root, OPTIONS, StillClock())
    again.step(KEY, lambda group: group.settle([2]))
    again.close()
    assert Folder(root, OPTIONS, StillClock()).group(KEY).floor == 2


@pytest.mark.parametrize("has_head", [True, False])
def test_a_death_right_after_a_file_was_set_aside(
    has_head: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No offset that was acknowledged is used again, and the gap is still reported."""
    root = os.fspath(tmp_path)
    folder = Folder(root, OPTIONS, StillClock())
    for number in (1, 2, 3):
        append(folder, TOPIC, [number])
    folder.close()
    path = Path(root, "wal/t.00000001.jsonl")
    if has_head:
        os.truncate(path, 40)
    else:
        path.write_bytes(path.read_bytes().replace(b'"payload":1', b'"payload":8'))
        os.unlink(f"{root}/wal/t.head")
    folder = Folder(root, OPTIONS, StillClock())

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PartitionWriter, "save", die)
        with pytest.raises(KeyboardInterrupt):
            append(folder, TOPIC, [4])
    folder.abandon()
    assert os.path.exists(f"{path}.corrupt")
    again = Folder(root, OPTIONS, StillClock())
    assert append(again, TOPIC, [4]) == {4: 4}
    with pytest.raises(Corrupt):
        again.read(TOPIC, 0, 1, 1)
    assert [record.offset for record in again.read(TOPIC, 0, 4, 1)] == [4]
    again.close()
