"""What is stored: an event, and the record it becomes once it has a place in a log.

One value serves every door. Its JSON names are those of the folder's ``meta`` object, so the bytes
on disk are this struct and nothing in between.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, NamedTuple, TypedDict

import msgspec

from trunkline.fields import FIELDS

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    P = TypeVar("P", covariant=True, default=Any)
else:
    from typing import TypeVar

    P = TypeVar("P", covariant=True)  # a default is newer than the oldest Python we run on

PRIORITIES: Final = ("critical", "high", "normal", "low")
RANK: Final = {name: rank for rank, name in enumerate(PRIORITIES)}
BANDS: Final = ("GREEN", "AMBER", "RED", "BLACK")
Priority = Literal["critical", "high", "normal", "low"]
Band = Literal["GREEN", "AMBER", "RED", "BLACK"]

_random = random.Random(os.urandom(16))
_COUNTS: Final = tuple(f"{number:03x}" for number in range(4096))
_stamp: tuple[int, str, str, Iterator[str]] = (0, "", "", iter(()))


def _forget() -> None:
    global _stamp
    _random.seed(os.urandom(16))
    _stamp = (0, "", "", iter(()))


os.register_at_fork(after_in_child=_forget)


def new_id() -> str:
    """A UUID of version 7 that sorts by the time it was made: 48 bits of milliseconds, 12 bits of
    counter within one millisecond, 62 random bits.
    """
    global _stamp
    ms = time.time_ns() // 1_000_000
    made, head, tail, counts = _stamp
    count = next(counts, None) if ms == made else None
    if count is None:
        bits = f"{0x8000_0000_0000_0000 | _random.getrandbits(62):016x}"
        head, tail = f"{ms >> 16:08x}-{ms & 0xFFFF:04x}-7", f"-{bits[:4]}-{bits[4:]}"
        counts = iter(_COUNTS)
        count = next(counts)
        _stamp = (ms, head, tail, counts)
    return head + count + tail


def new_ids(count: int) -> list[str]:
    """Many ids at once, in order, for less."""
    ids = [new_id()]
    while len(ids) < count:
        _, head, tail, counts = _stamp
        ids += [head + number + tail for number in itertools.islice(counts, count - len(ids))]
        if len(ids) < count:
            ids.append(new_id())
    return ids


def _utc_now() -> datetime:
    return datetime.now(UTC)


class Event(
    msgspec.Struct,
    Generic[P],
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    gc=False,  # a payload that holds itself cannot be JSON
    rename={field.name: field.stored for field in FIELDS},
):
    """What a producer hands over. ``payload`` is any JSON value.

    ``Event[Order]`` is an event whose payload is an ``Order``: a handler that asks for it in its
    annotation gets it so.
    """

    id: str = msgspec.field(default_factory=new_id)
    ts: datetime = msgspec.field(default_factory=_utc_now)
    topic: str
    type: str | None = None
    space: str | None = None
    actor: str | None = None
    subject: str | None = None
    key: str | None = None
    idem_key: str | None = None
    trace: str | None = None
    ttl_s: float | None = None
    priority: Priority = "normal"
    not_before: datetime | None = None
    band: Band = "GREEN"
    caps: tuple[str, ...] = ()
    cause: str | None = None
    headers: dict[str, str] = {}
    payload: P = None  # type: ignore[assignment]  # last: the line codec splits the encoded struct in front of it


class EventFields(TypedDict, total=False):
    """The fields of an event that ``publish`` takes by name: every one but topic and payload, and
    ``delay_s`` in the place of ``not_before``.
    """

    id: str
    ts: datetime
    type: str | None
    space: str | None
    actor: str | None
    subject: str | None
    key: str | None
    idem_key: str | None
    trace: str | None
    ttl_s: float | None
    priority: Priority | Literal[0, 1, 2, 3]
    not_before: datetime | None
    band: Band
    caps: tuple[str, ...]
    cause: str | None
    headers: dict[str, str]
    delay_s: float | None


class Record(msgspec.Struct, frozen=True, gc=False):
    """An event with its place: ``offset`` counts from 1 within one topic and partition."""

    event: Event
    partition: int
    offset: int

    @property
    def topic(self) -> str:
        return self.event.topic


class Bounds(NamedTuple):
    """Half-open: the offsets that can be read are ``first <= offset < next``."""

    first: int
    next: int


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """What a producer gets back. ``durability`` says what the acknowledgement is worth:
    ``replicated`` survives the loss of a machine, ``fsync`` a power cut, ``os`` a crash of the
    process, ``none`` neither. A ``duplicate``
    names the record it repeats: the ``offset`` and, as long as the log holds it, the ``id``.
    """

    topic: str
    partition: int
    offset: int
    id: str
    duplicate: bool = False
    durability: str = "fsync"


LETTER_MARK = "dlq-reason"  # the header by which a dead letter is told from any other event
