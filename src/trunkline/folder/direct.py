"""A bus folder without an event loop, for commands that must start quickly."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Self

from trunkline.codec import encode_event
from trunkline.event import Bounds, Event, Receipt, Record
from trunkline.folder import Folder
from trunkline.names import partition_for
from trunkline.options import StoreOptions, TopicOptions


class DirectBus:
    def __init__(self, path: str, *, create: bool = False, allow_network: bool = False) -> None:
        self.folder = Folder(path, StoreOptions(create=create, allow_network=allow_network))
        self._turn = secrets.randbelow(1024)  # so that single publishes spread over partitions

    @classmethod
    def of(cls, folder: Folder) -> Self:
        """On a folder that is open."""
        self = cls.__new__(cls)
        self.folder = folder
        self._turn = secrets.randbelow(1024)
        return self

    def topics(self) -> dict[str, TopicOptions]:
        return self.folder.topics()

    def bounds(self, topic: str, partition: int = 0) -> Bounds:
        return self.folder.bounds(topic, partition)

    def read(
        self, topic: str, start: int | None = None, limit: int = 1000, *, partition: int = 0
    ) -> list[Record]:
        start = self.bounds(topic, partition).first if start is None else start
        return self.folder.read(topic, partition, start, limit)

    def publish_many(self, topic: str, events: Sequence[Event]) -> list[Receipt]:
        limits = self.folder.options.limits
        return self.append(topic, [(event, encode_event(event, limits)) for event in events])

    def append(self, topic: str, batch: Sequence[tuple[Event, bytes]]) -> list[Receipt]:
        """Publish events that are encoded already."""
        options = self.folder.topic(topic)
        shares: dict[int, list[int]] = {}
        for index, (event, _) in enumerate(batch):
            shares.setdefault(self._partition(event, options.partitions), []).append(index)
        receipts: dict[int, Receipt] = {}
        for partition, indexes in shares.items():
            events, bodies = zip(*(batch[i] for i in indexes), strict=True)
            placed = self.folder.append(topic, partition, bodies, events)
            for at, (index, offset) in enumerate(zip(indexes, placed.offsets(), strict=True)):
                receipts[index] = Receipt(
                    topic,
                    partition,
                    offset,
                    batch[index][0].id,
                    at in placed.duplicates,
                    options.durability,
                )
        return [receipts[index] for index in range(len(batch))]

    def _partition(self, event: Event, partitions: int) -> int:
        key = event.key if event.key is not None else event.idem_key
        if partitions == 1 or key is not None:
            return partition_for(key, partitions) if key is not None and partitions > 1 else 0
        self._turn += 1
        return self._turn % partitions

    def close(self) -> None:
        self.folder.close()
