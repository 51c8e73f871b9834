"""Where a reader is in several partitions, as text: in a page's ``next`` and in a tail's ids."""

from __future__ import annotations

import re

from trunkline.errors import InvalidOption
from trunkline.store import Store

_OFFSET = re.compile(r"[0-9]{1,18}")


def read_places(text: str) -> dict[int, str]:
    """``next`` of a page of several partitions: ``0:5,1:7``; nothing if it is another place."""
    pairs = [part.partition(":") for part in text.split(",")]
    if not all(_OFFSET.fullmatch(number) and _OFFSET.fullmatch(at) for number, _, at in pairs):
        return {}
    places = {int(number): at for number, _, at in pairs}
    return places if len(places) == len(pairs) else {}  # one of them twice says nothing


def mark(places: dict[int, int]) -> str:
    """Where a stream is: the last offset of each partition, or of its only one."""
    if len(places) == 1:
        return str(next(iter(places.values())) - 1)
    return ",".join(f"{number}:{at - 1}" for number, at in places.items())


def read_mark(text: str, partitions: range) -> dict[int, int]:
    if _OFFSET.fullmatch(text):  # of the only one, or of one that was that then
        return {partitions[0]: int(text)}
    places = read_places(text)
    if text and not places:
        raise InvalidOption("Last-Event-ID is the id of an event of this tail")
    return {number: int(at) for number, at in places.items()}


async def begin_anew(store: Store, topic: str, places: dict[int, int]) -> bool:
    """If a topic was removed and made again, let it be followed from its first record on."""
    bounds = {number: await store.bounds(topic, number) for number in places}
    anew = {number: first for number, (first, end) in bounds.items() if places[number] > end}
    places.update(anew)
    return bool(anew)
