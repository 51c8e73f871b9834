"""Dead letters by the page: as many as one answer may hold."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from trunkline.dead import Desk

_PAGE_BYTES = 4 * 1024 * 1024


async def page_of(
    desk: Desk,
    *,
    group: str | None = None,
    closed: bool = False,
    start: int = 0,
    limit: int = 500,
    offsets: Collection[int] | None = None,
) -> tuple[list[msgspec.Raw], int]:
    """Letters from the offset ``start`` on, as JSON, and where the next page begins."""
    found: list[msgspec.Raw] = []
    size = 0
    async for letter in desk.letters(group=group, closed=closed):
        if letter.offset < start or (offsets is not None and letter.offset not in offsets):
            continue
        data = msgspec.json.encode(letter)
        found.append(msgspec.Raw(data))
        size += len(data)
        start = letter.offset + 1
        if len(found) >= limit or size >= _PAGE_BYTES:
            break
    return found, start
