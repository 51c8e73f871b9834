"""A broker's log by HTTP: where its partitions begin and end, and their records by offset.

Each task asks for its own offsets, page by page, over a connection of its own. A page is lines of
the log: every field of an event, the stored text of its payload, and when it was written.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Final, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from trunkline.errors import Denied, NotFound, StorageError, TrunklineError
from trunkline.log.head import Head
from trunkline.spark.source.catalogs.remote import RemoteLog
from trunkline.spark.source.parse import Row, decode_rows

_T = TypeVar("_T")
_PATIENCE_S: Final = 30
_NEXT: Final = "trunkline-next"


class _Bounds(msgspec.Struct):
    partition: int
    first: int
    next: int


class _Offsets(msgspec.Struct):
    partitions: list[_Bounds]


class _Found(msgspec.Struct):
    offset: int


class _Page(msgspec.Struct):
    events: list[_Found]
    next: int


class _Named(msgspec.Struct):
    topic: str
    partitions: int


class _Topics(msgspec.Struct):
    topics: list[_Named]
    next: str | None = None


class _Said(msgspec.Struct):
    message: str
    hint: str = ""


class BrokerLog(RemoteLog):
    def __init__(self, root: str, token: str) -> None:
        super().__init__(root, token)
        self._http = _Http(root, token)

    @property
    def bus_url(self) -> str:
        return self.root.replace("http", "ws", 1)

    def topics(self) -> dict[str, int]:
        found: dict[str, int] = {}
        after: str | None = ""
        while after is not None:
            asked = f"?{urlencode({'after': after})}" if after else ""
            page = self._http.get(f"/topics{asked}", _Topics)
            found |= {one.topic: one.partitions for one in page.topics}
            after = page.next
        return found

    def partitions(self, topic: str) -> int:
        return len(self._http.get(f"{_path(topic)}/offsets", _Offsets).partitions)

    def head(self, topic: str, partition: int) -> Head:
        found = self._http.get(f"{_path(topic)}/offsets", _Offsets).partitions
        if partition >= len(found):
            raise NotFound(f"there is no partition {partition} of {topic}")
        return Head(start=found[partition].first, next=found[partition].next)

    def seek(self, topic: str, partition: int, when: datetime) -> int:
        asked = urlencode({"partition": partition, "from": when.isoformat(), "limit": 1})
        page = self._http.get(f"{_path(topic)}/events?{asked}", _Page)
        return page.events[0].offset if page.events else page.next

    def rows(self, topic: str, partition: int, start: int, end: int) -> Iterator[list[Row]]:
        while start < end:
            asked = urlencode({"partition": partition, "from": start, "to": end})
            lines, told = self._http.lines(f"{_path(topic)}/log?{asked}")
            if lines:
                yield decode_rows(lines)
            if told <= start:
                return
            start = told

    def close(self) -> None:
        self._http.close()


def _path(topic: str) -> str:
    return f"/topics/{quote(topic, safe='')}"


class _Http:
    def __init__(self, url: str, token: str) -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._open: HTTPConnection | None = None

    def get(self, path: str, kind: type[_T]) -> _T:
        return msgspec.json.decode(self._answer(path)[0], type=kind)

    def lines(self, path: str) -> tuple[bytes, int]:
        """Lines of a log, and the offset to go on with."""
        body, told = self._answer(path)
        return body, int(told or 0)

    def _answer(self, path: str) -> tuple[bytes, str | None]:
        for attempt in (1, 2):  # the broker may have closed a connection that was kept
            fresh = self._open is None
            try:
                status, body, told = self._ask(path)
                break
            except (OSError, HTTPException) as error:
                self.close()
                if fresh or attempt == 2:
                    raise StorageError(
                        f"no broker answers at {self._url}: {error}",
                        hint="start it with 'trunkline serve'",
                    ) from None
        if status == 200:
            return body, told
        raise _failure(self._url, status, body)

    def _ask(self, path: str) -> tuple[int, bytes, str | None]:
        parts = urlsplit(self._url)
        if self._open is None:
            make = HTTPSConnection if parts.scheme == "https" else HTTPConnection
            self._open = make(parts.hostname or "", parts.port, timeout=_PATIENCE_S)
        headers = {"authorization": f"Bearer {self._token}"} if self._token else {}
        self._open.request("GET", parts.path + path, headers=headers)
        answer = self._open.getresponse()
        return answer.status, answer.read(), answer.headers.get(_NEXT)

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
