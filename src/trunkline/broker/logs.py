"""The broker's log: its level, its form, and few lines for an error that repeats."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from time import monotonic
from typing import Any, Literal

Form = Literal["text", "json"]
LEVELS = ("debug", "info", "warning", "error")
_TEXT = "%(asctime)s %(levelname)s %(message)s"
_REPEAT_S = 10.0
_KEPT = 1000


class Thinned(logging.Filter):
    """Let the same warning pass once in ten seconds, and say how often it came meanwhile."""

    def __init__(self, now: Callable[[], float] = monotonic) -> None:
        super().__init__()
        self._now = now
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        now, key = self._now(), (record.name, str(record.msg))
        since, held_back = self._seen.get(key, (-_REPEAT_S, 0))
        if now - since < _REPEAT_S:
            self._seen[key] = (since, held_back + 1)
            return False
        if len(self._seen) >= _KEPT:
            self._seen.clear()
        self._seen[key] = (now, 0)
        if held_back:
            record.msg = f"{record.msg} (and {held_back} more like it)"
        return True


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the fields of ``extra``."""

    _PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}

    def format(self, record: logging.LogRecord) -> str:
        row: dict[str, Any] = {
            "ts": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        row |= {name: value for name, value in vars(record).items() if name not in self._PLAIN}
        if record.exc_info:
            row["traceback"] = self.formatException(record.exc_info)
        return json.dumps(row, default=str, ensure_ascii=False)


def configure(level: str = "warning", form: Form = "text") -> None:
    """Send the log of this process to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter(_TEXT))
    handler.addFilter(Thinned())
    logging.basicConfig(level=getattr(logging, level.upper()), handlers=[handler], force=True)
