"""Paths and globs: which paths a pattern covers, and whether two patterns share one.

``*`` and ``?`` stay within one part of a path, ``**`` as a whole part stands for any number of
parts, ``[a-z]`` and ``[!a-z]`` are classes. A pattern whose last part is plain also covers what
lies below it, so that a folder is claimed with its files.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from trunkline.errors import InvalidName

_TOP: Final = 0x10FFFF
Ranges = tuple[tuple[int, int], ...]
Part = tuple[Ranges, ...]
_STAR: Final[Ranges] = ()  # a run of any characters; every other token is a set of ranges
_DEEP: Final[Part] = ()  # a whole part "**"; every other part has tokens
_ANY: Final[Ranges] = ((0, ord("/") - 1), (ord("/") + 1, _TOP))
_PATTERN_MAX = 1024
_EXPANDED_MAX = 100
_BRACES = re.compile(r"\{([^{}]*)\}")


def clean(pattern: str) -> str:
    """The one spelling of a relative pattern: no ``./``, ``//`` or last ``/``.

    ``InvalidName`` for an empty or absolute one, and for one that climbs out with ``..``.
    """
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    if not pattern or pattern.startswith("/") or ".." in parts or len(pattern) > _PATTERN_MAX:
        raise InvalidName(
            f"not a path or glob: {pattern[:80]!r}",
            name=pattern,
            hint="use a path relative to the top of the tree, without '..'",
        )
    if any(ord(char) < 32 or char in "\x7f\x85\u2028\u2029" for char in pattern):
        raise InvalidName(f"a path holds no control characters: {pattern[:80]!r}", name=pattern)
    return "/".join(parts) or "**"


def expand(pattern: str) -> list[str]:
    """The patterns that braces stand for: ``src/{a,b}.py`` is ``src/a.py`` and ``src/b.py``.

    ``InvalidName`` for braces that do not match, are nested, or stand for too many patterns.
    """
    found = [""]
    for index, part in enumerate(_BRACES.split(pattern)):
        choices = part.split(",") if index % 2 else [part]
        if any("{" in choice or "}" in choice for choice in choices):
            raise InvalidName(
                f"braces that do not match, or lie in each other: {pattern[:80]!r}",
                name=pattern,
                hint="write {a,b}, or claim each path by itself",
            )
        found = [before + choice for before in found for choice in choices]
        if len(found) > _EXPANDED_MAX:
            raise InvalidName(
                f"braces that stand for more than {_EXPANDED_MAX} paths: {pattern[:80]!r}",
                name=pattern,
            )
    return found


def overlap(one: str, other: str) -> bool:
    """Whether some path is covered by both patterns."""
    return _meet(_compile(one), _compile(other))


def covers(pattern: str, path: str) -> bool:
    """Whether ``path``, in which no character is special, is covered by ``pattern``."""
    literal = tuple(
        tuple(((ord(char), ord(char)),) for char in part)
        for part in path.split("/")
        if part not in ("", ".")
    )
    return _meet(_compile(pattern), literal)


@lru_cache(maxsize=4096)
def _compile(pattern: str) -> tuple[Part, ...]:
    texts = [part for part in pattern.split("/") if part not in ("", ".")] or ["**"]
    parts: list[Part] = [_DEEP if text == "**" else _tokens(text) for text in texts]
    if parts[-1] and all(len(token) == 1 and token[0][0] == token[0][1] for token in parts[-1]):
        parts.append(_DEEP)
    return tuple(parts)


def _tokens(text: str) -> Part:
    tokens: list[Ranges] = []
    at = 0
    while at < len(text):
        char = text[at]
        end = _class_end(text, at) if char == "[" else -1
        if char == "*":
            if not tokens or tokens[-1] != _STAR:
                tokens.append(_STAR)
        elif char == "?":
            tokens.append(_ANY)
        elif end > 0:
            tokens.append(_class(text[at + 1 : end]))
            at = end
        else:
            tokens.append(((ord(char), ord(char)),))
        at += 1
    return tuple(tokens)


def _class_end(text: str, at: int) -> int:
    """Where the class that opens at ``at`` closes, or -1: then the bracket is just a bracket."""
    first = at + 1
    if text[first : first + 1] in ("!", "^"):
        first += 1
    return text.find("]", first + 1)  # a bracket that comes first is a member


def _class(body: str) -> Ranges:
    negated = body[:1] in ("!", "^")
    chars = body[1:] if negated else body
    ranges: list[tuple[int, int]] = []
    at = 0
    while at < len(chars):
        if chars[at + 1 : at + 2] == "-" and at + 2 < len(chars):
            low, high = ord(chars[at]), ord(chars[at + 2])
            if low <= high:
                ranges.append((low, high))
            at += 3
        else:
            ranges.append((ord(chars[at]), ord(chars[at])))
            at += 1
    if not negated:
        return _both(tuple(sorted(ranges)), _ANY)
    free, low = [], 0
    for start, end in sorted(ranges):
        if start > low:
            free.append((low, start - 1))
        low = max(low, end + 1)
    if low <= _TOP:
        free.append((low, _TOP))
    return _both(tuple(free), _ANY)


def _both(one: Ranges, other: Ranges) -> Ranges:
    # Never empty: () is the star. A class without members is a range no character is in.
    shared = tuple(
        (max(a, c), min(b, d)) for a, b in one for c, d in other if max(a, c) <= min(b, d)
    )
    return shared or ((-1, -1),)


def _share(one: Ranges, other: Ranges) -> bool:
    return any(max(a, c, 0) <= min(b, d) for a, b in one for c, d in other)


def _meet(one: tuple[Part, ...], other: tuple[Part, ...]) -> bool:
    """Whether the two sequences of parts have a path in common, by the table of all suffixes."""
    below = _last_row(len(other), [part == _DEEP for part in other])
    for part in reversed(one):
        row = [False] * (len(other) + 1)
        row[-1] = part == _DEEP and below[-1]
        for at in range(len(other) - 1, -1, -1):
            against = other[at]
            if part == _DEEP or against == _DEEP:
                # "**" stands for nothing, or for one part more of what the other side has.
                row[at] = (
                    (part == _DEEP and below[at])
                    or (against == _DEEP and row[at + 1])
                    or (part == _DEEP and _possible(against) and row[at + 1])
                    or (against == _DEEP and _possible(part) and below[at])
                )
            else:
                row[at] = below[at + 1] and _meet_part(part, against)
        below = row
    return below[0]


def _meet_part(one: Part, other: Part) -> bool:
    below = _last_row(len(other), [token == _STAR for token in other])
    for token in reversed(one):
        row = [False] * (len(other) + 1)
        row[-1] = token == _STAR and below[-1]
        for at in range(len(other) - 1, -1, -1):
            against = other[at]
            if token == _STAR or against == _STAR:
                row[at] = (
                    (token == _STAR and below[at])
                    or (against == _STAR and row[at + 1])
                    or (token == _STAR and _real(against) and row[at + 1])
                    or (against == _STAR and _real(token) and below[at])
                )
            else:
                row[at] = below[at + 1] and _share(token, against)
        below = row
    return below[0]


def _last_row(size: int, empty: list[bool]) -> list[bool]:
    """What is left of the other side when this one is used up: only what may stand for nothing."""
    row = [False] * size + [True]
    for at in range(size - 1, -1, -1):
        row[at] = empty[at] and row[at + 1]
    return row


def _possible(part: Part) -> bool:
    return all(token == _STAR or _real(token) for token in part)


def _real(token: Ranges) -> bool:
    return any(high >= 0 for _, high in token)
