"""Dead letters by the page: as many as one answer may hold."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import msgspec

from trunkline.delivery.deadletters import Desk, Letter
from trunkline.event import Event, Record
from trunkline.filters import Filter, to_filter

_PAGE_BYTES = 4 * 1024 * 1024


def readable(where: str | None, may_read: Callable[[Record], bool]) -> Filter:
    """A filter of letters: those that the policy lets the caller read, and ``where`` chooses. It is
    asked first, since ``where`` tells something of a letter as well.
    """
    wanted = to_filter(where)

    def choose(event: Event) -> bool:
        return may_read(Record(event, 0, 0)) and (wanted is None or wanted(event))

    return choose


async def page_of(
    desk: Desk,
    *,
    group: str | None = None,
    closed: bool = False,
    start: int = 0,
    limit: int = 500,
    offsets: Collection[int] | None = None,
    may_read: Callable[[Record], bool] = lambda _record: True,
    form: Callable[[Letter], Any] = lambda letter: letter,
) -> tuple[list[msgspec.Raw], int]:
    """Letters from the offset ``start`` on, as JSON, and where the next page begins."""
    found: list[msgspec.Raw] = []
    size = 0
    async for letter in desk.letters(group=group, closed=closed):
        if letter.offset < start or (offsets is not None and letter.offset not in offsets):
            continue
        if not may_read(Record(letter.event, 0, letter.offset)):
            continue
        data = msgspec.json.encode(form(letter))
        found.append(msgspec.Raw(data))
        size += len(data)
        start = letter.offset + 1
        if len(found) >= limit or size >= _PAGE_BYTES:
            break
    return found, start
