"""Names: what a topic, group or consumer may be called, wildcards, and which partition a key takes.

A name is dot-separated tokens of ``[A-Za-z0-9_-]``. It holds no ``__`` because that joins topic and
group in a file name, and a group never starts with ``_`` because ``a_`` + ``__`` + ``b`` would then
read the same as ``a`` + ``__`` + ``_b``.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from trunkline.errors import InvalidName

NAME_BYTES_MAX = 200
DEAD_SUFFIX = ".DLQ"
SYSTEM_PREFIX = "system."
AUDIT = "system.bus.audit"  # changes, settled deliveries and denials
FLAGS = "system.flags"  # the state of each feature flag
ATTENTION = "system.attention"  # the decisions of attention gates
DEFERRED_PREFIX = "attention.deferred."  # before a group: the events that its gate deferred
HANDLE_PREFIX = "handle-"

_OWN = re.compile("(?:replies|cancel)-[0-9a-f]{16}")
_TOKEN = r"[A-Za-z0-9_-]+"
_NAME = re.compile(rf"{_TOKEN}(?:\.{_TOKEN})*")
_SPACE = re.compile(rf"{_TOKEN}(?:[.:]{_TOKEN})*")
_PATTERN = re.compile(rf"(?:{_TOKEN}|\*)(?:\.(?:{_TOKEN}|\*))*(?:\.>)?|>")


def is_handle(member: str) -> bool:
    """Whether a member is a handle and no process: it holds its leases until their time runs out,
    whatever process ends.
    """
    return member.startswith(HANDLE_PREFIX)


def is_own(group: str) -> bool:
    """Whether a group is one process's own, to hear answers or cancellations. Nobody manages it."""
    return _OWN.fullmatch(group) is not None


class GroupKey(NamedTuple):
    """Which group: each partition of a topic has its own state of a group."""

    topic: str
    partition: int
    group: str


def _check(kind: str, name: object, shape: re.Pattern[str]) -> str:
    if not isinstance(name, str):
        raise InvalidName(f"a {kind} name is text, not {type(name).__name__}", name=name)
    if not _fits(name, shape):
        hint = "use dot-separated tokens of A-Z a-z 0-9 _ -, without '__', "
        hint += f"at most {NAME_BYTES_MAX} bytes"
        if shape is _PATTERN and is_pattern(name):
            hint += "; * stands for a whole token, a last > for the rest"
        raise InvalidName(f"not a {kind} name: {name[:80]!r}", name=name, hint=hint)
    return name


@lru_cache(maxsize=4096)
def _fits(name: str, shape: re.Pattern[str]) -> bool:
    # The longest topic may have a dead letter topic, and that topic may have one of its own.
    size = len(name.removesuffix(DEAD_SUFFIX).removesuffix(DEAD_SUFFIX))
    return bool(shape.fullmatch(name)) and "__" not in name and size <= NAME_BYTES_MAX


def check_topic(name: str) -> str:
    return _check("topic", name, _NAME)


def check_group(name: str) -> str:
    _check("group", name, _NAME)
    if name.startswith("_"):
        raise InvalidName(f"a group name does not start with '_': {name!r}", name=name)
    return name


def check_consumer(name: str) -> str:
    return _check("consumer", name, _NAME)


def check_space(name: str) -> str:
    return _check("space", name, _SPACE)


def check_pattern(pattern: str) -> str:
    """A topic, or a NATS pattern: ``*`` stands for one token, a last ``>`` for one or more."""
    return _check("topic or pattern", pattern, _PATTERN)


def is_pattern(name: str) -> bool:
    return "*" in name or ">" in name


def matches(pattern: str, topic: str) -> bool:
    want, have = pattern.split("."), topic.split(".")
    for index, token in enumerate(want):
        if token == ">":
            return len(have) > index
        if index >= len(have) or token not in ("*", have[index]):
            return False
    return len(want) == len(have)


def dead_topic(topic: str) -> str:
    """The topic that holds the dead letters of ``topic``."""
    return topic + DEAD_SUFFIX


def is_dead(topic: str) -> bool:
    return topic.endswith(DEAD_SUFFIX)


def partition_for(key: str, partitions: int) -> int:
    """The partition of ``key``: the 31-multiplier hash over UTF-16 units in signed 32-bit
    arithmetic, absolute, modulo ``partitions``. Every process and language gets the same answer.
    """
    if partitions == 1:
        return 0
    value = 0
    units = key.encode("utf-16-le", "surrogatepass")
    for low, high in zip(units[::2], units[1::2], strict=True):
        value = (value * 31 + (low | high << 8)) & 0xFFFFFFFF
    signed = value - 0x1_0000_0000 if value & 0x8000_0000 else value
    return abs(signed) % partitions
