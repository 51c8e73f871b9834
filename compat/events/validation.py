"""Checks before an event is published."""

from __future__ import annotations

from events.types import Event, to_bus
from trunkline import Limits
from trunkline.check import check_event
from trunkline.codec import encode_event
from trunkline.names import check_topic


def validate_topic_format(topic: str) -> str:
    """The topic; ``trunkline.InvalidName`` if it is none."""
    return check_topic(topic)


def validate_event(event: Event) -> None:
    """``trunkline.InvalidEvent`` or ``InvalidName`` unless the event can be published."""
    found = to_bus(event)
    check_event(found, Limits())
    encode_event(found, Limits())
