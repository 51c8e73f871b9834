"""The event: ids, checks, and the bytes it becomes."""

from __future__ import annotations

import os
import threading
from datetime import UTC, datetime, timedelta, timezone
from enum import Enum
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trunkline.check import check_event
from trunkline.codec import decode_payload, encode_event
from trunkline.errors import Invalid, InvalidEvent, InvalidName
from trunkline.event import PRIORITIES, RANK, Event, Record, new_id
from trunkline.options import Limits

LIMITS = Limits()
TS = datetime(2026, 3, 1, 12, 30, 15, 123456, tzinfo=UTC)


def decode(members: bytes) -> Event:
    line: dict[str, Any] = msgspec.json.decode(b'{"meta":' + members + b"}")
    return msgspec.convert({**line["meta"], "payload": line["payload"]}, Event)


def test_an_id_is_a_uuid_of_version_7_with_the_time_in_front() -> None:
    before = datetime.now(UTC)
    uuid = UUID(new_id())
    assert uuid.version == 7
    assert uuid.variant == "specified in RFC 4122"
    made = datetime.fromtimestamp((uuid.int >> 80) / 1000, UTC)
    assert before - timedelta(milliseconds=1) <= made <= datetime.now(UTC)


def test_ids_are_unique_and_sort_by_time() -> None:
    ids = [new_id() for _ in range(3000)]
    assert len(set(ids)) == 3000
    stamps = [one[:13] for one in ids]
    assert stamps == sorted(stamps)


def test_ids_made_by_threads_differ() -> None:
    found: list[str] = []

    def make() -> None:
        found.extend([new_id() for _ in range(2000)])

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 8000


def test_a_forked_child_makes_other_ids_than_its_parent() -> None:
    new_id()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, "\n".join(new_id() for _ in range(100)).encode())
        os._exit(0)
    ours = {new_id() for _ in range(100)}
    os.close(writer)
    with open(reader, encoding="ascii") as pipe:
        theirs = set(pipe.read().split())
    assert os.waitpid(child, 0)[1] == 0
    assert len(theirs) == 100
    assert not ours & theirs
    # The random tail differs too, not only the time in front.
    assert not {one[19:] for one in ours} & {one[19:] for one in theirs}


def test_the_names_on_disk_are_those_of_the_folder() -> None:
    event = Event(
        id="1", ts=TS, topic="t", space="s", trace="00-x", ttl_s=5, key="k", payload={"a": [1]}
    )
    assert encode_event(event, LIMITS) == (
        b'{"event_id":"1","ts":"2026-03-01T12:30:15.123456Z","topic":"t","space_id":"s",'
        b'"key":"k","trace_id":"00-x","ttl_sec":5},"payload":{"a":[1]}'
    )


def test_fields_that_are_not_set_are_not_written() -> None:
    event = Event(id="1", ts=TS, topic="t")
    assert encode_event(event, LIMITS) == (
        b'{"event_id":"1","ts":"2026-03-01T12:30:15.123456Z","topic":"t"},"payload":null'
    )


def test_an_event_cannot_be_changed() -> None:
    event = Event(topic="t")
    with pytest.raises(AttributeError):
        event.topic = "u"  # type: ignore[misc]


def test_a_record_has_the_topic_of_its_event() -> None:
    assert Record(event=Event(topic="t"), partition=0, offset=1).topic == "t"


def test_priorities_rank_from_critical_down() -> None:
    assert [RANK[name] for name in PRIORITIES] == [0, 1, 2, 3]


TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20)
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=400, deadline=None)
@given(
    payload=JSON,
    headers=st.dictionaries(TEXT | st.just("payload"), TEXT, max_size=3),
    key=st.none() | TEXT,
    caps=st.lists(TEXT, max_size=2).map(tuple),
)
def test_an_event_is_read_back_as_it_was_written(
    payload: Any, headers: dict[str, str], key: str | None, caps: tuple[str, ...]
) -> None:
    event = Event(ts=TS, topic="t", payload=payload, headers=headers, key=key, caps=caps)
    check_event(event, LIMITS)
    members = encode_event(event, LIMITS)
    assert b"\n" not in members
    assert decode(members) == event


@pytest.mark.parametrize("payload", [None, 1, {"payload": 2}, [',"payload":'], ',"payload":'])
@pytest.mark.parametrize(
    "headers",
    [
        {"payload": "x"},
        {"a": "b", "payload": "x"},
        {"a": "b", "payload": ',"payload":null'},
        {"a": ',"payload":', ',"payload":': "b"},
        {},
    ],
)
def test_what_is_called_payload_is_not_taken_for_the_payload(
    payload: Any, headers: dict[str, str]
) -> None:
    event = Event(topic="t", ts=TS, headers=headers, caps=("payload", "x"), payload=payload)
    assert decode(encode_event(event, LIMITS)) == event


NAN, INF = float("nan"), float("inf")


class Odd(Enum):
    NAN = NAN
    LIST = [1, INF]  # noqa: RUF012 -- a member's value
    NONE = None
    DARK = "dark"


@pytest.mark.parametrize(
    "payload",
    [
        NAN,
        INF,
        -INF,
        [NAN],
        {"a": {"b": [1, INF]}},
        (1, NAN),
        {1.5, NAN},
        Odd.NAN,
        {"a": Odd.LIST},
        "\ud800",
        {"\ud800": 1},
        object(),
        {"a": object()},
        {("a", "b"): 1},
        1j,
    ],
    ids=lambda payload: type(payload).__name__,
)
def test_what_json_cannot_hold_is_refused(payload: Any) -> None:
    with pytest.raises(InvalidEvent):
        encode_event(Event(topic="t", payload=payload), LIMITS)


def test_an_enum_is_its_value() -> None:
    body = encode_event(Event(topic="t", payload=[Odd.NONE, Odd.DARK]), LIMITS)
    assert body.endswith(b'"payload":[null,"dark"]')


def nested(depth: int, kind: type = list) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value


@pytest.mark.parametrize("kind", [list, dict])
def test_nesting_is_bounded(kind: type) -> None:
    assert encode_event(Event(topic="t", payload=nested(64, kind)), LIMITS)
    for depth in (65, 500, 100_000):
        with pytest.raises(InvalidEvent):
            encode_event(Event(topic="t", payload=nested(depth, kind)), LIMITS)
    assert encode_event(Event(topic="t", payload=[[]] * 1000), LIMITS)
    with pytest.raises(InvalidEvent, match="deeper than 2"):
        encode_event(Event(topic="t", payload=[[[1]]]), Limits(depth=2))


class Forwarded(msgspec.Struct):
    body: msgspec.Raw
    note: str | None = None


@pytest.mark.parametrize("text", [b'{"a":1}', b'{\n  "a": 1\n}', b"\r\n[null]\n"])
def test_json_that_was_not_parsed_is_one_line_of_json(text: bytes) -> None:
    raw, value = msgspec.Raw(text), msgspec.json.decode(text)
    for payload, wanted in (
        (raw, value),
        ({"body": [raw], "note": None}, {"body": [value], "note": None}),
        (Forwarded(raw), {"body": value, "note": None}),
    ):
        body = encode_event(Event(topic="orders", payload=payload), Limits())
        assert b"\n" not in body
        assert msgspec.json.decode(b'{"meta":' + body + b"}")["payload"] == wanted


@pytest.mark.parametrize(
    "payload",
    [
        msgspec.Raw(b""),
        msgspec.Raw(b"}\n{"),
        msgspec.Raw(b"NaN"),
        msgspec.Raw(b"[" * 65 + b"]" * 65),
        [msgspec.Raw(b"1}\n")],
        [None, msgspec.Raw(b"x")],
        Forwarded(msgspec.Raw(b"{bad"), ""),
        Forwarded(msgspec.Raw(b'"\xff"'), ""),  # which a decoder lets through, as the next
        Forwarded(msgspec.Raw(b"1e999"), ""),
        msgspec.UNSET,
    ],
)
def test_what_would_break_its_line_is_refused(payload: Any) -> None:
    with pytest.raises(InvalidEvent):
        encode_event(Event(topic="orders", payload=payload), Limits())


def test_a_payload_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidEvent):
        encode_event(Event(topic="t", payload=loop), LIMITS)


def test_size_is_bounded_to_the_byte() -> None:
    limits = Limits(record_bytes=1000)
    room = 1000 - len(msgspec.json.encode(Event(id="1", ts=TS, topic="t", payload="")))
    assert encode_event(Event(id="1", ts=TS, topic="t", payload="x" * room), limits)
    with pytest.raises(InvalidEvent, match="1001 bytes") as caught:
        encode_event(Event(id="1", ts=TS, topic="t", payload="x" * (room + 1)), limits)
    assert caught.value.size == 1001
    assert "reference" in caught.value.hint
    with pytest.raises(InvalidEvent):
        encode_event(Event(topic="t", payload="x" * 1024 * 1024), LIMITS)


@pytest.mark.parametrize(
    "fields",
    [
        {"topic": "a/b"},
        {"topic": 5},
        {"topic": ["a"]},
        {"id": ""},
        {"id": 5},
        {"ts": None},
        {"ts": "2026-01-01"},
        {"ts": datetime(2026, 1, 1)},  # noqa: DTZ001 -- the missing zone is the point
        {"not_before": datetime(2026, 1, 1)},  # noqa: DTZ001
        {"not_before": 5},
        {"type": 5},
        {"key": b"k"},
        {"key": "x" * 1025},
        {"key": "é" * 513},
        {"actor": "\ud800"},
        {"cause": ["a"]},
        {"space": "a b"},
        {"space": 5},
        {"space": ["a"]},
        {"priority": "urgent"},
        {"priority": 0},
        {"priority": ["high"]},
        {"band": "WHITE"},
        {"ttl_s": -1},
        {"ttl_s": NAN},
        {"ttl_s": INF},
        {"ttl_s": "5"},
        {"ttl_s": True},
        {"caps": "read"},
        {"caps": None},
        {"caps": (1,)},
        {"caps": ("x" * 1025,)},
        {"caps": ("\ud800",)},
        {"headers": None},
        {"headers": 0},
        {"headers": ""},
        {"headers": []},
        {"headers": [("a", "b")]},
        {"headers": {"a": 1}},
        {"headers": {1: "a"}},
        {"headers": {"a": "\ud800"}},
        {"headers": {"a": "x" * 1025}},
        {"headers": {"x" * 1025: "a"}},
        {"headers": {str(n): "a" for n in range(65)}},
    ],
    ids=lambda fields: repr(fields)[:40],
)
def test_a_field_that_holds_what_it_may_not_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        check_event(Event(**{"topic": "t", **fields}), LIMITS)


def test_what_is_no_event_is_refused() -> None:
    with pytest.raises(InvalidEvent, match="not dict"):
        check_event({"topic": "t"}, LIMITS)  # type: ignore[arg-type]


def test_everything_within_its_limits_passes() -> None:
    event = Event(
        id="x" * 1024,
        ts=datetime(2026, 1, 1, tzinfo=timezone(timedelta(hours=5))),
        topic="a.b",
        key="é" * 512,
        space="shared:household",
        ttl_s=0,
        priority="critical",
        band="BLACK",
        caps=("a",),
        not_before=TS,
        headers={str(n): "x" * 1024 for n in range(64)},
    )
    assert check_event(event, LIMITS) is None  # type: ignore[func-returns-value]
    assert decode(encode_event(event, LIMITS)) == event


def test_each_limit_can_be_set() -> None:
    check_event(Event(topic="t", key="abc", headers={"a": "bc"}), LIMITS)
    for event, limits in (
        (Event(id="1", topic="t", key="abc"), Limits(text_bytes=2)),
        (Event(topic="t", headers={"a": "bc"}), Limits(header_bytes=1)),
        (Event(topic="t", headers={"a": "bc"}), Limits(headers=0)),
    ):
        with pytest.raises(InvalidEvent):
            check_event(event, limits)


def test_a_bad_topic_is_an_invalid_name() -> None:
    with pytest.raises(InvalidName):
        check_event(Event(topic="a__b"), LIMITS)


@pytest.mark.parametrize("text", ["1", b'{"a": [null, true]}', '"x"', "18446744073709551615"])
def test_json_from_outside_is_read(text: str | bytes) -> None:
    value = decode_payload(text)
    assert encode_event(Event(topic="t", payload=value), LIMITS).endswith(
        msgspec.json.encode(value)
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "nan",
        "NaN",
        "Infinity",
        "{'a': 1}",
        "1 2",
        b"\xff",
        '"\\ud800"',
        '"\ud800"',
        "[" * 100_000,
        "[" * 100_000 + "]" * 100_000,
        '{"a":' * 100_000,
        "1e999",
    ],
    ids=lambda text: repr(text)[:20],
)
def test_what_is_no_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(InvalidEvent):
        decode_payload(text)


def test_an_event_for_dead_letters_is_a_letter() -> None:
    with pytest.raises(InvalidEvent, match="not a dead letter") as told:
        check_event(Event(topic="orders.DLQ", payload=1, headers={"region": "eu"}), LIMITS)
    assert "Reject" in told.value.hint
    check_event(Event(topic="orders.DLQ", payload=1, headers={"dlq-reason": "rejected"}), LIMITS)


@pytest.mark.parametrize("zone", [timedelta(hours=5), timedelta(minutes=19, seconds=32)])
def test_times_are_written_in_utc(zone: timedelta) -> None:
    local = TS.astimezone(timezone(zone))
    body = encode_event(Event(topic="t", ts=local, not_before=local), LIMITS)
    meta = msgspec.json.decode(b'{"meta":' + body + b"}")["meta"]
    assert meta["ts"] == meta["not_before"] == "2026-03-01T12:30:15.123456Z"


def test_a_time_that_utc_does_not_have_is_refused() -> None:
    first = datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=1)))
    for fields in ({"ts": first}, {"not_before": first}):
        with pytest.raises(InvalidEvent, match="UTC"):
            encode_event(Event(topic="t", **fields), LIMITS)  # type: ignore[arg-type]
