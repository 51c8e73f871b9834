"""The log of a bus folder: its topics, and the files of their partitions."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec

from trunkline.errors import NoBus, NotFound
from trunkline.folder import topics_file as defined
from trunkline.log import layout
from trunkline.log.extents import Extent, list_extents
from trunkline.log.reader import PartitionReader
from trunkline.names import check_topic


class FolderCatalog:
    """The topics of a bus folder and where their partitions end. Reads; never writes."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._readers: dict[tuple[str, int], PartitionReader] = {}
        if not os.path.isdir(os.path.join(root, "wal")):
            raise NoBus(
                f"there is no bus at {root}",
                path=root,
                hint="option url names it, for example file:.bus; trunkline init makes one",
            )

    def topics(self) -> dict[str, int]:
        """Every topic, with the number of its partitions."""
        found: dict[str, int] = {}
        path = os.path.join(self.root, "topics.json")
        stored = defined.read_raw(path) if os.path.exists(path) else {}
        for name, options in stored.items():
            found[name] = msgspec.convert(options.get("partitions", 1), int)
        for folder in ("wal", "dlq"):
            for topic, partition in self._heads(folder):
                found[topic] = max(found.get(topic, 1), partition + 1)
        return found

    def _heads(self, folder: str) -> Iterator[tuple[str, int]]:
        place = os.path.join(self.root, folder)
        names = os.listdir(place) if os.path.isdir(place) else []
        heads = [name for name in names if name.endswith(".head")]
        yield from sorted(layout.partitions(heads, folder == "dlq"))

    def partitions(self, topic: str) -> int:
        count = self.topics().get(check_topic(topic))
        if count is None:
            raise NotFound(
                f"there is no topic {topic}", topic=topic, hint="'trunkline topic ls' lists them"
            )
        return count

    def reader(self, topic: str, partition: int) -> PartitionReader:
        key = (topic, partition)
        if key not in self._readers:
            self._readers[key] = PartitionReader(self.root, topic, partition)
        return self._readers[key]

    def extents(self, topic: str, partition: int, since: int = 0) -> list[Extent]:
        reader = self.reader(topic, partition)
        return list_extents(reader, reader.head(), since)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
