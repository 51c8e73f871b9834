"""``docs/options.md`` has every option with its default and bounds, and no other."""

from __future__ import annotations

import re
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import pytest

from trunkline import options

PAGE = (Path(__file__).parents[1] / "docs" / "options.md").read_text("utf-8")
KINDS = [
    kind
    for kind in vars(options).values()
    if isinstance(kind, type) and issubclass(kind, options.Options) and kind is not options.Options
]


def allowed(kind: Any) -> str:
    """What a field may hold, in the words of the page."""
    if get_origin(kind) is Annotated:
        base, meta = get_args(kind)[:2]
        number = "number" if base is float else "whole number"
        most = f" to {meta.le}" if meta.le is not None else " or more"
        return f"{number}, {meta.ge}{most}"
    if get_origin(kind) is Literal:
        return " ".join(f"`{msgspec.json.encode(word).decode()}`" for word in get_args(kind))
    parts = get_args(kind)
    if NoneType in parts:
        return f"{allowed(next(part for part in parts if part is not NoneType))}, or `None`"
    if msgspec.UnsetType in parts:
        return f"{allowed(next(part for part in parts if part is not msgspec.UnsetType))}, or unset"
    return "`True` `False`" if kind is bool else f"`{kind.__name__}`"


def rows(name: str) -> dict[str, tuple[str, str]]:
    section = re.search(rf"^## {name}\b.*?(?=^## |\Z)", PAGE, re.M | re.S)
    assert section, f"docs/options.md has no section {name}"
    found = re.findall(r"^\| `(\w+)` \| `([^`]*)` \| ([^|]*) \|", section[0], re.M)
    return {option: (default, bounds) for option, default, bounds in found}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_option_is_there_with_its_default_and_bounds(kind: type[options.Options]) -> None:
    hints = get_type_hints(kind, include_extras=True)
    defaults = msgspec.structs.asdict(kind())
    wanted = {
        name: (
            "Limits()" if name == "limits" else re.sub("'", '"', repr(default)),
            allowed(hints[name]),
        )
        for name, default in defaults.items()
    }
    assert rows(kind.__name__) == wanted
