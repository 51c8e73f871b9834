"""Durations, sizes and times as people write them, read in one place.

Each function raises ``ValueError`` for a text that it cannot read. The caller names the option or
the field that had it, and makes it the error of its own door.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, tzinfo

DURATIONS = "90, 500ms, 10m, 2h, 1d"  # for hints
SIZES = "4096, 64k, 10MiB, 2g"
TIMES = "2026-01-31T12:00:00Z, or epoch seconds or milliseconds"

_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)?", re.ASCII)
_SIZE = re.compile(r"(\d+)([kmgt]?)(?:i?b)?", re.ASCII | re.IGNORECASE)
_SHIFT = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_EPOCH = re.compile(r"\d{9,14}", re.ASCII)
_MILLISECONDS_FROM = 100_000_000_000  # as seconds, that would be the year 5138


def read_duration(text: str) -> float:
    """Seconds: ``90``, ``1.5s``, ``10m``, ``2h``, ``500ms``."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise ValueError(f"not a duration: {text!r}")
    return float(found[1]) * _SECONDS[found[2] or "s"]


def read_size(text: str) -> int:
    """Bytes: ``4096``, ``64k``, ``10MiB``. The units are powers of 1,024."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(f"not a size: {text!r}")
    return int(found[1]) << _SHIFT[found[2].lower()]


def read_time(text: str, zone: tzinfo | None = UTC) -> datetime:
    """ISO 8601. A time without a zone is in ``zone``; if that is None it is an error."""
    when = datetime.fromisoformat(text)
    if when.tzinfo is not None:
        return when
    if zone is None:
        raise ValueError("timestamp must include timezone")
    return when.replace(tzinfo=zone)


def read_moment(text: str, now: datetime) -> datetime:
    """A time, ``now``, ``-10m`` (ten minutes ago), or epoch seconds or milliseconds."""
    if _EPOCH.fullmatch(text):
        value = int(text)
        return datetime.fromtimestamp(value / 1000 if value >= _MILLISECONDS_FROM else value, UTC)
    if text == "now":
        return now
    try:
        if text.startswith("-"):
            return now - timedelta(seconds=read_duration(text[1:]))
    except OverflowError:
        raise ValueError(f"not a time: {text!r}") from None
    if len(text) < 8:  # Python 3.11 and later versions differ on shorter ones
        raise ValueError(f"not a time: {text!r}")
    return read_time(text)


def write_time(when: datetime, *, fraction: bool = True) -> str:
    """RFC 3339 in UTC with a ``Z``; without the fraction of the second if not asked for."""
    when = when.astimezone(UTC)
    if not fraction:
        when = when.replace(microsecond=0)
    return when.isoformat().replace("+00:00", "Z")
