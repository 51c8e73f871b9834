"""What each filter wants, what it refuses, and that a where says the same to Spark."""

from __future__ import annotations

import sqlite3
import sys
import time
from datetime import UTC, datetime
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trunkline import filters
from trunkline.errors import InvalidFilter
from trunkline.event import Event, Record
from trunkline.filters import all_of, any_of, field, jsonpath, not_, where
from trunkline.filters.where import Where, compile_where, to_spark, where_columns

ORDER = Event(
    id="01",
    ts=datetime(2026, 3, 1, 12, tzinfo=UTC),
    topic="orders",
    type="OrderPlaced",
    actor="alice",
    key="c42",
    priority="high",
    ttl_s=60.0,
    caps=("read", "write"),
    headers={"region": "eu", "x.y": "dotted", "n": "7"},
    payload={
        "price": 12,
        "weight": 1.5,
        "name": "Blue Lamp",
        "paid": True,
        "note": None,
        "text_price": "12.5",
        "due": "2026-03-02T00:00:00Z",
        "items": [{"sku": "x1", "tags": ["a", "b"]}, {"sku": "x2"}],
        "x y": 1,
        "deep": {"a": {"b": {"c": {"d": {"e": 5}}}}},
    },
)


def wanted(condition: str, event: Event = ORDER) -> bool:
    return compile_where(condition)(event)


@pytest.mark.parametrize(
    ("path", "value", "mode", "expected"),
    [
        ("key", "c42", "exact", True),
        ("key", "c4", "exact", False),
        ("meta.priority", "high", "exact", True),
        ("meta.event_id", "01", "exact", True),
        ("meta.actor.user_id", "alice", "exact", False),
        ("headers.region", "eu", "exact", True),
        ("headers.x.y", "dotted", "exact", True),
        ("meta.headers.region", "eu", "exact", True),
        ("payload.price", 12, "exact", True),
        ("payload.price", 12.0, "exact", True),
        ("payload.price", "12", "exact", False),
        ("payload.paid", True, "exact", True),
        ("payload.paid", 1, "exact", False),
        ("payload.note", None, "exact", True),
        ("payload.absent", None, "exact", False),
        ("payload.items[1].sku", "x2", "exact", True),
        ("payload.items[9].sku", "x2", "exact", False),
        ("payload.items[0].tags[1]", "b", "exact", True),
        ("payload.items[0].tags", ["a", "b"], "exact", True),
        ("caps", ["read", "write"], "exact", True),
        ("caps[0]", "read", "exact", True),
        ("ts", "2026-03-01T12:00:00Z", "exact", True),
        ("payload.name", "^Blue", "regex", True),
        ("payload.name", "lamp", "regex", False),
        ("payload.price", "1", "regex", False),
        ("payload.name", "Lamp", "contains", True),
        ("payload.name", 1, "contains", False),
        ("payload.items[0].tags", "a", "contains", True),
        ("payload.deep", "a", "contains", True),
        ("caps", "write", "contains", True),
        ("payload.price", 2, "contains", False),
        ("payload.price", 11, "gt", True),
        ("payload.price", 12, "gt", False),
        ("payload.price", 12, "gte", True),
        ("payload.price", 12, "lte", True),
        ("payload.price", 12.5, "lt", True),
        ("payload.price", "11", "gt", False),
        ("payload.paid", 0, "gt", False),
        ("payload.name", "Az", "gt", True),
        ("ts", "2026-01-01", "gt", True),
        ("ts", datetime(2027, 1, 1, tzinfo=UTC), "lt", True),
        ("ts", "soon", "lt", False),
        ("key", ["a", "c42"], "in", True),
        ("payload.price", {1, 12}, "in", True),
        ("payload.paid", [1], "in", False),
        ("payload.price", None, "exists", True),
        ("payload.note", None, "exists", True),
        ("payload.absent", None, "exists", False),
        ("payload.absent", False, "exists", True),
        ("payload.price", False, "exists", False),
        ("subject", None, "exists", False),
        ("headers.absent", None, "exists", False),
    ],
)
def test_a_field_filter_relates_one_path_to_one_value(
    path: str, value: Any, mode: Any, expected: bool
) -> None:
    assert field(path, value, mode)(ORDER) is expected


@pytest.mark.parametrize(
    ("path", "value", "mode"),
    [
        ("nope", 1, "exact"),
        ("meta.nope", 1, "exact"),
        ("payload..a", 1, "exact"),
        ("payload.", 1, "exact"),
        ("", 1, "exact"),
        (7, 1, "exact"),
        ("payload[x]", 1, "exact"),
        ("key", 1, "like"),
        ("key", "abc", "in"),
        ("key", 5, "in"),
        ("key", True, "gt"),
        ("key", None, "lt"),
        ("key", "(", "regex"),
        ("key", 5, "regex"),
        ("key", "a" * 4097, "regex"),
    ],
)
def test_a_field_filter_that_means_nothing_is_refused_at_once(
    path: Any, value: Any, mode: Any
) -> None:
    with pytest.raises(InvalidFilter):
        field(path, value, mode)


def test_a_regular_expression_that_explodes_is_stopped_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(filters, "MATCH_S", 0.05)
    bomb = field("payload", "(a|aa)+$", "regex")

    with pytest.raises(InvalidFilter, match="took longer") as caught:
        bomb(Event(topic="t", payload="a" * 60 + "b"))

    assert caught.value.pattern == "(a|aa)+$"


def test_a_regular_expression_is_not_tried_on_very_long_text() -> None:
    found = field("payload", "a", "regex")
    longest = Event(topic="t", payload="a" * filters.MATCHED_MAX)
    longer = Event(topic="t", payload="a" * (filters.MATCHED_MAX + 1))
    assert (found(longest), found(longer)) == (True, False)


def test_filters_combine() -> None:
    yes, no = field("key", "c42"), field("key", "other")
    assert all_of(yes, yes)(ORDER)
    assert not all_of(yes, no)(ORDER)
    assert any_of(no, yes)(ORDER)
    assert not any_of(no, no)(ORDER)
    assert not_(no)(ORDER)
    assert all_of()(ORDER)
    assert not any_of()(ORDER)
    assert all_of(lambda event: event.actor == "alice", not_(no))(ORDER)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("$.items[?@.sku == 'x2']", True),
        ("$.items[?@.sku == 'x3']", False),
        ("$.price", True),
        ("$.absent", False),
        ("$..tags[1]", True),
        ("$.items[-1].sku", True),
    ],
)
def test_a_jsonpath_wants_events_in_which_it_finds_something(
    expression: str, expected: bool
) -> None:
    assert jsonpath(expression)(ORDER) is expected
    assert jsonpath(expression)(Event(topic="t", payload=None)) is False


@pytest.mark.parametrize("expression", ["", "$.a[", "price", "$" + ".a" * 4096, "$[?nope(@)]"])
def test_what_is_no_jsonpath_is_refused(expression: str) -> None:
    with pytest.raises(InvalidFilter):
        jsonpath(expression)


@pytest.mark.parametrize("function", ["match", "search"])
def test_a_regular_expression_of_a_jsonpath_cannot_run_away(function: str) -> None:
    wanted = jsonpath(f"$[?{function}(@, '(a|aa)+$')]")
    assert wanted(Event(topic="t", payload=["aaa"]))
    hostile = Event(topic="t", payload=["a" * 60 + "!"] * 100)
    began = time.perf_counter()
    with pytest.raises(InvalidFilter, match="took longer"):
        wanted(hostile)
    assert time.perf_counter() - began < 2.0  # all hundred elements share one time limit


@pytest.mark.parametrize("expression", ["$..*..*..*..absent", "$[?count($..*) > 1000000]"])
def test_a_jsonpath_visits_only_so_many_nodes(expression: str) -> None:
    payload = [[[[number] * 10] * 10] * 10 for number in range(100)]
    with pytest.raises(InvalidFilter, match="more than 200000 nodes"):
        jsonpath(expression)(Event(topic="t", payload=payload))


@pytest.mark.parametrize(
    "condition",
    [
        "payload.s LIKE '%" + "_a" * 1900 + "b%'",
        " OR ".join(["payload.s LIKE '%_b%_c'"] * 100),
        " OR ".join(["LOWER(payload.s) = 'b'"] * 150),
        " OR ".join(["payload LIKE '%b%'"] * 150),
    ],
)
def test_a_condition_that_needs_too_much_work_is_refused(condition: str) -> None:
    wanted = compile_where(condition)
    assert not wanted(Event(topic="t", payload={"s": "a" * 100}))
    began = time.perf_counter()
    with pytest.raises(InvalidFilter, match="too much work"):
        wanted(Event(topic="t", payload={"s": "a" * 1_000_000}))
    assert time.perf_counter() - began < 2.0
    assert not wanted(Event(topic="t", payload={"s": "a" * 100}))  # each event has its own budget


@pytest.mark.parametrize(
    "condition",
    [
        "payload.price > 10 AND headers.region = 'eu'",
        "payload.items[0].sku = 'x1'",
        "payload.items[0].tags[1] = 'b'",
        "payload.deep.a.b.c.d.e = 5",
        "payload['x y'] = 1",
        'payload."x y" = 1',
        "headers['x.y'] = 'dotted'",
        "KEY = 'c42' and not type = 'other'",
        "key <> 'x' and key != 'y'",
        "payload.weight * 2 = 3 and payload.price + 1 = 13 and payload.price - 2 = 10",
        "payload.price % 5 = 2 and payload.price / 8 = 1.5",
        "-payload.price < -11",
        "payload.price between 12 and 12",
        "payload.price not between 13 and 20",
        "payload.name like 'Blue%' and payload.name not like 'blue%'",
        "payload.name ilike 'bLUE_lamp'",
        "payload.name like '%'",
        "key in ('a', 'c42') and key not in ('a', 'b')",
        "payload.price in (1, 12)",
        "payload.price in (1, '12')",
        "payload.absent is null and payload.note is null and key is not null",
        "subject is null and ttl_s is not null",
        "lower(payload.name) = 'blue lamp' and upper(key) = 'C42' and length(key) = 3",
        "ts >= '2026-03-01T12:00:00Z' and ts < '2026-03-01 12:00:00.000001+00:00'",
        "ts between '2026-03-01' and '2026-03-02'",
        "ts = '2026-03-01T14:00:00+02:00'",
        "payload.due > ts",
        "not_before is null",
        "ttl_s = 60",
        "caps[1] = 'write'",
        "priority = 'high' and band = 'GREEN'",
        "payload.paid",
        "payload.paid = true and payload.paid = 'true'",
        "payload.text_price > 12 and payload.text_price > payload.price",
        "payload.price = '12'",
        "headers.n < 10",
        "10 < payload.price",
        'payload.items = \'[{"sku":"x1","tags":["a","b"]},{"sku":"x2"}]\'',
        "true or payload.absent = 1",
        "(key = 'a' or key = 'c42') and (true)",
        "not (payload.price = 13)",
        "key = 'c42' -- a comment",
    ],
)
def test_a_where_wants_the_event(condition: str) -> None:
    assert wanted(condition)


@pytest.mark.parametrize(
    "condition",
    [
        "payload.price > 12",
        "payload.absent = 1",
        "payload.absent <> 1",
        "not payload.absent = 1",
        "payload.absent = payload.absent",
        "payload.absent not in (1, 2)",
        "payload.absent not like 'a'",
        "key = null",
        "key <> null",
        "key not in ('a', null)",
        "null",
        "not null",
        "payload.name > 5",
        "payload.name < 5",
        "payload.items > 5",
        "payload.deep = 5",
        "payload.paid > 0",
        "payload.price.amount = 12",
        "payload.items.sku = 'x1'",
        "payload.name[0] = 'B'",
        "payload.price / 0 = 1",
        "not payload.price % 0 = 1",
        "payload.name + 1 = 1",
        "payload.name = true",
        "payload.name < ts",
        "payload.price < ts",
        "length(payload.absent) = 0",
        "caps[2] = 'x'",
        "false",
        "Payload.Price > 10",
    ],
)
def test_null_missing_and_unreadable_values_are_not_wanted(condition: str) -> None:
    assert not wanted(condition)


BY_VALUE = {"TRUE": True, "FALSE": False, "NULL": None}


@pytest.mark.parametrize(("a", "b"), list(product(BY_VALUE, repeat=2)))
def test_logic_has_three_values(a: str, b: str) -> None:
    payload = {"a": BY_VALUE[a], "b": BY_VALUE[b]}
    event = Event(topic="t", payload=payload)
    database = sqlite3.connect(":memory:")
    for template in ("{} AND {}", "{} OR {}", "NOT ({} AND {})", "NOT ({} OR {})"):
        expected = database.execute("SELECT " + template.format(a, b)).fetchone()[0]
        condition = template.format("payload.a", "payload.b")
        assert wanted(condition, event) is (expected == 1), condition
    database.close()


LETTERS = st.text(alphabet="ab%_\\\n.", max_size=8)


@settings(max_examples=300, deadline=None)
@given(text=LETTERS, raw=st.lists(st.sampled_from(["a", "b", "%", "_", "\\%", "\\_", "\\\\", "."])))
def test_like_agrees_with_sqlite(text: str, raw: list[str]) -> None:
    pattern = "".join(raw)
    database = sqlite3.connect(":memory:")
    database.execute("PRAGMA case_sensitive_like = ON")
    query = "SELECT ? LIKE ? ESCAPE '\\'"
    expected = database.execute(query, (text, pattern)).fetchone()[0]
    database.close()
    event = Event(topic="t", payload=text)
    assert wanted(f"payload LIKE '{pattern}'", event) is bool(expected)


def test_a_hostile_like_takes_no_time() -> None:
    event = Event(topic="t", payload="a" * 50_000)
    started = time.perf_counter()
    assert not wanted("payload LIKE '" + "%a" * 50 + "%b'", event)
    assert time.perf_counter() - started < 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(a=JSON, b=JSON)
def test_no_payload_makes_a_where_fail(a: Any, b: Any) -> None:
    event = Event(topic="t", payload={"a": a, "b": b})
    for sign in ("=", "<>", "<", "<=", ">", ">="):
        direct, denied = (
            wanted(text.format(sign), event)
            for text in ("payload.a {} payload.b", "not payload.a {} payload.b")
        )
        assert (direct + denied) == (a is not None and b is not None)
        for other in ("1", "'x'", "true", "ts"):
            condition = f"payload.a {sign} {other}"
            assert not (wanted(condition, event) and wanted(f"not {condition}", event))
    assert wanted("payload.a * 2 / payload.b % 3 > 1 or true", event)
    assert wanted("lower(payload.a) like '%x%' or payload.a or true", event)


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(max_size=60)
    | st.text(alphabet="ab=<>()[]'\"., 1%-*+keynotandpayload", max_size=60)
)
def test_any_text_is_a_condition_or_an_invalid_filter(text: str) -> None:
    refused: InvalidFilter | None = None
    columns: frozenset[str] = frozenset()
    try:
        columns = Where(text).columns
    except InvalidFilter as error:
        refused = error
    assert columns <= set(where.COLUMNS)
    assert refused is None or "name" in refused.fields or 0 <= refused.position <= len(text)


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("", 0),
        ("   ", 0),
        ("key", 0),
        ("'a'", 0),
        ("5 + 5", 0),
        ("key =", 4),
        ("key = 'a", 6),
        ("select 1", 0),
        ("key = 'a'; key = 'b'", 0),
        ("key = 'a' union select 1", 10),
        ("payload.a = 1 limit 5", 14),
        ("key = 'a' and colour = 'b'", 14),
        ("key = 'a'\nand colour = 'b'", 14),
        ("ts > 5", 0),
        ("ts > 'yesterday'", 0),
        ("ts > '2026-13-01'", 0),
        ("ttl_s > 'long'", 0),
        ("offset = true", 0),
        ("key like payload.a", 0),
        ("key like 'a\\b'", 9),
        ("key like 'a' escape '!'", 0),
        ("key rlike 'a'", 0),
        ("key <=> 'a'", 0),
        ("key || 'a' = 'b'", 0),
        ("key is true", 0),
        ("key in (select 1)", 0),
        ("key in ()", 0),
        ("key between symmetric 'a' and 'b'", 0),
        ("cast(key as int) = 1", 5),
        ("payload.a::int = 1", 0),
        ("case when 1 > 0 then true end", 10),
        ("concat(key, 'a') = 'b'", 0),
        ("lower(key, 1) = 'a'", 12),
        ("nope(key) = 'a'", 0),
        ("count(*) > 1", 0),
        ("key = ?", 0),
        ("headers = 'x'", 0),
        ("headers.a.b = 'x'", 0),
        ("caps = 'x'", 0),
        ("caps['a'] = 'x'", 0),
        ("key.a = 'x'", 0),
        ("payload.items[-1] = 1", 15),
        ("payload.items[0, 1] = 1", 0),
        ("payload.* = 1", 8),
        ("1e999 > 1", 0),
        ("payload.a + (key = 'a') > 1", 13),
        ("(" * 17 + "true" + ")" * 17, 16),
        ("not " * 40 + "true", 128),
        ("not " * 20 + "true", 0),
        ("1" + " + 1" * 20 + " > 1", 0),
    ],
)
def test_what_is_outside_the_subset_is_refused_where_it_stands(text: str, position: int) -> None:
    with pytest.raises(InvalidFilter) as caught:
        Where(text)
    assert caught.value.position == position


def test_a_where_has_bounds() -> None:
    long = " or ".join(["key = 'aa'"] * 290)
    assert len(long) <= filters.TEXT_MAX
    assert not wanted(long)
    with pytest.raises(InvalidFilter, match="4097 characters"):
        Where(long.ljust(4097))
    with pytest.raises(InvalidFilter, match="not int"):
        Where(7)  # type: ignore[arg-type]
    assert wanted("(" * 15 + "true" + ")" * 15)


@pytest.mark.parametrize("text", ["(" * 16 + "key" + ")" * 16, "lower(" * 15 + "key" + ")" * 15])
def test_parsing_hostile_text_takes_no_time(text: str) -> None:
    started = time.perf_counter()
    assert Where(f"{text} = 'a'" if "lower" in text else f"{text[1:-1]} = 'a'").columns == {"key"}
    assert time.perf_counter() - started < 1


def test_offset_and_partition_are_read_from_a_record_only() -> None:
    record = Record(event=ORDER, partition=3, offset=17)
    assert Where("offset > 16 and partition = 3 and key = 'c42'").matches(record)
    assert Where("offset % 2 = 1 and payload.price = 12").matches(record)
    assert not Where("offset > 17").matches(record)
    assert Where("key = 'c42'").matches(record)
    with pytest.raises(InvalidFilter, match="offset and partition"):
        compile_where("offset > 16 and partition = 3")


def test_the_columns_of_a_where_are_known() -> None:
    assert where_columns("payload.a.b = 1 and PAYLOAD.c > 2 or not Key = 'x'") == {"payload", "key"}
    assert where_columns("headers.region = 'eu' and offset > 5") == {"headers", "offset"}
    assert where_columns("true") == frozenset()
    assert type(Where("key = 'a'").tree).__name__ == "EQ"


@pytest.mark.parametrize(
    ("condition", "spark"),
    [
        ("key = 'a'", "`key` = 'a'"),
        ("key <> 'it''s'", "`key` <> 'it\\'s'"),
        ("payload.a.b = 'x'", "GET_JSON_OBJECT(payload, '$.a.b') = 'x'"),
        ("payload.items[0].sku = 'x'", "GET_JSON_OBJECT(payload, '$.items[0].sku') = 'x'"),
        ("payload['x y'] is null", "GET_JSON_OBJECT(payload, '$[\\'x y\\']') IS NULL"),
        ("payload is null", "GET_JSON_OBJECT(NULLIF(payload, 'null'), '$') IS NULL"),
        ("payload.a > 10", "TRY_CAST(GET_JSON_OBJECT(payload, '$.a') AS DOUBLE) > 10"),
        ("payload.a > 0.5", "TRY_CAST(GET_JSON_OBJECT(payload, '$.a') AS DOUBLE) > 0.5D"),
        ("payload.a", "TRY_CAST(GET_JSON_OBJECT(payload, '$.a') AS BOOLEAN)"),
        ("payload.a = true", "TRY_CAST(GET_JSON_OBJECT(payload, '$.a') AS BOOLEAN) = TRUE"),
        (
            "payload.a < payload.b",
            (
                "COALESCE(TRY_CAST(GET_JSON_OBJECT(payload, '$.a') AS DOUBLE)"
                " < TRY_CAST(GET_JSON_OBJECT(payload, '$.b') AS DOUBLE),"
                " GET_JSON_OBJECT(payload, '$.a') < GET_JSON_OBJECT(payload, '$.b'))"
            ),
        ),
        (
            "payload.a = 9007199254740993",
            (
                "COALESCE(TRY_CAST(GET_JSON_OBJECT(payload, '$.a') AS DECIMAL(38, 9))"
                " = 9007199254740993,"
                " TRY_CAST(GET_JSON_OBJECT(payload, '$.a') AS DOUBLE) = 9007199254740993)"
            ),
        ),
        (
            "offset >= 9007199254740993",
            "COALESCE(`offset` >= 9007199254740993, `offset` >= 9007199254740993)",
        ),
        ("headers.region in ('eu', 'us')", "headers['region'] IN ('eu', 'us')"),
        ("headers.n < 5", "TRY_CAST(headers['n'] AS DOUBLE) < 5"),
        ("caps[0] = 'x'", "GET(caps, 0) = 'x'"),
        ("ts >= '2026-03-01T12:00:00Z'", "`ts` >= TIMESTAMP '2026-03-01 12:00:00+00:00'"),
        ("payload.due < ts", "TRY_CAST(GET_JSON_OBJECT(payload, '$.due') AS TIMESTAMP) < `ts`"),
        ("offset % 2 = 0", "(CAST(`offset` AS DOUBLE) % NULLIF(2.0D, 0D)) = 0"),
        ("ttl_s / 2 > 1", "(`ttl_s` / NULLIF(2.0D, 0D)) > 1"),
        ("-offset < -5", "(0.0D - CAST(`offset` AS DOUBLE)) < -5"),
        ("offset between 1 and 9", "(`offset` >= 1 AND `offset` <= 9)"),
        ("key like 'a\\%%'", "`key` LIKE 'a\\\\%%'"),
        ("key not ilike 'a_'", "NOT (`key` ILIKE 'a_')"),
        ("length(key) > 3", "LENGTH(`key`) > 3"),
        ("upper(payload.a) = 'X'", "UPPER(GET_JSON_OBJECT(payload, '$.a')) = 'X'"),
        ("key is not null", "NOT (`key` IS NULL)"),
        (
            "not (key = 'a' or key = 'b') and true",
            "(NOT ((`key` = 'a' OR `key` = 'b')) AND TRUE)",
        ),
        ("key = null", "NULL"),
    ],
)
def test_a_where_is_written_for_spark(condition: str, spark: str) -> None:
    assert to_spark(condition) == spark


@pytest.mark.parametrize("name", ["it''s", "what?", "*"])
def test_a_member_that_spark_cannot_reach_is_refused(name: str) -> None:
    with pytest.raises(InvalidFilter, match="Spark cannot reach"):
        to_spark(f"payload['{name}'] = 1")


@pytest.mark.parametrize(
    ("module", "make"),
    [
        ("sqlglot", lambda: Where("key = 'a'")),
        ("jsonpath_rfc9535", lambda: jsonpath("$.a")),
        ("regex", lambda: field("key", "a", "regex")),
    ],
)
def test_a_missing_library_is_named_with_the_way_to_get_it(
    module: str, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InvalidFilter, match=r"pip install 'trunkline\[filters\]'") as caught:
        make()
    assert caught.value.needs == module


def test_a_compiled_where_is_fast() -> None:
    run = compile_where("payload.price > 10 and headers.region = 'eu'")
    started = time.perf_counter()
    assert all(run(ORDER) for _ in range(50_000))
    assert time.perf_counter() - started < 1
