"""The condition of a group that wants some types of events: ``type IN ('cancelled', 'placed')``.

It is a condition like any other, and needs no library.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from trunkline.event import Event
from trunkline.filters import Filter

_TEXT = r"'((?:[^']|'')*)'"
_CONDITION = re.compile(rf"type IN \({_TEXT}(?:, {_TEXT})*\)")


def condition(types: Iterable[str]) -> str:
    """The same text for the same types, in whatever order they are given."""
    listed = ", ".join("'" + one.replace("'", "''") + "'" for one in sorted(set(types)))
    return f"type IN ({listed})"


def compile_types(text: str) -> Filter | None:
    """The filter of such a condition; None if ``text`` is another one."""
    if _CONDITION.fullmatch(text) is None:
        return None
    types = frozenset(one.replace("''", "'") for one in re.findall(_TEXT, text))

    def is_wanted(event: Event) -> bool:
        return event.type in types

    return is_wanted
