"""A message in a consumer's hands, and how bytes become an event's payload.

Bytes that are UTF-8 are the payload as text, so that a person can read the log. Other bytes are
base64. The header ``pubsub-data`` says which; an event without it was published by other means, and
its bytes are its payload as JSON.
"""

from __future__ import annotations

import base64
import binascii
import re
from datetime import datetime
from typing import Any

import msgspec

from trunkline.bus import Delivery
from trunkline.errors import InvalidEvent, InvalidName
from trunkline.event import Event
from trunkline.names import is_pattern, matches

FORM = "pubsub-data"
TEXT, BASE64 = "text", "base64"
_TOKEN = r"[^\s.*>]+"
_SUBJECT = re.compile(rf"{_TOKEN}(?:\.{_TOKEN})*")
_FILTER = re.compile(rf"(?:{_TOKEN}|\*)(?:\.(?:{_TOKEN}|\*))*(?:\.>)?|>")
_encode = msgspec.json.Encoder().encode


class Metadata(msgspec.Struct, frozen=True):
    """Where a message comes from."""

    deliveries: int  # how often it was delivered, this time included
    timestamp: datetime
    subject: str
    stream: str
    consumer: str


class Message:
    """``data`` and ``subject``, and the four verbs. The first verb wins."""

    __slots__ = ("_delivery", "data", "subject")

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self.data = data_of(delivery.event)
        self.subject = subject_of(delivery.event)

    @property
    def metadata(self) -> Metadata:
        delivery = self._delivery
        return Metadata(
            deliveries=delivery.attempt,
            timestamp=delivery.event.ts,
            subject=self.subject,
            stream=delivery.topic,
            consumer=delivery.group,
        )

    @property
    def is_settled(self) -> bool:
        return self._delivery.outcome is not None

    async def ack(self) -> bool:
        """The message is done."""
        return await self._delivery.ack()

    async def nak(self, delay_s: float | None = None) -> bool:
        """Deliver the message again, after ``delay_s`` or the consumer's backoff."""
        return await self._delivery.nack(delay_s)

    async def term(self, reason: str = "terminated") -> bool:
        """Never deliver the message again: it becomes a dead letter."""
        return await self._delivery.term(reason)

    async def in_progress(self) -> None:
        """Begin the time for an acknowledgement anew."""
        await self._delivery.in_progress()

    def __repr__(self) -> str:
        return f"<Message {self.subject} of {len(self.data)} bytes>"


def subject_of(event: Event) -> str:
    """The subject; that of an event without one is its topic."""
    return event.topic if event.subject is None else event.subject


def payload_of(data: Any) -> tuple[str, str]:
    """Bytes as a payload, and the form for the header."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise InvalidEvent(f"data is bytes, not {type(data).__name__}", field="payload")
    whole = bytes(data)
    try:
        return whole.decode(), TEXT
    except UnicodeDecodeError:
        return base64.b64encode(whole).decode(), BASE64


def data_of(event: Event) -> bytes:
    form, payload = event.headers.get(FORM), event.payload
    if form == TEXT and isinstance(payload, str):
        return payload.encode()
    if form == BASE64 and isinstance(payload, str):
        try:
            return base64.b64decode(payload, validate=True)
        except binascii.Error:
            return payload.encode()
    return _encode(payload)


def check_subject(subject: object) -> str:
    if not isinstance(subject, str) or not _SUBJECT.fullmatch(subject):
        hint = "tokens between dots, without spaces and wildcards"
        raise InvalidName(f"not a subject: {subject!r}", name=subject, hint=hint)
    return subject


def check_subjects(pattern: object) -> str:
    if not isinstance(pattern, str) or not _FILTER.fullmatch(pattern):
        hint = "* stands for one token, a last > for the rest"
        raise InvalidName(f"not a filter of subjects: {pattern!r}", name=pattern, hint=hint)
    return pattern


def is_wanted(pattern: str, subject: str) -> bool:
    return matches(pattern, subject) if is_pattern(pattern) else pattern == subject
