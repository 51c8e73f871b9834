"""What is inside an event file of a spool, and inside its ``config.yaml``.

Imported at every start of ``nbs-bus``, so it imports next to nothing itself.
"""

from __future__ import annotations

import os
import stat
import time

PRIORITIES = ("critical", "high", "normal", "low")
RETENTION_MAX_BYTES = 16 * 1024 * 1024
POLL_INTERVAL_S = 5
INT_MAX = 2**63 - 1
SECONDS_MAX = INT_MAX // 1_000_000
SPACES = b" \t\n\v\f\r"
_CONFIG_LINE_MAX = 511
_HEAD_BYTES = 4096


class Content:
    """An event file, taken apart. ``fields`` holds every header line, known or not."""

    __slots__ = ("fields", "payload")

    def __init__(self, fields: dict[str, str], payload: bytes) -> None:
        self.fields = fields
        self.payload = payload

    @property
    def text(self) -> str:
        return self.payload.decode("utf-8", "surrogateescape")


class SpoolConfig:
    """``config.yaml``. A value that makes no sense leaves the default in place."""

    __slots__ = (
        "ack_timeout_s",
        "dedup_window_s",
        "keeps_bytes",
        "notify",
        "poll_s",
        "retention_max_bytes",
    )

    def __init__(self) -> None:
        self.retention_max_bytes = RETENTION_MAX_BYTES
        self.keeps_bytes = False  # the file itself says how much is kept
        self.dedup_window_s = 0
        self.ack_timeout_s = 0
        self.notify = "inotifywait"
        self.poll_s = POLL_INTERVAL_S


def parse(body: bytes) -> Content:
    """Take an event file apart. Only lines before ``payload:`` are fields, so no payload can look
    like one.
    """
    fields = {
        os.fsdecode(name): value.decode("utf-8", "surrogateescape")
        for name, value in header(body).items()
    }
    lines: list[bytes] = []
    _, found, rest = (b"\n" + body).partition(b"\npayload: |\n")
    if found:
        lines = [line[2:] for line in rest.removesuffix(b"\n").split(b"\n")]
    return Content(fields, b"\n".join(lines))


def default_dedup_key(
    source: str, type_: str, *, channel: str | None = None, target: str | None = None
) -> str:
    """The key of an event type by convention: messages differ by channel, mentions by target."""
    if type_ == "chat-message" and channel:
        return f"{source}:{type_}:{channel}"
    if type_ == "chat-mention" and target:
        return f"{source}:{type_}:{target}"
    return f"{source}:{type_}"


def encode(
    source: str, type_: str, priority: str, timestamp_s: int, fields: dict[str, str], payload: bytes
) -> bytes:
    """The bytes of an event file with further header lines after the known ones."""
    extra = b"".join(
        b"%b: %b\n" % (as_bytes(name), _one_line(value)) for name, value in fields.items()
    )
    return _head(as_bytes(source), as_bytes(type_), priority, timestamp_s) + extra + _block(payload)


def as_bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")


def _one_line(text: str) -> bytes:
    return as_bytes(text).replace(b"\n", b" ").replace(b"\r", b" ")


def compose(source: bytes, type_: bytes, priority: str, key: bytes, payload: bytes) -> bytes:
    head = _head(source, type_, priority, time.time_ns() // 1_000_000_000)
    return head + (b"dedup-key: %b\n" % key if key else b"") + _block(payload)


def _head(source: bytes, type_: bytes, priority: str, timestamp_s: int) -> bytes:
    return b"source: %b\ntype: %b\npriority: %b\ntimestamp: %b\n" % (
        source,
        type_,
        priority.encode(),
        iso(timestamp_s).encode(),
    )


def _block(payload: bytes) -> bytes:
    if not payload:
        return b""
    lines = payload.removesuffix(b"\n").replace(b"\n", b"\n  ")
    return b"payload: |\n  %b\n" % lines


def iso(seconds: int) -> str:
    at = time.gmtime(seconds)
    return (
        f"{at.tm_year:04d}-{at.tm_mon:02d}-{at.tm_mday:02d}"
        f"T{at.tm_hour:02d}:{at.tm_min:02d}:{at.tm_sec:02d}Z"
    )


def header(body: bytes) -> dict[bytes, bytes]:
    fields: dict[bytes, bytes] = {}
    for line in body.split(b"\n"):
        name, found, value = line.partition(b": ")
        if name == b"payload" or line[:1] in (b" ", b"\t"):
            break
        if found:
            fields.setdefault(name, value)
    return fields


def read_head(path: bytes) -> bytes | None:
    """The first bytes of an event, all header lines included; None when it is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):  # a pipe or a device might never end
            return None
        head = os.read(fd, _HEAD_BYTES)
        while len(head) % _HEAD_BYTES == 0 and b"\npayload: " not in head:
            more = os.read(fd, _HEAD_BYTES)
            if not more:
                break
            head += more
        return head
    except OSError:
        return None
    finally:
        os.close(fd)


def leading_us(name: bytes) -> int | None:
    digits, dash, _ = name.partition(b"-")
    if not dash or not digits.isdigit() or len(digits) > 31:
        return None
    us = int(digits)
    return us if us <= INT_MAX else None


def parse_int(text: bytes) -> int | None:
    """What C's strtoll makes of the whole text: spaces and a sign in front, and nothing is 0."""
    digits = text.lstrip(SPACES)
    if digits[:1] in (b"+", b"-"):
        digits = digits[1:]
    if not digits.isdigit():
        return 0 if not text else None
    if len(digits.lstrip(b"0")) > 19:
        return None
    value = -int(digits) if b"-" in text else int(digits)
    return value if -INT_MAX - 1 <= value <= INT_MAX else None


def parse_config(text: bytes) -> SpoolConfig:
    config = SpoolConfig()
    for line in text.split(b"\n"):
        name, found, value = line.partition(b":")
        value = value.strip(SPACES)
        if not found or not value or line[:1] == b"#" or len(line) > _CONFIG_LINE_MAX:
            continue
        name, number = name.rstrip(SPACES), parse_int(value)
        if name == b"notify" and value in (b"inotifywait", b"poll"):
            config.notify = value.decode()
        elif number is None:
            continue
        elif name == b"retention-max-bytes" and number > 0:
            config.retention_max_bytes = number
            config.keeps_bytes = True
        elif name == b"dedup-window" and 0 <= number <= SECONDS_MAX:
            config.dedup_window_s = number
        elif name == b"ack-timeout" and 0 <= number <= SECONDS_MAX:
            config.ack_timeout_s = number
        elif name == b"poll-interval" and 0 < number <= 86_400:
            config.poll_s = number
    return config
