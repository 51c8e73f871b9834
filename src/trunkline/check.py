"""Checks of arguments and of events, before anything is written. A wrong value is a typed error
that names the field.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from importlib import import_module
from operator import attrgetter
from typing import Any

from trunkline.errors import InvalidEvent, InvalidOption, NotFound
from trunkline.event import BANDS, LETTER_MARK, PRIORITIES, Event
from trunkline.explain import spelt
from trunkline.fields import TEXTS
from trunkline.names import check_space, check_topic, is_dead
from trunkline.options import LONGEST_S, Limits

# -- arguments -------------------------------------------------------------------------------------


def check_delay(delay_s: Any, name: str = "delay_s") -> None:
    if delay_s is not None:
        check_span(delay_s, name)


def check_span(seconds: Any, name: str) -> None:
    if not isinstance(seconds, int | float) or not 0 <= seconds <= LONGEST_S:
        raise InvalidOption(f"{name} is a number of seconds, not {spelt(seconds)}", name=name)


def check_count(name: str, value: Any, low: int = 0, high: int = 2**63 - 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        most = f" to {high}" if high < 2**63 - 1 else " on"
        said = f"{name} is a whole number from {low}{most}, not {spelt(value)}"
        raise InvalidOption(said, name=name)


def load_extra(module: str, extra: str) -> Any:
    """A module that is there, or works, once ``extra`` is installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise NotFound(
            f"{error.name} is not installed", hint=f"pip install 'trunkline[{extra}]'"
        ) from None


# -- events ----------------------------------------------------------------------------------------

_texts = attrgetter(*TEXTS)
_NO_TEXTS = (None,) * len(TEXTS)


def check_event(event: Event, limits: Limits) -> None:
    """Raise ``InvalidEvent`` or ``InvalidName`` unless every field holds what it may hold."""
    if type(event) is not Event:
        raise InvalidEvent(f"an Event was expected, not {type(event).__name__}")
    check_topic(event.topic)
    _check_fields(event, limits)
    if is_dead(event.topic):
        _check_letter(event)


def check_events(topic: str, events: Iterable[Event], limits: Limits) -> None:
    """The same for each of a batch, all of one topic, whose name was checked."""
    dead = is_dead(topic)
    for event in events:
        if type(event) is not Event or event.topic != topic:
            check_event(event, limits)
            raise InvalidEvent(f"an event for {event.topic} in a batch for {topic}")
        _check_fields(event, limits)
        if dead:
            _check_letter(event)


def _check_fields(event: Event, limits: Limits) -> None:
    texts = _texts(event)
    if texts != _NO_TEXTS:
        for name, value in zip(TEXTS, texts, strict=True):
            if value is not None:
                check_text(name, value, limits.text_bytes)
    check_text("id", event.id, limits.text_bytes)
    if not event.id:
        raise InvalidEvent("an id is not empty", field="id")
    if event.space is not None:
        check_space(event.space)
    if event.priority not in PRIORITIES:
        known = ", ".join(PRIORITIES)
        raise InvalidEvent(f"unknown priority: {event.priority!r}", hint=f"priorities: {known}")
    if event.band not in BANDS:
        raise InvalidEvent(f"unknown band: {event.band!r}", hint=f"bands: {', '.join(BANDS)}")
    if event.ttl_s is not None and not _is_span(event.ttl_s):
        raise InvalidEvent(f"ttl_s is a number of seconds, not {event.ttl_s!r}", field="ttl_s")
    _check_time("ts", event.ts)
    if event.not_before is not None:
        _check_time("not_before", event.not_before)
    if event.headers != {} or type(event.headers) is not dict:
        _check_headers(event.headers, limits)
    if event.caps != ():
        if not isinstance(event.caps, tuple | list):
            raise InvalidEvent("caps is a list of names", field="caps")
        for cap in event.caps:
            check_text("caps", cap, limits.text_bytes)


def _check_letter(event: Event) -> None:
    if LETTER_MARK not in event.headers:
        raise InvalidEvent(
            f"not a dead letter: {event.topic} takes what a group gave up, with the reason",
            field="topic",
            hint="a handler that raises Reject, or delivery.term(reason), makes one",
        )


def check_text(name: str, value: Any, bytes_max: int = 1024) -> None:
    if not isinstance(value, str):
        raise InvalidEvent(f"{name} is text, not {type(value).__name__}", field=name)
    try:
        size = len(value) if value.isascii() else len(value.encode())
    except UnicodeEncodeError as error:
        raise InvalidEvent(f"{name} is not valid Unicode: {error}", field=name) from None
    if size > bytes_max:
        raise InvalidEvent(f"{name} is {size} bytes long, {bytes_max} are allowed", field=name)


def _check_time(name: str, when: Any) -> None:
    if not (isinstance(when, datetime) and when.tzinfo is not None):
        raise InvalidEvent(f"{name} is a datetime with a time zone, not {when!r}", field=name)


def _is_span(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e15


def _check_headers(headers: Any, limits: Limits) -> None:
    if not isinstance(headers, dict):
        raise InvalidEvent("headers is a mapping of text to text", field="headers")
    if len(headers) > limits.headers:
        raise InvalidEvent(f"{len(headers)} headers, {limits.headers} are allowed", field="headers")
    for name, value in headers.items():
        check_text("a header's name", name, limits.header_bytes)
        check_text(f"header {name!r}", value, limits.header_bytes)
