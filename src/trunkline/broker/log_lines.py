"""``GET /topics/{topic}/log``: a range of one partition as lines of the log, for bulk readers."""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.responses import Response

from trunkline.broker.endpoints import known_topic, partitions_of
from trunkline.broker.http import Ask
from trunkline.codec import encode_event
from trunkline.log.raw import RawLines, read_lines
from trunkline.store import limits_of
from trunkline.store.file import FileStore

MEDIA: Final = "application/x-ndjson"
NEXT: Final = "trunkline-next"  # the header with the offset to go on with
_BYTES: Final = 4 * 1024 * 1024
_RECORDS: Final = 1000
OFFSET_MAX: Final = 2**63 - 1


async def read_log(ask: Ask) -> Response:
    """Lines from ``from`` up to ``to``, as many as fit a page. A reader goes on where the header
    says, until that is ``to``.
    """
    name = await known_topic(ask, "read")
    partition = (await partitions_of(ask, name))[0]
    start = ask.number("from", 1, 1, OFFSET_MAX)
    end = ask.number("to", OFFSET_MAX, 1, OFFSET_MAX)
    store = ask.hub.bus.store
    if isinstance(store, FileStore) and not ask.hub.reads_by_record:
        root = store.folder.path
        lines = await asyncio.to_thread(read_lines, root, name, partition, start, end, _BYTES)
    else:
        lines = await _of_records(ask, name, partition, start, end)
    return Response(lines.data, media_type=MEDIA, headers={NEXT: str(lines.next)})


async def _of_records(ask: Ask, name: str, partition: int, start: int, end: int) -> RawLines:
    """What the caller may read, from a store without lines. The time of the append is not told."""
    store = ask.hub.bus.store
    first, last = await store.bounds(name, partition)
    start, end = max(start, first), min(end, last)
    limits = limits_of(name, store.limits)
    found: list[bytes] = []
    records = await store.read(name, partition, start, _RECORDS) if start < end else []
    for record in records:
        if record.offset < end and ask.hub.may_read(ask.who, record):
            body = encode_event(record.event, limits)
            found.append(b'{"offset":%d,"meta":%b}\n' % (record.offset, body))
    following = min(records[-1].offset + 1, end) if records else end
    return RawLines(b"".join(found), following)
