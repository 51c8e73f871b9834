"""Filters: from what a user writes to a function that says whether one event is wanted.

``field``, ``jsonpath``, ``all_of``, ``any_of`` and ``not_`` build a function; any function of an
event is a filter too. The textual form, a condition in SQL, is in ``trunkline.filters.where``.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from importlib import import_module
from operator import attrgetter
from typing import Any, Final, Literal

from trunkline import units
from trunkline.errors import InvalidFilter
from trunkline.event import Event

Filter = Callable[[Event], bool]
Mode = Literal["exact", "regex", "contains", "gt", "lt", "gte", "lte", "in", "exists"]

TEXT_MAX: Final = 4096  # characters of one where, JSONPath or regular expression
MATCHED_MAX: Final = 64 * 1024  # characters a regular expression is tried on
MATCH_S: Final = 0.1  # how long it may take on one event

MISSING: Final = object()
_META: Final = dict(zip(Event.__struct_encode_fields__, Event.__struct_fields__, strict=True))
_PATH = re.compile(r"[^.\[\]]+(?:\.[^.\[\]]+|\[\d{1,9}\])*")
_STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")
_TIME = re.compile(
    r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d{1,6})?)?(?:Z|[+-]\d\d:?\d\d)?)?", re.A
)


def check_filter(where: object) -> None:
    """Refuse what can be no filter before it meets an event."""
    if not (where is None or isinstance(where, str) or callable(where)):
        raise InvalidFilter(f"a filter is a condition in SQL or a function, not {where!r}")


def to_filter(where: str | Filter | None) -> Filter | None:
    """What a call means by its ``where``."""
    check_filter(where)
    if not isinstance(where, str):
        return where
    # Both stand on this module.
    from trunkline.filters.event_types import compile_types
    from trunkline.filters.where import compile_where

    return compile_types(where) or compile_where(where)


def need(module: str) -> Any:
    """A library of the extra ``filters``."""
    try:
        return import_module(module)
    except ImportError:
        raise InvalidFilter(
            f"this filter needs {module}", hint="pip install 'trunkline[filters]'", needs=module
        ) from None


def bounded(text: object, what: str) -> str:
    if not isinstance(text, str):
        raise InvalidFilter(f"{what} is text, not {type(text).__name__}")
    if len(text) > TEXT_MAX:
        raise InvalidFilter(f"{what} is {len(text)} characters long, {TEXT_MAX} are allowed")
    return text


def made(run: Filter, maker: str, *arguments: object) -> Filter:
    """Note how a filter was made: by that the members of a group compare it; see ``named``."""
    run.made_by = (maker, arguments)  # type: ignore[attr-defined]
    return run


def all_of(*filters: Filter) -> Filter:
    return made(lambda event: all(wanted(event) for wanted in filters), "all_of", *filters)


def any_of(*filters: Filter) -> Filter:
    return made(lambda event: any(wanted(event) for wanted in filters), "any_of", *filters)


def not_(wanted: Filter) -> Filter:
    return made(lambda event: not wanted(event), "not_", wanted)


def jsonpath(expression: str) -> Filter:
    """Want events in whose payload the RFC 9535 query ``expression`` finds at least one node.

    A query that visits too many nodes of one event, or one of whose regular expressions takes
    longer than ``MATCH_S``, raises ``InvalidFilter``.
    """
    need("jsonpath_rfc9535")
    need("regex")
    from trunkline.filters.jsonpath import compile_query

    def search(pattern: Any, text: str, limit_s: float) -> bool:
        return _search(pattern, text, "the JSONPath", limit_s)

    found = compile_query(bounded(expression, "a JSONPath"), search, MATCH_S)
    return made(lambda event: found(event.payload), "jsonpath", expression)


def field(path: str, value: Any = None, mode: Mode = "exact") -> Filter:
    """Want events whose ``path`` stands in the relation ``mode`` to ``value``.

    A path is an envelope field (``key``, ``meta.priority``), a header (``headers.region``) or
    leads into the payload (``payload.items[0].sku``). What is missing, or of another type than
    ``value``, has no relation to it. A regular expression is searched for, in text of at most
    ``MATCHED_MAX`` characters; one that takes longer than ``MATCH_S`` raises ``InvalidFilter``.
    """
    get = _field_getter(path)
    test = _field_test(path, value, mode)

    def run(event: Event) -> bool:
        found = get(event)
        return found is not MISSING and test(found)

    if mode == "exists" and value is False:
        return not_(made(run, "field", path, None, mode))
    return made(run, "field", path, value, mode)


def _field_getter(path: str) -> Callable[[Event], Any]:
    if not isinstance(path, str) or not _PATH.fullmatch(path[:TEXT_MAX]):
        raise InvalidFilter(f"not a path: {path!r}", hint="for example payload.items[0].sku")
    path = path.removeprefix("meta.")
    head, *steps = _steps(path)
    name = _META.get(str(head), head)
    if name not in Event.__struct_fields__:
        raise InvalidFilter(
            f"an event has no {head!r}", hint=f"fields: {', '.join(Event.__struct_fields__)}"
        )
    if name == "headers" and steps:
        steps = [path.removeprefix("headers.")]  # a header's name may hold dots
    get = attrgetter(str(name))

    def run(event: Event) -> Any:
        found = get(event)
        if found is None:
            return MISSING
        for step in steps:
            if isinstance(found, dict):
                found = found.get(step, MISSING)
            elif isinstance(found, list | tuple) and type(step) is int:
                found = found[step] if step < len(found) else MISSING
            else:
                return MISSING
        return found

    return run


def _steps(path: str) -> list[str | int]:
    return [int(index) if index else name for index, name in _STEP.findall(path)]


_ORDER: Final = {"gt": operator.gt, "lt": operator.lt, "gte": operator.ge, "lte": operator.le}


def _field_test(path: str, value: Any, mode: str) -> Callable[[Any], bool]:
    if mode == "exists":
        return lambda _: True
    if mode == "regex":
        return _regex_test(path, value)
    if mode == "exact":
        return lambda found: _same(found, value)
    if mode == "contains":
        return lambda found: _contains(found, value)
    if mode == "in":
        if not isinstance(value, Collection) or isinstance(value, str | bytes | dict):
            raise InvalidFilter(f"in takes a list of values, not {value!r}")
        return lambda found: any(_same(found, one) for one in value)
    if mode not in _ORDER:
        raise InvalidFilter(
            f"unknown mode {mode!r}",
            hint="modes: exact, regex, contains, gt, lt, gte, lte, in, exists",
        )
    return _order_test(value, _ORDER[mode])


def _same(found: Any, value: Any) -> bool:
    # In JSON true is not 1; in Python it is.
    if isinstance(found, bool) is not isinstance(value, bool):
        return False
    if isinstance(found, tuple):
        found = list(found)
    elif isinstance(found, datetime):
        value = read_time(value)
    return bool(found == value)


def _contains(found: Any, value: Any) -> bool:
    if isinstance(found, str):
        return isinstance(value, str) and value in found
    if isinstance(found, list | tuple | dict):
        return any(_same(one, value) for one in found)
    return False


def _order_test(value: Any, compare: Callable[[Any, Any], bool]) -> Callable[[Any], bool]:
    if isinstance(value, bool) or not isinstance(value, int | float | str | datetime):
        raise InvalidFilter(f"order is for numbers, text and times, not {value!r}")
    as_time = read_time(value)

    def run(found: Any) -> bool:
        if isinstance(found, datetime):
            return as_time is not None and compare(found, as_time)
        if isinstance(found, str):
            return isinstance(value, str) and compare(found, value)
        return (
            type(found) in (int, float)
            and isinstance(value, int | float)
            and bool(compare(found, value))
        )

    return run


def _regex_test(path: str, pattern: Any) -> Callable[[Any], bool]:
    # The engine of the standard library cannot be stopped: one hostile pattern or payload would
    # hold up a whole process. This one takes a time limit.
    library = need("regex")
    try:
        compiled = library.compile(bounded(pattern, "a regular expression"))
    except library.error as error:
        raise InvalidFilter(
            f"not a regular expression: {error}", position=getattr(error, "pos", 0)
        ) from error
    return lambda found: isinstance(found, str) and _search(compiled, found, path)


def _search(pattern: Any, text: str, where: str, limit_s: float = MATCH_S) -> bool:
    """Whether ``pattern`` is found in ``text``, which is not longer than ``MATCHED_MAX``."""
    if len(text) > MATCHED_MAX:
        return False
    try:
        return pattern.search(text, timeout=limit_s) is not None
    except TimeoutError:
        raise InvalidFilter(
            f"the regular expression on {where} took longer than {MATCH_S} s",
            pattern=pattern.pattern,
            hint="avoid repeats inside repeats",
        ) from None


def read_time(value: Any) -> datetime | None:
    """A date or time in ISO 8601, in UTC unless it says otherwise; None for anything else."""
    if isinstance(value, str):
        if not _TIME.fullmatch(value):
            return None
        try:
            value = units.read_time(value)
        except ValueError:
            return None
    if not isinstance(value, datetime):
        return None
    return value if value.tzinfo else value.replace(tzinfo=UTC)
