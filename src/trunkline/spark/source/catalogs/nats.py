"""The log of a bus on NATS JetStream: a partition is a stream, and a sequence number an offset.

Each task gets its own range by direct gets, several requests at a time; any replica answers them.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections import deque
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from datetime import datetime
from typing import Any, Final, TypeVar

import msgspec

from trunkline.bus.nats import records
from trunkline.bus.nats.connection import NatsLink
from trunkline.bus.nats.place import parse
from trunkline.bus.nats.topics import Notes, Topics, stream_info
from trunkline.errors import Corrupt, NotFound
from trunkline.event import Event
from trunkline.explain import reason
from trunkline.log.head import Head
from trunkline.options import NatsOptions
from trunkline.spark.source.catalogs.remote import RemoteLog
from trunkline.spark.source.parse import CommitTime, Row

T = TypeVar("T")
_PAGE: Final = 500
_AHEAD: Final = 6  # requests under way


class _StoredEvent(Event, frozen=True):
    """An event whose payload is left as the text that was stored."""

    payload: msgspec.Raw = msgspec.Raw(b"null")


_decode = msgspec.json.Decoder(_StoredEvent).decode


class NatsLog(RemoteLog):
    def __init__(self, root: str, token: str) -> None:
        super().__init__(root, token)
        place = parse(root)
        if token:
            place = msgspec.structs.replace(place, token=token)
        tls = ssl.create_default_context() if root.startswith("nats+tls:") else None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            self._link: NatsLink = self._call(_open(place, tls))
        except BaseException:
            self._end()
            raise

    def topics(self) -> dict[str, int]:
        found = self._call(Topics(self._link, Notes(self._link)).load())
        return {name: options.partitions for name, options in found.items()}

    def head(self, topic: str, partition: int) -> Head:
        name = self._link.place.stream(topic, partition)
        try:
            state = self._call(stream_info(self._link, name)).state
        except NotFound:
            raise NotFound(f"there is no partition {partition} of {topic}", topic=topic) from None
        return Head(start=max(1, state.first_seq), next=max(state.first_seq, state.last_seq + 1, 1))

    def seek(self, topic: str, partition: int, when: datetime) -> int:
        """By the time of the append: the server knows no other."""
        found = self._call(records.seek(self._link, topic, partition, when))
        return self.head(topic, partition).next if found is None else found

    def rows(self, topic: str, partition: int, start: int, end: int) -> Iterator[list[Row]]:
        waiting: deque[tuple[int, Future[list[Row]]]] = deque()
        asked = start
        while waiting or asked < end:
            while asked < end and len(waiting) < _AHEAD:
                stop = min(asked + _PAGE, end)
                waiting.append((stop, self._begin(self._range(topic, partition, asked, stop))))
                asked = stop
            _, page = waiting.popleft()
            if rows := page.result():
                yield rows

    async def _range(self, topic: str, partition: int, start: int, end: int) -> list[Row]:
        found: list[Row] = []
        link = self._link
        while start < end:
            page = await records.get_range(link, topic, partition, start, end - start, end)
            if not page:
                break
            for message in page:
                offset = records.sequence(message)
                if offset < end:
                    found.append(_row(topic, partition, offset, message))
                start = offset + 1
        return found

    def _call(self, job: Coroutine[Any, Any, T]) -> T:
        return self._begin(job).result()

    def _begin(self, job: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(job, self._loop)

    def close(self) -> None:
        if self._thread.is_alive():
            self._call(self._link.close())
            self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _open(place: Any, tls: ssl.SSLContext | None) -> NatsLink:
    link = NatsLink(place, NatsOptions(), tls=tls)
    await link.open()
    return link


def _row(topic: str, partition: int, offset: int, message: Any) -> Row:
    try:
        event = _decode(message.data)
    except (msgspec.MsgspecError, UnicodeError) as error:
        said = reason(error, message.data)
        raise Corrupt(
            f"message {offset} of {topic}/{partition} is not an event: {said}",
            topic=topic, partition=partition, offset=offset,
        ) from None  # fmt: skip
    stored = datetime.fromisoformat(message.headers["Nats-Time-Stamp"])
    return Row(offset, event, event.payload, CommitTime(int(stored.timestamp() * 1_000_000)))
