"""A broker's log by HTTP: where its partitions begin and end, and their records by offset.

Each task asks for its own offsets, a thousand at a time, over a connection of its own. The broker
tells times in milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec
import pyarrow as pa

from trunkline.errors import Denied, NotFound, StorageError, TrunklineError
from trunkline.event import Event
from trunkline.frames import fields_of, time_of
from trunkline.log.head import Head
from trunkline.log.segment import Entry, Segment
from trunkline.spark.extents import Extent
from trunkline.spark.parse import Row, rows_batch

_T = TypeVar("_T")
_PAGE = 1000
_PATIENCE_S = 30
_RECORD_BYTES = 400  # about, to share work out: a broker does not tell the size of a range


def is_remote(root: str) -> bool:
    return root.startswith(("http://", "https://"))


class _Sent(msgspec.Struct, gc=False):
    """An event as the broker sends it."""

    id: str
    ts: int
    topic: str
    offset: int
    payload: msgspec.Raw = msgspec.Raw(b"null")
    key: str | None = None
    headers: dict[str, str] | None = None


class _Page(msgspec.Struct):
    events: list[_Sent]
    next: int


class _Bounds(msgspec.Struct):
    partition: int
    first: int
    next: int


class _Offsets(msgspec.Struct):
    partitions: list[_Bounds]


class _Named(msgspec.Struct):
    topic: str
    partitions: int


class _Topics(msgspec.Struct):
    topics: list[_Named]


class _Said(msgspec.Struct):
    message: str
    hint: str = ""


class RemoteCatalog:
    """The topics of a broker, in the place of ``extents.Catalog``."""

    def __init__(self, url: str, token: str) -> None:
        self.root = url
        self._http = _Http(url, token)

    def topics(self) -> dict[str, int]:
        found = self._http.get("/topics", _Topics)
        return {one.topic: one.partitions for one in found.topics}

    def partitions(self, topic: str) -> int:
        return len(self._http.get(f"/topics/{quote(topic, safe='')}/offsets", _Offsets).partitions)

    def reader(self, topic: str, partition: int) -> _Partition:
        return _Partition(self._http, topic, partition)

    def extents(self, topic: str, partition: int, since: int = 0) -> list[Extent]:
        head = self.reader(topic, partition).head()
        first = max(head.start, since)
        size = max(0, head.next - first) * _RECORD_BYTES
        return [Extent(_Unseen(), first, head.next, size, is_last=True)] if size else []

    def close(self) -> None:
        self._http.close()


class _Partition:
    def __init__(self, http: _Http, topic: str, partition: int) -> None:
        self._http = http
        self._path = f"/topics/{quote(topic, safe='')}"
        self._topic = topic
        self._partition = partition

    def head(self) -> Head:
        found = self._http.get(f"{self._path}/offsets", _Offsets).partitions
        if self._partition >= len(found):
            raise NotFound(f"there is no partition {self._partition} of {self._topic}")
        return Head(start=found[self._partition].first, next=found[self._partition].next)

    def seek(self, when: datetime) -> int:
        page = self.page(when.isoformat(), 1)
        return page.events[0].offset if page.events else page.next

    def page(self, start: int | str, limit: int) -> _Page:
        asked = {"partition": self._partition, "from": start, "limit": limit}
        return self._http.get(f"{self._path}/events?{urlencode(asked)}", _Page)


class _Unseen(Segment):
    """Stands for files on another machine: its records are taken to be of one size."""

    def __init__(self) -> None:
        super().__init__("", "", 1)

    def entries(self) -> list[Entry]:
        return []


def fetch(
    url: str, token: str, where: tuple[str, int], start: int, end: int, names: tuple[str, ...]
) -> Iterator[pa.RecordBatch]:
    """The records ``start <= offset < end`` of a partition, those that there are, in order."""
    catalog = RemoteCatalog(url, token)
    try:
        reader = catalog.reader(*where)
        while start < end:
            page = reader.page(start, min(_PAGE, end - start))
            rows = [_row(sent) for sent in page.events if sent.offset < end]
            if rows:
                yield rows_batch(rows, *where, names)
            if page.next <= start:
                return
            start = page.next
    finally:
        catalog.close()


def _row(sent: _Sent) -> Row:
    fields, rest = fields_of(sent.headers or {})
    event = Event(
        id=sent.id, ts=time_of(sent.ts), topic=sent.topic, key=sent.key, headers=rest, **fields
    )
    return Row(sent.offset, event, sent.payload)


class _Http:
    def __init__(self, url: str, token: str) -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._open: HTTPConnection | None = None

    def get(self, path: str, kind: type[_T]) -> _T:
        for attempt in (1, 2):  # the broker may have closed a connection that was kept
            fresh = self._open is None
            try:
                status, body = self._ask(path)
                break
            except (OSError, HTTPException) as error:
                self.close()
                if fresh or attempt == 2:
                    raise StorageError(
                        f"no broker answers at {self._url}: {error}",
                        hint="start it with 'trunkline serve'",
                    ) from None
        if status == 200:
            return msgspec.json.decode(body, type=kind)
        raise _failure(self._url, status, body)

    def _ask(self, path: str) -> tuple[int, bytes]:
        parts = urlsplit(self._url)
        if self._open is None:
            make = HTTPSConnection if parts.scheme == "https" else HTTPConnection
            self._open = make(parts.hostname or "", parts.port, timeout=_PATIENCE_S)
        headers = {"authorization": f"Bearer {self._token}"} if self._token else {}
        self._open.request("GET", parts.path + path, headers=headers)
        answer = self._open.getresponse()
        return answer.status, answer.read()

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


def _failure(url: str, status: int, body: bytes) -> TrunklineError:
    try:
        said = msgspec.json.decode(body, type=_Said)
    except msgspec.DecodeError:
        said = _Said(f"it answered {status}")
    if status in (401, 403):
        hint = "give option token" if status == 401 else said.hint  # here no header can be sent
        return Denied(f"{url}: {said.message}", hint=hint)
    if status == 404:
        return NotFound(said.message, hint=said.hint or "'trunkline topic ls' lists topics")
    return StorageError(f"{url}: {said.message}", hint=said.hint)
