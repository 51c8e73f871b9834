"""Whether two globs share a path, against an enumeration of all short paths."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trunkline.errors import InvalidName
from trunkline.files.globs import clean, covers, overlap

ATOMS = st.sampled_from(["a", "b", "*", "?", "[ab]", "[!a]", "[a-c]", "**", "ab", "*a", "b?"])
PATTERNS = st.lists(
    st.lists(ATOMS, min_size=1, max_size=3).map("".join), min_size=1, max_size=3
).map("/".join)
# Patterns so small that a path they share, if there is one, is among PATHS.
SMALL = st.lists(
    st.one_of(
        st.just("**"),
        st.lists(st.sampled_from(["a", "b", "*", "?", "[ab]", "[!a]"]), min_size=1, max_size=2).map(
            "".join
        ),
    ),
    min_size=1,
    max_size=2,
).map("/".join)
NAMES = ["".join(name) for size in (1, 2) for name in itertools.product("abd", repeat=size)]
PATHS = ["/".join(parts) for size in (1, 2, 3) for parts in itertools.product(NAMES, repeat=size)]


def expression(pattern: str) -> re.Pattern[str]:
    """The pattern by an independent way: as a regular expression."""
    parts: list[str] = []
    for part in pattern.split("/"):
        if (part, parts[-1:]) != ("**", ["**"]):
            parts.append(part)
    out = ""
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        if part == "**":
            if last and out.endswith("/"):
                out = out[:-1] + "(?:/.*)?"
            else:
                out += ".*" if last else "(?:[^/]+/)*"
            continue
        text = re.sub(r"\*+", "*", part)
        text = text.replace("*", "[^/]*").replace("?", "[^/]").replace("[!a]", "[^a/]")
        out += text + ("" if last else "/")
    if re.fullmatch(r"[a-z]+", parts[-1]):
        out += "(?:/.*)?"
    return re.compile(out)


def shared(one: str, other: str) -> list[str]:
    first, second = expression(one), expression(other)
    return [path for path in PATHS if first.fullmatch(path) and second.fullmatch(path)]


@settings(max_examples=300, deadline=None)
@given(SMALL, SMALL)
def test_overlap_means_that_some_path_matches_both(one: str, other: str) -> None:
    assert overlap(one, other) == bool(shared(one, other))


@settings(max_examples=200, deadline=None)
@given(PATTERNS, PATTERNS)
def test_what_matches_both_is_an_overlap(one: str, other: str) -> None:
    for path in shared(one, other)[:1]:
        assert overlap(one, other), path
    assert overlap(one, other) == overlap(other, one)


@settings(max_examples=200, deadline=None)
@given(PATTERNS, st.sampled_from(PATHS))
def test_covers_agrees_with_the_expression(pattern: str, path: str) -> None:
    # A part that is made of single-member classes is plain too; none of the atoms is.
    assert covers(pattern, path) == bool(expression(pattern).fullmatch(path))


@pytest.mark.parametrize(
    ("one", "other", "want"),
    [
        ("src/**", "src/a.py", True),
        ("src/**", "src", True),
        ("src", "src/deep/a.py", True),
        ("src/*", "src/deep/a.py", False),
        ("src/*.py", "src/a.*", True),
        ("src/*.py", "src/*.md", False),
        ("**/test_*.py", "tests/unit/*", True),
        ("a/**/z", "a/z", True),
        ("a/**/z", "a/b", True),  # a/b may be a folder with a z in it
        ("a/**/z", "a/b*", False),
        ("a/**/z/**/y", "a/q/**", True),
        ("[a-f]*", "[g-z]*", False),
        ("[!a-f]x", "[a-g]x", True),
        ("[!a-z]", "[b-y]", False),
        ("*a*b*", "*c*", True),
        ("a*b", "b*a", False),
        ("[", "[", True),
        ("[]]", "]", True),
        ("a", "ab", False),
        ("**", "anything/at/all", True),
        ("?", "ab", False),
    ],
)
def test_overlap_of_known_pairs(one: str, other: str, want: bool) -> None:
    assert overlap(one, other) is want
    assert overlap(other, one) is want


def test_long_patterns_take_no_time() -> None:
    assert overlap("*a" * 400 + "b", "a*" * 400 + "b")
    assert not overlap("*a" * 300 + "b", "a*" * 300 + "c")
    assert overlap("/".join(["**", "a"] * 200), "/".join(["a"] * 300))


def test_clean_gives_one_spelling() -> None:
    assert clean("./src//a/") == "src/a"
    assert clean(".") == "**"
    for bad in ("", "/etc", "../x", "a/../../b", "a\nb", "x" * 1025):
        with pytest.raises(InvalidName):
            clean(bad)
