"""The broker's log: its level, its form, and few lines for an error that repeats."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from time import monotonic
from typing import Any, Literal

Form = Literal["text", "json"]
LEVELS = ("debug", "info", "warning", "error")
_TEXT = "%(asctime)s %(levelname)s %(message)s"
_REPEAT_S = 10.0
_KEPT = 1000
_ALIKE = 20  # different lines of one kind in ten seconds


class _Stretch:
    """Ten seconds of one kind of warning: the lines that passed, and how many did not."""

    __slots__ = ("held_back", "lines", "since")

    def __init__(self, since: float) -> None:
        self.since = since
        self.lines: set[str] = set()
        self.held_back = 0


class Thinned(logging.Filter):
    """Let the same warning pass once in ten seconds, and say how often it came meanwhile. Warnings
    of one kind that differ, such as denials of several agents, pass up to a number.
    """

    def __init__(self, now: Callable[[], float] = monotonic) -> None:
        super().__init__()
        self._now = now
        self._seen: dict[tuple[str, str], _Stretch] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        now, key, line = self._now(), (record.name, str(record.msg)), record.getMessage()
        stretch = self._seen.get(key)
        held_back = 0
        if stretch is None or now - stretch.since >= _REPEAT_S:
            if stretch is not None:
                held_back = stretch.held_back
            elif len(self._seen) >= _KEPT:
                self._seen.clear()
            stretch = self._seen[key] = _Stretch(now)
        if line in stretch.lines or len(stretch.lines) >= _ALIKE:
            stretch.held_back += 1
            return False
        stretch.lines.add(line)
        if held_back:
            record.msg = f"{record.msg} (and {held_back} more like it)"
        return True


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the fields of ``extra``."""

    _PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}

    def format(self, record: logging.LogRecord) -> str:
        row: dict[str, Any] = {
            "ts": _moment(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        row |= {name: value for name, value in vars(record).items() if name not in self._PLAIN}
        if record.exc_info:
            row["traceback"] = self.formatException(record.exc_info)
        return json.dumps(row, default=str, ensure_ascii=False)


def _moment(seconds: float) -> str:
    """As every time that the broker tells: RFC 3339, in UTC."""
    text = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def configure(level: str = "warning", form: Form = "text") -> None:
    """Send the log of this process to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter(_TEXT))
    handler.addFilter(Thinned())
    logging.basicConfig(level=getattr(logging, level.upper()), handlers=[handler], force=True)
