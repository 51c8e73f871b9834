"""The text by which members of a group compare their filters.

A condition is its own text. A function has a name, ``py:module:function``: a function that has no
name in its module is described by its place and the values that it closes over.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any
from weakref import WeakValueDictionary

from trunkline.errors import InvalidFilter
from trunkline.filters import Filter, check_filter, to_filter

_PREFIX = "py:"
_known: WeakValueDictionary[str, Any] = WeakValueDictionary()  # functions of this process
_kept: dict[str, Filter] = {}


def name_of(where: str | Filter | None) -> str | None:
    """The text that stands for a filter in a group's policy."""
    check_filter(where)
    if where is None or isinstance(where, str):
        return where
    name = _PREFIX + _describe(where)
    try:
        _known[name] = where
    except TypeError:  # it takes no weak reference
        _kept[name] = where
    return name


def filter_named(name: str) -> Filter:
    """The filter that a policy names; ``InvalidFilter`` if this process does not have it."""
    if not name.startswith(_PREFIX):
        found = to_filter(name)
        assert found is not None
        return found
    known: Filter | None = _known.get(name) or _kept.get(name)
    if known is not None:
        return known
    module, _, path = name.removeprefix(_PREFIX).partition(":")
    try:
        if "<" in path or "@" in path:
            raise AttributeError(path)
        value: Any = import_module(module)
        for part in path.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError):
        raise InvalidFilter(
            f"the group's filter is a function that this process does not have: {name}",
            hint="subscribe with the same function, or give the group a condition: "
            "trunkline group edit TOPIC GROUP --where CONDITION",
        ) from None
    if not callable(value):
        raise InvalidFilter(f"the group's filter is no function: {name}")
    return value  # type: ignore[no-any-return]


def _describe(value: Callable[..., Any]) -> str:
    module = getattr(value, "__module__", None) or type(value).__module__
    path = getattr(value, "__qualname__", None)
    if path is None:
        return f"{module}:{type(value).__qualname__}@{value!r}"
    if _is_found(module, path, value):
        return f"{module}:{path}"
    code = getattr(value, "__code__", None)
    line = code.co_firstlineno if code is not None else 0
    cells = [_content(cell) for cell in getattr(value, "__closure__", None) or ()]
    return f"{module}:{path}@{line}({', '.join(cells)})"


def _is_found(module: str, path: str, value: object) -> bool:
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found is value


def _content(cell: Any) -> str:
    try:
        value = cell.cell_contents
    except ValueError:
        return "?"
    if isinstance(value, tuple | list):
        return f"[{', '.join(_value(one) for one in value)}]"
    return _value(value)


def _value(value: Any) -> str:
    return _describe(value) if callable(value) else repr(value)
