"""The text by which members of a group compare their filters.

A condition is its own text. A function has a name, ``py:module:function``. A filter made by
``trunkline.filters`` is described by what made it, and any other function without a name in its
module by its place, a digest of its code and the values that it closes over. The text is the same
in each process that runs the same code, and no address in memory is part of it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import CodeType
from typing import Any
from weakref import WeakValueDictionary
from zlib import crc32

from trunkline.errors import InvalidFilter
from trunkline.filters import Filter, check_filter, to_filter

_PREFIX = "py:"
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
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
        if any(mark in name for mark in "<@("):  # it is described, and not named
            raise AttributeError(path)
        value: Any = import_module("__main__" if module == _program() else module)
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
    made_by = getattr(value, "made_by", None)
    if made_by is not None:
        maker, arguments = made_by
        return f"{maker}({', '.join(map(_value, arguments))})"
    if isinstance(value, partial):
        given = [*value.args, *sorted(value.keywords.items())]
        return f"partial({', '.join(map(_value, (value.func, *given)))})"
    module = getattr(value, "__module__", None) or type(value).__module__
    path = getattr(value, "__qualname__", None)
    place = _program() if module == "__main__" else module
    if path is None:  # an object that can be called
        code = getattr(type(value).__call__, "__code__", None)
        state = sorted(getattr(value, "__dict__", {}).items())
        told = ", ".join(f"{name}={_value(one)}" for name, one in state)
        return f"{place}:{type(value).__qualname__}@{_digest(code)}({told or _value(repr(value))})"
    if _is_found(module, path, value):
        return f"{place}:{path}"
    cells = [_content(cell) for cell in getattr(value, "__closure__", None) or ()]
    return f"{place}:{path}@{_digest(getattr(value, '__code__', None))}({', '.join(cells)})"


def _program() -> str:
    """The name of the module that was started: two programs are both ``__main__``."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    name = spec.name if spec is not None else getattr(main, "__file__", None) or ""
    return f"__main__[{name.rpartition('/')[2]}]"


def _digest(code: CodeType | None) -> str:
    return "" if code is None else f"{crc32(_parts(code).encode()):08x}"


def _parts(code: CodeType) -> str:
    constants = [
        _parts(one) if isinstance(one, CodeType) else _value(one) for one in code.co_consts
    ]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _is_found(module: str, path: str, value: object) -> bool:
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found is value


def _content(cell: Any) -> str:
    try:
        return _value(cell.cell_contents)
    except ValueError:
        return "?"


def _value(value: Any) -> str:
    if callable(value):
        return _describe(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(_value, value)))}}}"
    return _ADDRESS.sub("", repr(value))
