"""Ids of events."""

from __future__ import annotations

from uuid import uuid4


def generate_event_id() -> str:
    return "ev-" + uuid4().hex
