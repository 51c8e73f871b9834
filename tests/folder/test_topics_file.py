"""``topics.json`` and ``bus.json``: no flipped bit goes unnoticed, and files of before are read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import trunkline
from trunkline.errors import Corrupt, TrunklineError
from trunkline.folder import Folder
from trunkline.folder import topics_file as defined
from trunkline.options import StoreOptions, TopicOptions

TOPICS = {"crc": TopicOptions(partitions=3), "orders": TopicOptions(retention_records=5000)}


def flipped(data: bytes) -> Iterator[bytes]:
    for at in range(8 * len(data)):
        bad = bytearray(data)
        bad[at // 8] ^= 1 << at % 8
        yield bytes(bad)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "topics.json"


@pytest.mark.parametrize("topics", [{}, TOPICS])
def test_what_was_written_is_read(path: Path, topics: dict[str, TopicOptions]) -> None:
    path.write_bytes(defined.encode(topics))
    assert defined.read(str(path)) == topics


def test_every_flipped_bit_is_told(path: Path) -> None:
    for data in flipped(defined.encode(TOPICS)):
        path.write_bytes(data)
        with pytest.raises(TrunklineError):
            defined.read(str(path))


def test_a_file_that_was_written_by_hand_is_read(path: Path) -> None:
    path.write_text('{"orders":{"retention_records":5000},\n"crc":{"partitions":3}}')
    assert defined.read(str(path)) == TOPICS


def test_a_user_that_edits_the_file_is_told_what_to_do(path: Path) -> None:
    path.write_bytes(defined.encode(TOPICS).replace(b"5000", b"6000"))
    with pytest.raises(Corrupt, match="the checksum does not fit") as caught:
        defined.read(str(path))
    assert "take out __crc" in caught.value.hint


def test_a_folder_has_its_own_name_or_none(tmp_path: Path) -> None:
    options = StoreOptions(reserve_bytes=0)
    Folder(str(tmp_path), options).close()
    marker = tmp_path / "bus.json"
    good = marker.read_bytes()
    name = Folder(str(tmp_path), options).id
    for data in flipped(good):
        marker.write_bytes(data)
        with contextlib.suppress(TrunklineError):
            assert Folder(str(tmp_path), options).id == name
    marker.write_bytes(b'{"format":1,"id":"early"}\n')
    assert Folder(str(tmp_path), options).id == "early"


async def test_a_damaged_file_refuses_each_publish(tmp_path: Path) -> None:
    async with trunkline.connect(f"file:{tmp_path}") as bus:
        await bus.define("t", partitions=2)
        await bus.publish("t", 1)
    (tmp_path / "topics.json").write_bytes(b"{")

    async with trunkline.connect(f"file:{tmp_path}") as bus:
        for _ in range(2):  # default options would be a guess
            with pytest.raises(Corrupt, match="damaged: it ends"):
                await bus.publish("t", 2)
