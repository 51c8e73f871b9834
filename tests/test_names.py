"""Names, wildcards and the partition of a key."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trunkline.errors import InvalidName
from trunkline.names import (
    check_consumer,
    check_group,
    check_pattern,
    check_space,
    check_topic,
    dead_topic,
    is_dead,
    is_pattern,
    matches,
    partition_for,
)

CHECKS: list[Callable[[Any], str]] = [check_topic, check_group, check_consumer, check_space]
GOOD = ["a", "orders", "orders.eu", "A-1.b_2", "a_", "-a", "0", "a" * 200, "orders.DLQ"]
BAD = [
    "",
    ".",
    "..",
    ".a",
    "a.",
    "a..b",
    "a__b",
    "a/b",
    "../etc/passwd",
    "a b",
    "a\n",
    "\na",
    "a\x00",
    "a~1",
    "a*",
    "*",
    ">",
    "é",
    "a\u202eb",
    "a\ud800",
    "٣",
    "a" * 201,
]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", GOOD)
def test_a_good_name_is_given_back(check: Callable[[Any], str], name: str) -> None:
    assert check(name) == name


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", BAD)
def test_a_bad_name_is_refused_with_the_rule(check: Callable[[Any], str], name: str) -> None:
    with pytest.raises(InvalidName) as caught:
        check(name)
    assert caught.value.name == name
    assert "tokens" in caught.value.hint


@pytest.mark.parametrize("check", [*CHECKS, check_pattern])
@pytest.mark.parametrize("name", [None, 5, b"orders", ("a",), ["a"], {"a": 1}])
def test_what_is_not_text_is_no_name(check: Callable[[Any], str], name: Any) -> None:
    with pytest.raises(InvalidName):
        check(name)


def test_a_group_does_not_start_where_the_separator_ends() -> None:
    assert check_topic("_a") == "_a"
    with pytest.raises(InvalidName):
        check_group("_a")


def test_topic_and_group_are_found_again_in_a_joined_name() -> None:
    parts = ["a", "a_", "_a", "a_a", "_", "a._", "-"]
    joined: dict[str, tuple[str, str]] = {}
    for topic, group in product(parts, repeat=2):
        if group.startswith("_"):
            continue
        check_topic(topic), check_group(group)
        assert joined.setdefault(f"{topic}__{group}", (topic, group)) == (topic, group)


def test_a_space_may_hold_colons() -> None:
    assert check_space("shared:household") == "shared:household"
    for name in (":", "a:", ":a", "a::b"):
        with pytest.raises(InvalidName):
            check_space(name)


RULE = re.compile(r"[A-Za-z0-9_\-.]+")


HOSTILE = (
    st.text(max_size=12)
    | st.text(alphabet="ab._-*>/\\ \n\x00é", max_size=12)
    | st.text(alphabet=st.characters(categories=["Cs", "Cc", "Cf", "Nd", "Lo"]), max_size=6)
    | st.builds(lambda count, end: "a" * count + end, st.integers(195, 205), st.sampled_from(".b"))
)


@settings(max_examples=250, deadline=None)
@given(st.lists(HOSTILE, min_size=40, max_size=40))
def test_of_10_000_hostile_names_only_the_lawful_pass(names: list[str]) -> None:
    for name in names:
        lawful = (
            bool(RULE.fullmatch(name))
            and all(name.split("."))
            and "__" not in name
            and len(name.encode("utf-8", "surrogatepass")) <= 200
        )
        passed = True
        try:
            check_topic(name)
        except InvalidName:
            passed = False
        assert passed is lawful, name


@pytest.mark.parametrize("pattern", ["a", "*", ">", "a.*", "a.>", "*.b.>", "*.*", "a.*.c"])
def test_a_pattern_is_given_back(pattern: str) -> None:
    assert check_pattern(pattern) == pattern
    assert is_pattern(pattern) is (pattern != "a")


@pytest.mark.parametrize(
    "pattern", ["", "a*", "*a", ">.a", "a.>.b", "a>", "**", ">>", "a..*", "*."]
)
def test_a_wildcard_stands_for_whole_tokens(pattern: str) -> None:
    with pytest.raises(InvalidName) as caught:
        check_pattern(pattern)
    assert ("whole token" in caught.value.hint) is is_pattern(pattern)


def brute_force(pattern: list[str], topic: list[str]) -> bool:
    if pattern == [">"]:
        return bool(topic)
    if not pattern or not topic:
        return pattern == topic
    return pattern[0] in ("*", topic[0]) and brute_force(pattern[1:], topic[1:])


TOKENS = st.lists(st.sampled_from(["a", "b", "aa"]), min_size=1, max_size=5)


@settings(max_examples=400, deadline=None)
@given(
    pattern=st.lists(st.sampled_from(["a", "b", "*"]), max_size=5),
    rest=st.booleans(),
    topic=TOKENS,
)
def test_matching_agrees_with_brute_force(pattern: list[str], rest: bool, topic: list[str]) -> None:
    pattern = [*pattern, ">"] if rest or not pattern else pattern
    text = check_pattern(".".join(pattern))
    assert matches(text, ".".join(topic)) is brute_force(pattern, topic)


@pytest.mark.parametrize(
    ("pattern", "topic", "expected"),
    [
        ("orders", "orders", True),
        ("orders", "orders.eu", False),
        ("orders.*", "orders", False),
        ("orders.*", "orders.eu", True),
        ("orders.*", "orders.eu.de", False),
        ("orders.>", "orders", False),
        ("orders.>", "orders.eu.de", True),
        (">", "orders", True),
        ("*", "orders.eu", False),
    ],
)
def test_wildcards_are_those_of_nats(pattern: str, topic: str, expected: bool) -> None:
    assert matches(pattern, topic) is expected


def test_dead_letters_have_their_own_topic() -> None:
    assert dead_topic("orders") == "orders.DLQ"
    assert is_dead("orders.DLQ")
    assert not is_dead("orders")
    assert check_topic(dead_topic("orders")) == "orders.DLQ"


@pytest.mark.parametrize(
    ("key", "signed"),
    # What a JavaScript engine printed for `h = (h * 31 + key.charCodeAt(i)) | 0`.
    [
        ("", 0),
        ("a", 97),
        ("hello", 99162322),
        ("c42", 96801),
        ("Aa", 2112),
        ("BB", 2112),
        ("hello world", 1794106052),
        ("polygenelubricants", -(2**31)),
        ("zzzzzzzz", -1910022912),
        ("é", 233),
        ("customer-7", -1581185528),
        ("\ud800", 55296),
        ("\U0001f600", 1772899),
    ],
)
def test_a_key_takes_the_partition_of_the_javascript_formula(key: str, signed: int) -> None:
    for partitions in (1, 2, 3, 7, 16, 1024):
        assert partition_for(key, partitions) == abs(signed) % partitions


def java_script(key: str, partitions: int) -> int:
    raw = key.encode("utf-16-be", "surrogatepass")
    h = 0.0  # a JavaScript number is a double; `| 0` takes it to signed 32 bits
    for index in range(0, len(raw), 2):
        h = h * 31.0 + float(int.from_bytes(raw[index : index + 2], "big"))
        h = float((int(h) + 2**31) % 2**32 - 2**31)
    return int(abs(h)) % partitions


@settings(max_examples=500, deadline=None)
@given(key=st.text(alphabet=st.characters(), max_size=40), partitions=st.integers(1, 1024))
def test_any_key_takes_the_partition_of_the_javascript_formula(key: str, partitions: int) -> None:
    assert partition_for(key, partitions) == java_script(key, partitions)


def test_keys_spread_over_partitions() -> None:
    counts = [0] * 8
    for number in range(8000):
        counts[partition_for(f"customer-{number}", 8)] += 1
    assert min(counts) > 500
