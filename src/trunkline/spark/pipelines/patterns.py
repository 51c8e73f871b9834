"""The topics that a pipeline reads, as a regular expression for the source."""

from __future__ import annotations

import re
from typing import Final

from trunkline.names import is_dead

_ALIVE: Final = r"(?!.*\.DLQ$)"  # a topic that does not hold dead letters


def topic_shape(pattern: str) -> str:
    """A pattern of topics as a regular expression. None is every topic; ``>`` alone leaves out what
    the bus says of itself; ``*.DLQ`` are the dead letters of every topic, which no pattern has that
    does not end so.
    """
    if not pattern:
        return ".*"
    if pattern == ">":
        return rf"(?!system\.){_ALIVE}.*"
    if pattern == "*.DLQ":
        return r".*\.DLQ"
    words = [re.escape(word) for word in pattern.split(".")]
    if words[-1] == ">":
        words[-1] = ".+"
    shape = r"\.".join(r"[^.]+" if word == r"\*" else word for word in words)
    return shape if is_dead(pattern) else _ALIVE + shape
