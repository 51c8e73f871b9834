"""Everything that can go wrong, in one tree.

::

    TrunklineError
    ├── Invalid                                  the caller's fault; nothing was written
    │   ├── InvalidEvent · InvalidName · InvalidOption · InvalidFilter
    ├── NoBus                                    there is no bus at that place
    ├── NotFound                                 the bus has no such topic, group, record, ...
    │   └── OutOfRange                           the offset was trimmed, or is not written yet
    ├── Conflict                                 someone else got there first
    │   └── Duplicate                            the same event is there already
    ├── StorageError                             the disk
    │   ├── Corrupt                              damaged bytes; names the file and the position
    │   ├── StorageFull                          no room; publishing resumes by itself
    │   ├── LockTimeout                          another process holds the lock for too long
    │   └── UnsupportedFormat                    written by a newer version
    ├── Closed                                   used after close, or in a forked child
    ├── ConnectionLost · ProtocolError           the wire
    └── Denied                                   access

    HandlerSignal                                what a handler raises on purpose; never logged
    ├── Retry                                    deliver again, later
    └── Reject                                   dead letter at once
        └── FatalError                           the same, by its other common name

Each error carries the facts as fields and, where a person can act, a ``hint``.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

import msgspec


class TrunklineError(Exception):
    """Something failed in Trunkline."""

    def __init__(self, message: str = "", *, hint: str = "", **fields: Any) -> None:
        self.message = message or (type(self).__doc__ or "").strip()
        self.hint = hint
        self.fields = fields
        super().__init__(self.message)

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(name)

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.hint, self.fields)


def _rebuild(
    cls: type[TrunklineError], message: str, hint: str, fields: dict[str, Any]
) -> TrunklineError:
    return cls(message, hint=hint, **fields)


class Invalid(TrunklineError):
    """The input is not valid; nothing was written."""


class InvalidEvent(Invalid):
    """The event is not valid."""


class InvalidName(Invalid):
    """The name is not valid."""


class InvalidOption(Invalid):
    """The option is not valid."""


class InvalidFilter(Invalid):
    """The filter is not valid."""


class NoBus(TrunklineError):
    """There is no bus here."""


class NotFound(TrunklineError):
    """There is no such thing on this bus."""


class OutOfRange(NotFound):
    """The offset is outside what the log holds."""


class Conflict(TrunklineError):
    """It conflicts with what is there."""


class Duplicate(Conflict):
    """The same event is there already."""


class StorageError(TrunklineError):
    """The storage failed."""


class Corrupt(StorageError):
    """Stored bytes are damaged."""


class StorageFull(StorageError):
    """There is no room left on the device."""


class LockTimeout(StorageError):
    """Another process holds the lock for too long."""


class UnsupportedFormat(StorageError):
    """The folder was written by a newer version."""


class Closed(TrunklineError):
    """It is closed."""


class ConnectionLost(TrunklineError):
    """The connection was lost."""


class ProtocolError(TrunklineError):
    """The other side broke the protocol."""


class Denied(TrunklineError):
    """Access was denied."""


LONGEST_S = 1e10  # three centuries: what JSON and a calendar can hold, and no infinity


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


def spelt(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:  # Python writes out no number of thousands of digits
        return "a number of so many digits"


def load_extra(module: str, extra: str) -> Any:
    """A module that is there, or works, once ``extra`` is installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise NotFound(
            f"{error.name} is not installed", hint=f"pip install 'trunkline[{extra}]'"
        ) from None


class HandlerSignal(Exception):
    """What a handler raises on purpose."""


class Retry(HandlerSignal):
    """Deliver the record again, after ``delay_s`` or after the group's own backoff."""

    def __init__(self, delay_s: float | None = None, reason: str = "") -> None:
        check_delay(delay_s)
        super().__init__(reason or "retry asked for")
        self.delay_s = delay_s

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.delay_s, str(self))


class Reject(HandlerSignal):
    """Never deliver the record to this group again: it becomes a dead letter."""

    def __init__(self, reason: str = "rejected") -> None:
        super().__init__(reason)
        self.reason = reason


class FatalError(Reject):
    """Trying again cannot help."""


_KINDS = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "object": "an object",
    "array": "a list",
    "null": "null",
}
_PLACE = re.compile(r"(.*?)(?: - at `\$\.?(.*)`)?", re.DOTALL)
_NAMED = re.compile(r"Object (missing required|contains unknown) field `(.*)`", re.DOTALL)
_WANTED = re.compile(r"Expected `([^`]*)`(?:, got `(.*)`| (.*))?", re.DOTALL)
_FORMAT = re.compile(r"Invalid (RFC3339|UUID|base64)")
_FORMATS = {"RFC3339": "a time like 2026-05-04T12:00:00Z", "UUID": "a UUID", "base64": "base64"}
_BYTE = re.compile(r" \(byte (\d+)\)")
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
_SHOWN = 40


def reason(error: Exception, source: Any = None) -> str:
    """What is wrong with a value from outside, from what its decoder said: the field, what it must
    be and, if ``source`` is what was decoded, what it is.
    """
    if isinstance(error, UnicodeError):
        return "it is not UTF-8"
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    placed = _PLACE.fullmatch(str(error))
    text, place = placed.groups() if placed else (str(error), None)
    field = place or "it"
    if field.endswith("[...]"):
        field = f"a value in {field[:-5] or 'it'}"
    shown = _shown(place or "", source)
    if named := _NAMED.fullmatch(text):
        name = f"{place}.{named[2]}" if place else named[2]
        return f"{name} is missing" if named[1][0] == "m" else f"there is no field {name}"
    if wanted := _WANTED.fullmatch(text):
        kinds = " or ".join(_KINDS.get(kind, kind) for kind in wanted[1].split(" | "))
        found = shown or _KINDS.get(wanted[2], wanted[2])
        bound = f" {wanted[3]}" if wanted[3] else ""
        return f"{field} must be {kinds}{bound}" + (f", not {found}" if found else "")
    if wanted := _FORMAT.match(text):
        return f"{field} must be {_FORMATS[wanted[1]]}" + (f", not {shown}" if shown else "")
    if text.startswith(("Invalid enum value ", "Invalid value ")):
        return f"{field} cannot be {text.partition('value ')[2]}"
    if text == "Input data was truncated":
        return "it ends in the middle"
    if text == "Number out of range":
        return "it holds a number that is out of range"
    if isinstance(source, bytes | memoryview) and (at := _BYTE.search(text)):
        low = max(0, int(at[1]) - _SHOWN // 2)
        near = bytes(source[low : low + _SHOWN]).decode(errors="replace")
        text = text.replace(at[0], f" at byte {at[1]}, in {near!r}")
    text = text.replace("JSON is malformed", "it is not JSON")
    return f"{place}: {text}" if place else text


def _shown(place: str, source: Any) -> str:
    """The value at a place in what was decoded, if it is found and short."""
    if source is None:
        return ""
    try:
        if isinstance(source, bytes | memoryview):
            source = msgspec.json.decode(source)
        for name, index in _STEP.findall(place):
            source = source[int(index) if index else name]
        text = msgspec.json.encode(source).decode()
    except (ValueError, TypeError, LookupError, RecursionError):
        return ""
    return text if text[0] not in "[{" and len(text) <= _SHOWN else ""
