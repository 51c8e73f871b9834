"""How a wrong value is told to a person: the value, and why a decoder refused it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The name that ``word`` was probably meant to be; None if none is like it."""
    from difflib import get_close_matches  # only a mistake pays for the import

    names = {name.lower(): name for name in known}
    found = get_close_matches(word.lower(), names, 1, 0.6)
    return names[found[0]] if found else None


def spelt(value: Any) -> str:
    try:
        return repr(value)
    except ValueError:  # Python writes out no number of thousands of digits
        return "a number of so many digits"


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
