from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline import errors
from trunkline.event import Event, Receipt, Record
from trunkline.wire import codes, frames
from trunkline.wire.envelope import envelope_of, event_of, fields_of
from trunkline.wire.frames import Bad, read_asked, read_told

NOW = datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)


def one(text: str) -> Any:
    (frame,) = read_asked(text.encode())
    return frame


class TestReading:
    def test_each_frame_of_the_older_service_is_read(self) -> None:
        publish = one(
            '{ "type":"PUBLISH", "topic":"system.metrics", "key":"duck-1", '
            '"headers":{ "ct":"json" }, "payload":{ "cpu":12.3 } }'
        )
        assert (publish.topic, publish.key, publish.headers) == (
            *("system.metrics", "duck-1", {"ct": "json"}),
        )
        subscribe = one(
            '{ "type":"SUBSCRIBE", "topic":"heartbeat.received", "group":"monitor", '
            '"from":{ "kind":"latest" }, "max_inflight":32 }'
        )
        assert (subscribe.start.kind, subscribe.max_inflight, subscribe.ack) == (
            "latest",
            32,
            "upto",
        )
        ack = one('{"type":"ACK","topic":"t","partition":0,"group":"g","offset":1042}')
        assert (ack.topic, ack.partition, ack.group, ack.offset) == ("t", 0, "g", 1042)
        assert one('{ "type":"FLOW", "credits":50 }').credits == 50

    def test_unknown_members_are_ignored(self) -> None:
        assert one('{"type":"PING","corr":1,"new":[1]}') == frames.Ping(corr=1)

    @pytest.mark.parametrize(
        "text",
        [
            *("", "{", "null", "7", '"x"', "{}", "[[]]", '{"type":null}', '{"type":"ACK"}'),
            '{"type":"ACK","topic":"t","partition":-1,"group":"g","offset":1}',
            '{"type":"ACK","topic":"t","partition":0,"group":"g","offset":99999999999999999999}',
            '{"type":"FLOW","credits":-1}',
            '{"type":"SUBSCRIBE","topic":"t","group":"g","max_inflight":0}',
            '{"type":"SUBSCRIBE","topic":"t","group":"g","ack":"all"}',
            '{"type":"SUBSCRIBE","topic":"t","group":"g","from":{"kind":"now"}}',
            '{"type":"PUBLISH","topic":"t","headers":{"a":1}}',
            "[" * 100_000,
            '{"type":"PUBLISH","topic":"t","payload":' + "[" * 100_000,
        ],
        ids=lambda text: text[:60],
    )
    def test_what_is_no_frame_is_told_and_never_raised(self, text: str) -> None:
        found = read_asked(text.encode())
        assert [type(frame) for frame in found] == [Bad]
        assert isinstance(found[0], Bad)
        assert found[0].error.message

    def test_the_mark_of_a_broken_frame_is_saved(self) -> None:
        for text, corr in (
            ('{"type":"ACK","corr":"x"}', "x"),
            ('{"type":"WAT","corr":7}', 7),
            ('{"type":"ACK","corr":[1]}', None),
        ):
            assert one(text).corr == corr

    def test_a_bad_frame_is_told_by_its_field_and_value(self) -> None:
        (bad,) = frames.read_asked(b'{"type":"SUBSCRIBE","topic":"t","group":5,"corr":7}')
        assert isinstance(bad, frames.Bad)
        assert (str(bad.error), bad.corr) == ("not a frame: group must be text, not 5", 7)

    def test_one_bad_frame_of_an_array_is_bad_alone(self) -> None:
        found = read_asked(b'[{"type":"PING"},{"type":"NO"},{"type":"PING","corr":2}]')
        assert [type(frame).__name__ for frame in found] == ["Ping", "Bad", "Ping"]

    def test_an_array_has_a_limit(self) -> None:
        text = b"[" + b",".join([b'{"type":"PING"}'] * (frames.FRAMES_MAX + 1)) + b"]"
        (bad,) = read_asked(text)
        assert isinstance(bad, Bad)
        assert bad.error.code == "too_large"

    @pytest.mark.parametrize("events", ["[]", '[{"topic":5}]', '[{"topic":"t"}]'])
    def test_no_message_asks_for_more_answers_than_an_array_may(self, events: str) -> None:
        marks = ",".join(["1"] * (frames.FRAMES_MAX // 2))
        text = f'{{"type":"PUBLISH","corrs":[{marks}],"events":{events}}}'
        assert 0 < len(read_asked(f"[{text},{text}]".encode())) <= frames.FRAMES_MAX
        (bad,) = read_asked(f"[{text},{text},{text}]".encode())
        assert isinstance(bad, Bad)
        assert bad.error.code == "too_large"

    @pytest.mark.parametrize(
        "broken",
        [
            '"corrs":[7,"a"],"events":[{"topic":5}]',
            '"corrs":[7,"a"],"events":5',
            '"corrs":[7,null,"a"],"events":[]',
            '"corrs":[7,"a"],"again":1,"events":[{"topic":"t"},{"topic":"t"}]',
        ],
    )
    def test_each_of_several_in_a_frame_that_is_none_is_told(self, broken: str) -> None:
        found = read_asked(f'{{"type":"PUBLISH",{broken}}}'.encode())
        assert [(type(one), one.corr) for one in found] == [(Bad, 7), (Bad, "a")]

    @given(st.binary(max_size=200))
    def test_no_bytes_raise(self, data: bytes) -> None:
        assert read_asked(data)
        assert read_told(data) is not None

    def test_what_the_broker_says_is_read_by_the_client(self) -> None:
        said = [
            frames.Published(topic="t", partition=0, offset=1, corr=1),
            frames.Ok(corr="a", result={"x": 1}),
            frames.Failure(code="denied", message="no", sub="s1"),
            frames.Message(topic="t", partition=0, group="g", offset=1, event=Event(topic="t")),
            frames.Pong(),
        ]
        assert read_told(frames.join([frames.dump(frame) for frame in said])) == said


class TestEnvelopes:
    def test_fields_travel_as_headers_and_come_back(self) -> None:
        event = Event(
            topic="t",
            ts=NOW,
            type="T",
            actor="me",
            space="a:b",
            subject="s",
            key="k",
            idem_key="i",
            trace="00-1-2-01",
            ttl_s=5.0,
            priority="high",
            not_before=NOW + timedelta(seconds=1),
            band="AMBER",
            caps=("a", "b"),
            cause="c",
            headers={"own": "x"},
            payload={"n": 1},
        )
        envelope = envelope_of(Record(event, 2, 7), 3)
        assert (envelope.ts, envelope.partition, envelope.offset) == (1767323045678, 2, 7)
        assert envelope.attempts == 3
        assert envelope.headers is not None
        fields, rest = fields_of(envelope.headers)
        assert rest == {"own": "x"}
        for name, value in fields.items():
            assert getattr(event, name) == value
        assert len(fields) == 12

    def test_what_is_default_is_not_a_header(self) -> None:
        envelope = envelope_of(Record(Event(topic="t", payload=1), 0, 1))
        assert json.loads(frames._encode(envelope)).keys() == {
            *("id", "ts", "topic", "partition", "offset", "payload"),
        }

    @given(
        st.recursive(
            st.none() | st.booleans() | st.text() | st.integers(-(2**53), 2**53),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        )
    )
    def test_any_payload_comes_through(self, payload: Any) -> None:
        text = json.dumps({"type": "PUBLISH", "topic": "t", "payload": payload})
        assert event_of(one(text), NOW).payload == payload

    def test_a_digest_is_of_the_payloads_own_text(self) -> None:
        text = '{"type":"PUBLISH","topic":"t","payload":  {"a": 1.0} ,"payload_sha256":"%s"}'
        digest = hashlib.sha256(b'{"a": 1.0}').hexdigest()
        assert event_of(one(text % digest), NOW).headers == {"payload_sha256": digest}
        with pytest.raises(errors.InvalidEvent):
            event_of(one(text % ("0" * 64)), NOW)

    @pytest.mark.parametrize("header", [{"ttl_s": "x"}, {"ttl_s": "-1"}, {"not_before": "nan"}])
    def test_a_header_that_is_no_number_is_refused(self, header: dict[str, str]) -> None:
        with pytest.raises(errors.InvalidEvent):
            fields_of(header)


class TestErrors:
    @pytest.mark.parametrize(("kind", "code", "status"), codes.CODES, ids=lambda v: str(v)[:40])
    def test_an_error_arrives_as_itself(self, kind: Any, code: str, status: int) -> None:
        error = kind("no", hint="try")
        assert (codes.code_of(error), codes.status_of(error)) == (code, status)
        back = codes.error_of(codes.failure_of(error))
        if code != "closing":
            assert type(back) is kind
        assert (back.message, back.hint) == ("no", "try")

    def test_an_unknown_code_is_a_broken_protocol(self) -> None:
        error = codes.error_of(frames.Failure(code="new", message="no"))
        assert isinstance(error, errors.ProtocolError)

    def test_what_json_cannot_hold_is_an_error(self) -> None:
        with pytest.raises(errors.ProtocolError):
            frames.dump(frames.Ok(result=object()))


class TestBatches:
    def test_a_batch_in_one_piece_is_told_by_its_length(self) -> None:
        receipts = [Receipt("t", 0, 5 + n, f"e{n}") for n in range(3)]
        told = frames.published(receipts, 1)
        assert (told.offset, told.count, told.receipts) == (5, 3, None)

    @pytest.mark.parametrize(
        "second", [Receipt("t", 1, 6, "b"), Receipt("t", 0, 9, "b"), Receipt("t", 0, 6, "b", True)]
    )
    def test_any_other_batch_is_told_one_by_one(self, second: Receipt) -> None:
        told = frames.published([Receipt("t", 0, 5, "a"), second], None)
        assert told.receipts == [
            (0, 5, False),
            (second.partition, second.offset, second.duplicate),
        ]
        assert told.ids == (["a", "b"] if second.duplicate else None)
