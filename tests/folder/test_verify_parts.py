"""Segments can be checked apart: together they find what is found at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kit.folders import Opener
from kit.log_events import TOPIC, publish
from trunkline.folder import Folder, upkeep
from trunkline.log.reader import PartitionReader
from trunkline.log.segment import Segment
from trunkline.options import TopicOptions


def spoil(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"payload":', b'"payloae":', 1))


def take_the_seal(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("harm", [None, spoil, take_the_seal, empty, Path.unlink])
def test_parts_find_what_the_whole_finds(
    folder: Folder, root: str, opener: Opener, harm: Callable[[Path], None] | None, at: int
) -> None:
    folder.define(TOPIC, TopicOptions(segment_records=2))
    publish(folder, range(1, 10))
    folder.close()
    if harm is not None:
        harm(sorted(Path(root, "wal").glob("*.jsonl"))[at])
    again = opener()
    numbers = [segment.number for segment in again.reader(TOPIC, 0).files()]

    parts = [found for n in numbers for found in upkeep.verify(again, TOPIC, 0, only={n})]

    assert sorted(parts) == sorted(upkeep.verify(again, TOPIC, 0))
    assert bool(parts) is (harm is not None)
    assert any(found.severe for found in parts) is (harm not in (None, take_the_seal)) or at == 4


def test_only_the_damaged_file_is_named(folder: Folder, root: str, opener: Opener) -> None:
    folder.define(TOPIC, TopicOptions(segment_records=2))
    publish(folder, range(1, 10))
    upkeep.pack_segments(folder, TOPIC, 0)
    path = Path(root, "wal/t.00000003.jsonl.zst")
    path.write_bytes(path.read_bytes()[:-30])
    found = {finding.path for finding in upkeep.verify(opener(), TOPIC, 0)}
    assert found == {"wal/t.00000003.jsonl.zst"}


def test_a_log_that_goes_on_while_its_files_are_listed_is_not_damaged(
    folder: Folder, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.define(TOPIC, TopicOptions(segment_records=2))
    publish(folder, [1])
    verifier, files = opener(), PartitionReader.files
    more = [2, 3, 4]

    def listed(reader: PartitionReader) -> list[Segment]:
        while more:
            publish(folder, [more.pop(0)])
        return files(reader)

    monkeypatch.setattr(PartitionReader, "files", listed)
    assert list(upkeep.verify(verifier, TOPIC, 0)) == []
