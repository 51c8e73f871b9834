"""Content safety: keep an event from its handler until a person has looked at it.

A signal is a function that looks at an event and says why it is unsafe, or nothing; what it says is
kept in plain text, so it must not quote the payload. On a signal the
record becomes a dead letter of its group at once, with the reason ``quarantined: <signal>``; the
handler never sees it. The dead-letter tools are the review tools: ``trunkline dlq ls`` and ``show``
to review, ``redrive`` to release, ``drop`` to refuse. A released record passes.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final, Protocol

import msgspec

from trunkline.bus import Delivery
from trunkline.errors import InvalidOption, KeyMissing
from trunkline.event import BANDS, Band, Event
from trunkline.guard.config import convert, read_toml
from trunkline.guard.order import GuardReject
from trunkline.guard.vault import HEADER as SEALED
from trunkline.middleware import HandleNext

PREFIX: Final = "quarantined: "
Signal = Callable[[Event], str | None]


class Letters(Protocol):
    def letters(self, *, group: str | None = None, closed: bool = False) -> AsyncIterator[Any]: ...


class HasLetters(Protocol):
    def dead_letters(self, topic: str) -> Letters: ...


class _Table(msgspec.Struct, forbid_unknown_fields=True):
    """The table ``[safety]``."""

    patterns: dict[str, str] = {}
    headers: tuple[str, ...] = ()
    band: Band | None = None


class Quarantine:
    """Handle middleware. ``bus`` is the bus whose dead letters say which records were released.

    It stands behind a vault. A sealed payload that no vault has opened fails like a handler that
    has no key, unless every signal looks at the meta alone.
    """

    stage: Final = "look"

    def __init__(self, bus: HasLetters, *signals: Signal) -> None:
        if not signals or not all(map(callable, signals)):
            raise InvalidOption("a quarantine needs a signal", name="signals")
        self._bus = bus
        self._signals = signals
        self._needs_payload = not all(getattr(one, "reads_meta", False) for one in signals)

    @classmethod
    def from_toml(cls, bus: HasLetters, path: str | os.PathLike[str]) -> Quarantine:
        """The quarantine that the table ``[safety]`` of a file describes."""
        table = convert(read_toml(path).get("safety", {}), _Table, "safety")
        signals: list[Signal] = [has_pattern(name, text) for name, text in table.patterns.items()]
        signals += [has_header(name) for name in table.headers]
        if table.band is not None:
            signals.append(above_band(table.band))
        return cls(bus, *signals)

    def signal(self, event: Event) -> str:
        """What the first signal says; empty if none does."""
        return next((said for look in self._signals if (said := look(event))), "")

    async def handle(self, delivery: Delivery, call_next: HandleNext) -> Any:
        if self._needs_payload and SEALED in delivery.event.headers:
            raise KeyMissing(
                "the quarantine cannot look into a sealed payload",
                hint="a vault stands before it: middleware=[vault, quarantine]",
            )
        said = self.signal(delivery.event)
        if said and not await self._is_released(delivery):
            raise GuardReject(PREFIX + said)
        return await call_next(delivery)

    async def _is_released(self, delivery: Delivery) -> bool:
        """Whether a letter of this very record was redriven. A record whose letter was dropped
        comes again after a seek, and is quarantined again.
        """
        desk = self._bus.dead_letters(delivery.topic)
        async for letter in desk.letters(group=delivery.group, closed=True):
            if (
                letter.event.cause == delivery.event.id
                and letter.origin == delivery.offset
                and letter.partition == delivery.partition
                and not letter.open
                and not letter.dropped
                and letter.error.startswith(PREFIX)
            ):
                return True
        return False


def has_header(name: str) -> Signal:
    """A signal for events that carry a header, such as one that a classifier put there."""

    def look(event: Event) -> str | None:
        value = event.headers.get(name)
        return f"{name}={value}" if value else None

    return _of_meta(look)


def has_pattern(name: str, pattern: str) -> Signal:
    """A signal for events with a text in their payload that a pattern finds. The reason names the
    pattern and not the text.
    """
    try:
        find = re.compile(pattern).search
    except re.error as error:
        raise InvalidOption(f"signal {name}: not a pattern: {error}", name=name) from None

    def look(event: Event) -> str | None:
        return name if any(find(text) for text in _texts(event.payload)) else None

    return look


def above_band(band: Band) -> Signal:
    """A signal for events above a band."""
    if band not in BANDS:
        raise InvalidOption(f"there is no band {band!r}", hint=f"bands: {', '.join(BANDS)}")
    most = BANDS.index(band)

    def look(event: Event) -> str | None:
        return f"band {event.band}" if BANDS.index(event.band) > most else None

    return _of_meta(look)


def _of_meta(signal: Signal) -> Signal:
    """Mark a signal that reads no payload."""
    signal.reads_meta = True  # type: ignore[attr-defined]
    return signal


def _texts(value: Any) -> Sequence[str]:
    found: list[str] = []
    ahead = [value]
    while ahead:
        item = ahead.pop()
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, dict):
            ahead += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            ahead += item
    return found
