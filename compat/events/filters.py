"""Filters over an event as ``{"meta": {...}, "payload": {...}}``. A wrong one is refused when it is
made; one that fails on an event does not match it.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from enum import Enum
from typing import Any, Protocol

from events.types import Event

_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "gt": operator.gt,
    "lt": operator.lt,
    "gte": operator.ge,
    "lte": operator.le,
}
_SIMPLE = ("exact", "regex", "contains", *_ORDER)
_JSONPATH = ("exact", "contains", "regex", "any", "all")


class FilterValidationError(ValueError):
    """The filter is not valid."""


class Filter(Protocol):
    def matches(self, event: Event) -> bool: ...


def _check(mode: str, modes: Sequence[str], value: Any) -> None:
    if mode not in modes:
        raise FilterValidationError(f"unknown mode {mode!r}; modes: {', '.join(modes)}")
    if mode == "regex":
        try:
            re.compile(value)
        except (re.error, TypeError) as error:
            raise FilterValidationError(f"not a regular expression: {error}") from error


def _related(found: Any, value: Any, mode: str) -> bool:
    try:
        if mode == "exact":
            return bool(found == value)
        if mode == "regex":
            return isinstance(found, str) and re.search(value, found) is not None
        if mode == "contains":
            return value in found
        return _ORDER[mode](found, value)
    except TypeError:
        return False


def _document(event: Event) -> dict[str, Any]:
    meta = {one.name: getattr(event.meta, one.name) for one in fields(event.meta)}
    plain = {name: v.value if isinstance(v, Enum) else v for name, v in meta.items()}
    plain["ts"] = event.meta.ts.isoformat()
    return {"meta": plain, "payload": event.payload}


class SimpleFilter:
    """``path`` leads through the event by dots. What is missing equals None and nothing else."""

    def __init__(self, path: str, value: Any, mode: str = "exact") -> None:
        if not path or not isinstance(path, str):
            raise FilterValidationError(f"not a path: {path!r}")
        _check(mode, _SIMPLE, value)
        self.path, self.value, self.mode = path, value, mode

    def matches(self, event: Event) -> bool:
        found: Any = _document(event)
        for step in self.path.split("."):
            if isinstance(found, list) and step.isdigit() and int(step) < len(found):
                found = found[int(step)]
            else:
                found = found.get(step) if isinstance(found, dict) else None
        return _related(found, self.value, self.mode)


class JSONPathFilter:
    """An RFC 9535 query. ``any`` matches if it finds something, ``all`` if all it finds equals
    ``value``; the other modes if some of it stands in that relation to ``value``.
    """

    def __init__(self, path: str, value: Any = None, mode: str = "exact") -> None:
        import jsonpath_rfc9535 as library

        _check(mode, _JSONPATH, value)
        try:
            self._query = library.compile(path)
        except (library.JSONPathError, TypeError) as error:
            raise FilterValidationError(f"not a JSONPath: {error}") from error
        self.path, self.value, self.mode = path, value, mode

    def matches(self, event: Event) -> bool:
        found = [node.value for node in self._query.find(_document(event))]
        if self.mode == "any":
            return bool(found)
        if self.mode == "all":
            return bool(found) and all(value == self.value for value in found)
        return any(_related(value, self.value, self.mode) for value in found)


class CustomFunctionFilter:
    def __init__(self, function: Callable[[Event], Any]) -> None:
        if not callable(function):
            raise FilterValidationError("a function is needed")
        self.function = function

    def matches(self, event: Event) -> bool:
        try:
            return bool(self.function(event))
        except Exception:  # noqa: BLE001 -- a filter that fails does not match
            return False


class CompoundFilter:
    """``AND``, ``OR``, or ``NOT`` of exactly one."""

    def __init__(self, op: str, filters: Sequence[Filter]) -> None:
        self.op, self.filters = op.upper(), list(filters)
        if self.op not in ("AND", "OR", "NOT"):
            raise FilterValidationError(f"unknown operator {op!r}; operators: AND, OR, NOT")
        if not self.filters or (self.op == "NOT" and len(self.filters) != 1):
            raise FilterValidationError(f"{self.op} of {len(self.filters)} filters")

    def matches(self, event: Event) -> bool:
        if self.op == "NOT":
            return not self.filters[0].matches(event)
        join = all if self.op == "AND" else any
        return join(one.matches(event) for one in self.filters)
