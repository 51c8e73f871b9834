"""A log that is reached by its address: what every kind of it has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Final

from trunkline.bus.sync import SyncBus
from trunkline.errors import NotFound
from trunkline.log.extents import Extent
from trunkline.log.head import Head
from trunkline.log.segment import Entry, Segment

if TYPE_CHECKING:
    from trunkline.spark.source.parse import Row

_RECORD_BYTES: Final = 400  # about, to share work out: a server does not tell the size of a range


class RemoteLog(ABC):
    """In the place of ``FolderCatalog``, for a log on another machine."""

    def __init__(self, root: str, token: str) -> None:
        self.root = root
        self.token = token

    @abstractmethod
    def topics(self) -> dict[str, int]:
        """Every topic, with the number of its partitions."""

    @abstractmethod
    def head(self, topic: str, partition: int) -> Head:
        """The first offset there is, and the one that comes next."""

    @abstractmethod
    def seek(self, topic: str, partition: int, when: datetime) -> int:
        """The offset of the first record at or after a time, else the one that comes next."""

    @abstractmethod
    def rows(self, topic: str, partition: int, start: int, end: int) -> Iterator[list[Row]]:
        """The records ``start <= offset < end`` that there are, in order, page by page."""

    @abstractmethod
    def close(self) -> None: ...

    @property
    def bus_url(self) -> str:
        """The URL under which ``connect`` opens the bus of this log."""
        return self.root

    def open_bus(self) -> SyncBus:
        options = {"token": self.token} if self.token else {}
        return SyncBus(self.bus_url, **options)

    def partitions(self, topic: str) -> int:
        count = self.topics().get(topic)
        if count is None:
            raise NotFound(
                f"there is no topic {topic}", topic=topic, hint="'trunkline topic ls' lists them"
            )
        return count

    def reader(self, topic: str, partition: int) -> RemotePartition:
        return RemotePartition(self, topic, partition)

    def extents(self, topic: str, partition: int, since: int = 0) -> list[Extent]:
        head = self.head(topic, partition)
        first = max(head.start, since)
        size = max(0, head.next - first) * _RECORD_BYTES
        return [Extent(_Unseen(), first, head.next, size, is_last=True)] if size else []


class RemotePartition:
    def __init__(self, log: RemoteLog, topic: str, partition: int) -> None:
        self._log = log
        self._topic = topic
        self._partition = partition

    def head(self) -> Head:
        return self._log.head(self._topic, self._partition)

    def seek(self, when: datetime) -> int:
        return self._log.seek(self._topic, self._partition, when)


class _Unseen(Segment):
    """Stands for files on another machine: its records are taken to be of one size."""

    def __init__(self) -> None:
        super().__init__("", "", 1)

    def entries(self) -> list[Entry]:
        return []
