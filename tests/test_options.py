"""Options: a wrong value never gets in, and what differs from the defaults is known."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from trunkline import options
from trunkline.errors import InvalidOption
from trunkline.options import (
    MIB,
    BusOptions,
    Flow,
    GroupOptions,
    Limits,
    Options,
    StoreOptions,
    TopicOptions,
    changed,
    make,
)

ALL = [
    value
    for value in vars(options).values()
    if isinstance(value, type) and issubclass(value, Options) and value is not Options
]


@pytest.mark.parametrize("kind", ALL)
def test_the_defaults_are_valid_and_nothing_differs_from_them(kind: type[Options]) -> None:
    assert changed(kind()) == {}
    assert make(kind, {}) == kind()
    assert kind.__doc__


@pytest.mark.parametrize("kind", ALL)
def test_options_cannot_be_changed(kind: type[Options]) -> None:
    name = kind.__struct_fields__[0]
    with pytest.raises(AttributeError):
        setattr(kind(), name, 1)


@pytest.mark.parametrize("kind", ALL)
def test_an_unknown_option_is_refused_with_the_known_ones(kind: type[Options]) -> None:
    with pytest.raises(InvalidOption) as caught:
        make(kind, {"no_such_option": 1})
    assert kind.__struct_fields__[0] in caught.value.hint


def test_an_option_with_choices_names_them() -> None:
    wrong: dict[str, Any] = {"max_retries": 1, "ordering": "x"}
    with pytest.raises(InvalidOption) as made:
        make(GroupOptions, wrong)
    with pytest.raises(InvalidOption) as typed:
        GroupOptions(**wrong)
    assert made.value.hint == typed.value.hint == "ordering is one of key, partition, none"


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (TopicOptions, "partitions", 0),
        (TopicOptions, "partitions", 1025),
        (TopicOptions, "partitions", "3"),
        (TopicOptions, "partitions", 1.5),
        (TopicOptions, "partitions", True),
        (TopicOptions, "partitions", None),
        (TopicOptions, "durability", "maybe"),
        (TopicOptions, "segment_bytes", MIB - 1),
        (TopicOptions, "segment_bytes", 100 * MIB + 1),
        (TopicOptions, "segment_records", 0),
        (TopicOptions, "compress", "yes"),
        (TopicOptions, "dedup_window_s", -1),
        (TopicOptions, "dedup_window_s", float("nan")),
        (TopicOptions, "ttl_policy", "keep"),
        (TopicOptions, "retention_bytes", -1),
        (GroupOptions, "ack_timeout_s", 0),
        (GroupOptions, "ack_timeout_s", float("nan")),
        (GroupOptions, "max_retries", -1),
        (GroupOptions, "backoff_mult", 0.5),
        (GroupOptions, "backoff_mult", 10_001),
        (GroupOptions, "ordering", "topic"),
        (GroupOptions, "lookahead", 0),
        (Flow, "max_inflight", 0),
        (Limits, "record_bytes", 0),
        (Limits, "depth", 0),
        (StoreOptions, "on_full", "ignore"),
        (StoreOptions, "index_bytes", 10),
        (StoreOptions, "limits", {"depth": 0}),
        (BusOptions, "drain_timeout_s", -1),
    ],
)
def test_a_wrong_value_is_refused_by_name(kind: type[Options], name: str, value: Any) -> None:
    with pytest.raises(InvalidOption) as caught:
        kind(**{name: value})
    assert caught.value.name == name
    with pytest.raises(InvalidOption):
        make(kind, {name: value})


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (TopicOptions, "partitions", 1024),
        (TopicOptions, "segment_bytes", MIB),
        (TopicOptions, "segment_bytes", 100 * MIB),
        (TopicOptions, "retention_age_s", 60),
        (TopicOptions, "durability", "os"),
        (GroupOptions, "max_retries", 0),
        (GroupOptions, "ordering", "none"),
        (StoreOptions, "reserve_bytes", 0),
    ],
)
def test_what_differs_from_the_defaults_is_known(
    kind: type[Options], name: str, value: Any
) -> None:
    made = kind(**{name: value})
    assert changed(made) == {name: value}
    assert make(kind, changed(made)) == made
    assert make(kind, msgspec.json.decode(msgspec.json.encode(changed(made)))) == made


@pytest.mark.parametrize("values", [None, [], "partitions=3", 5])
def test_what_is_no_mapping_holds_no_options(values: Any) -> None:
    with pytest.raises(InvalidOption):
        make(TopicOptions, values)


@pytest.mark.parametrize("value", [float("inf"), 1e300, 10**12])
def test_a_time_that_no_file_or_calendar_can_hold_is_refused(value: float) -> None:
    with pytest.raises(InvalidOption, match="backoff_max_s"):
        GroupOptions(backoff_max_s=value)
    with pytest.raises(InvalidOption, match="retention_age_s"):
        make(TopicOptions, {"retention_age_s": value})
    assert GroupOptions(backoff_max_s=1e10).backoff_max_s == 1e10
