"""The partitions of a bus folder: a reader and a writer for each that this process uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trunkline.errors import StorageFull
from trunkline.event import Event
from trunkline.folder.reserve import Reserve
from trunkline.folder.root import Root
from trunkline.log import descriptors
from trunkline.log.reader import PartitionReader
from trunkline.log.writer import PartitionWriter, Placed
from trunkline.names import check_topic
from trunkline.options import TopicOptions


def open_max() -> int:
    """How many logs, and how many groups, may be open: a log has three files, a group has two."""
    return max(16, descriptors.limit() // 16)


class Partitions:
    def __init__(self, root: Root, reserve: Reserve) -> None:
        self._root = root
        self._reserve = reserve
        self._open_max = open_max()
        self._readers: dict[tuple[str, int], PartitionReader] = {}
        self._writers: dict[tuple[str, int], PartitionWriter] = {}

    def reader(self, topic: str, partition: int) -> PartitionReader:
        key = (topic, partition)
        reader = self._readers.get(key)
        if reader is None:
            self._root.check()
            reader = self._readers[key] = self.fresh_reader(topic, partition)
        return reader

    def fresh_reader(self, topic: str, partition: int) -> PartitionReader:
        """A reader of the caller's own, for another thread."""
        return PartitionReader(self._root.path, check_topic(topic), partition)

    def forget(self, topic: str, partition: int | None = None) -> None:
        """Look at the files anew: they were rewritten, or removed."""
        for (name, number), reader in self._readers.items():
            if name == topic and partition in (None, number):
                reader.forget()

    def writer(self, topic: str, partition: int) -> PartitionWriter:
        self._root.check()
        key = (topic, partition)
        writer = self._writers.get(key)
        if writer is None:
            check_topic(topic)
            root = self._root
            writer = PartitionWriter(root.path, topic, partition, root.options, root.clock)
            self._writers[key] = writer
        if not writer.is_open and len(self._writers) > self._open_max:
            self._writers[key] = self._writers.pop(key)  # the last one to be closed
            self.rest()
        return writer

    def rest(self) -> None:
        """Close the files of the logs that were written to longest ago, where many are open. The
        next append opens them.
        """
        if len(self._writers) > self._open_max:
            for writer in list(self._writers.values())[: -self._open_max]:
                if writer.is_open:
                    writer.rest()

    def append(
        self,
        topic: str,
        partition: int,
        bodies: Sequence[bytes],
        events: Sequence[Event],
        options: TopicOptions,
        timeout_s: float | None,
    ) -> Placed:
        """Write one batch; see ``PartitionWriter.append``."""
        self._reserve.check()
        try:
            placed = self.writer(topic, partition).append(bodies, events, options, timeout_s)
        except StorageFull:
            self._reserve.note(full=True)
            raise
        self._reserve.note(full=False)
        return placed

    def is_behind(self, topic: str, partition: int) -> bool:
        """Whether another process wrote to the log since this process did, if it ever did."""
        writer = self._writers.get((topic, partition))
        return writer is None or writer.is_behind()

    def grown(self) -> Iterator[str]:
        """The topics that this process reads and that have records it has not read."""
        for (topic, _), reader in list(self._readers.items()):  # a thread may remove a topic
            if reader.is_behind():
                yield topic

    def files(self) -> list[PartitionReader | PartitionWriter]:
        return [*self._readers.values(), *self._writers.values()]

    def abandon(self) -> None:
        """Let go of every lock, as the death of the process would."""
        for writer in self._writers.values():
            writer.abandon()
