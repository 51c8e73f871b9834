"""The frames, as a client of the older Node.js service sends them, and what was added."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from typing import Any

import pytest

from trunkline.broker.server import Broker
from trunkline.broker.subscriber import Subscriber
from trunkline.errors import LockTimeout
from trunkline.names import partition_for

from .client import Peer, peer, until


class TestPublishing:
    async def test_a_publish_is_answered_with_its_place(self, one: Peer) -> None:
        await one.say(
            "PUBLISH",
            topic="heartbeat",
            key="duck-1",
            headers={"ct": "json"},
            payload={"cpu": 12.3},
        )
        said = await one.hear()
        assert (said["type"], said["topic"], said["partition"], said["offset"]) == (
            *("PUBLISHED", "heartbeat", 0, 1),
        )
        assert "corr" not in said

    async def test_the_answer_carries_the_senders_mark(self, one: Peer) -> None:
        for corr in ("a", 7):
            await one.say("PUBLISH", topic="t", payload=1, corr=corr)
            assert (await one.hear("PUBLISHED"))["corr"] == corr

    async def test_an_envelope_comes_out_as_it_went_in(self, one: Peer) -> None:
        headers = {"ct": "json", "type": "beat", "agent_id": "stt", "priority": "high"}
        await one.say("PUBLISH", topic="t", key="k", headers=headers, payload={"pid": 1234})
        await one.subscribe("t", "g")
        message = await one.hear("MESSAGE")
        envelope = message["envelope"]
        assert (message["topic"], message["group"], message["offset"]) == ("t", "g", 1)
        assert (message["attempt"], envelope["attempts"]) == (1, 1)
        assert envelope["headers"] == headers
        assert (envelope["key"], envelope["payload"]) == ("k", {"pid": 1234})
        assert (envelope["topic"], envelope["partition"], envelope["offset"]) == ("t", 0, 1)
        assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f-]{21}", envelope["id"])
        assert 1.7e12 < envelope["ts"] < 1e13

    async def test_what_is_not_given_is_not_there(self, one: Peer) -> None:
        await one.say("PUBLISH", topic="t", payload=None)
        await one.subscribe("t", "g")
        envelope = (await one.hear("MESSAGE"))["envelope"]
        assert not {"key", "headers", "payload_sha256"} & envelope.keys()
        assert envelope["payload"] is None

    async def test_a_payload_that_is_missing_is_not_null(self, one: Peer) -> None:
        said = await one.ask("PUBLISH", topic="t", paylod={"misspelt": True})
        assert (said["type"], said["code"]) == ("ERROR", "invalid_event")
        assert (await one.ask("PUBLISH", topic="t", payload=None))["offset"] == 1

    async def test_what_stands_beside_a_whole_event_is_refused(self, one: Peer) -> None:
        event = {"topic": "t", "event_id": "e1", "payload": 1}
        beside: list[dict[str, Any]] = [
            {"topic": "u"},
            {"key": "k"},
            {"headers": {"a": "b"}},
            {"payload": None},
        ]
        for members in (*beside, {"payload_sha256": "0" * 64}, {"events": [event]}):
            said = await one.ask("PUBLISH", event=event, **members)
            assert (said["type"], said["code"]) == ("ERROR", "invalid_event"), members
        for members in beside[1:]:
            said = await one.ask("PUBLISH", topic="t", events=[event], **members)
            assert (said["type"], said["code"]) == ("ERROR", "invalid_event"), members
        said = await one.ask("PUBLISH", topic="t", event=event)
        assert (said["offset"], said["id"]) == (1, "e1")

    async def test_a_digest_is_checked(self, one: Peer) -> None:
        payload = {"a": [1, 2], "ü": "ß"}
        text = json.dumps(payload).encode()
        good = hashlib.sha256(text).hexdigest()
        said = await one.ask("PUBLISH", topic="t", payload=payload, payload_sha256=good)
        assert said["type"] == "PUBLISHED"
        for bad in ("0" * 64, "nonsense"):
            said = await one.ask("PUBLISH", topic="t", payload=payload, payload_sha256=bad)
            assert (said["type"], said["code"]) == ("ERROR", "invalid_event")
        await one.subscribe("t", "g")
        envelope = (await one.hear("MESSAGE"))["envelope"]
        spelt = json.dumps(envelope["payload"], separators=(",", ":"), ensure_ascii=False).encode()
        assert envelope["payload_sha256"] == hashlib.sha256(spelt).hexdigest()

    async def test_keys_choose_the_partition_by_the_shared_formula(
        self, one: Peer, broker: Broker
    ) -> None:
        await broker.hub.bus.define("t", partitions=4)
        for key in ("a", "hello", "ключ", "😀", "x" * 50):
            said = await one.ask("PUBLISH", topic="t", key=key, payload=1)
            assert said["partition"] == partition_for(key, 4)

    async def test_a_batch_is_kept_all_or_none(self, one: Peer) -> None:
        events = [{"topic": "t", "payload": n} for n in range(5)]
        said = await one.ask("PUBLISH", topic="t", events=events)
        assert (said["type"], said["offset"], said["count"]) == ("PUBLISHED", 1, 5)
        bad = [*events, {"topic": "t", "payload": "x" * 2_000_000}]
        said = await one.ask("PUBLISH", topic="t", events=bad)
        assert said["type"] == "ERROR"
        assert (await one.ask("PUBLISH", topic="t", payload=1))["offset"] == 6

    async def test_several_in_one_frame_are_kept_or_refused_each_for_itself(
        self, one: Peer
    ) -> None:
        good, alien = {"topic": "t", "payload": 1}, {"topic": "u"}
        large, broken = {"topic": "t", "payload": "x" * 2_000_000}, {"topic": 5}
        for events in ([good, alien, large, good], [good, alien, broken, good]):
            await one.say("PUBLISH", topic="t", corrs=list("abcd"), events=events)
            said = [await one.hear() for _ in events]
            assert {frame["corr"]: frame["type"] for frame in said} == {
                **dict.fromkeys("ad", "PUBLISHED"),
                **dict.fromkeys("bc", "ERROR"),
            }
        assert (await one.ask("PUBLISH", topic="t", payload=1))["offset"] == 5
        assert (await one.ask("PUBLISH", topic="u", payload=1))["offset"] == 1

    async def test_each_of_several_in_one_frame_has_a_mark_of_its_own(self, one: Peer) -> None:
        events = [{"topic": "t", "payload": n} for n in range(3)]
        await one.say("PUBLISH", topic="t", corrs=[7, 8], events=events)
        refused = [await one.hear("ERROR") for _ in range(2)]
        assert [(said["corr"], said["code"]) for said in refused] == [
            (7, "invalid_event"),
            (8, "invalid_event"),
        ]
        said = await one.ask("PUBLISH", topic="t", corrs=[], events=[])
        assert said["code"] == "bad_frame"
        for alone in ({"payload": 1}, {"event": events[0]}):
            await one.say("PUBLISH", topic="t", corrs=[7], **alone)
            said = await one.hear()
            assert (said["corr"], said["code"]) == (7, "invalid_event"), "they are no events"
        await one.say("PUBLISH", topic="t", corrs=[7, 8, 9], events=events)
        found = [await one.hear("PUBLISHED") for _ in range(3)]
        assert [(said["corr"], said["offset"]) for said in found] == [(7, 1), (8, 2), (9, 3)]

    async def test_one_that_is_refused_does_not_make_the_others_wait_for_each_other(
        self, broker: Broker, one: Peer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await broker.hub.registry.add("t", {"type": "integer"})
        sizes: list[int] = []
        publish = broker.hub.bus.publish_many

        async def counted(topic: str, events: Any) -> Any:
            sizes.append(len(events))
            return await publish(topic, events)

        monkeypatch.setattr(broker.hub.bus, "publish_many", counted)
        events = [{"topic": "t", "payload": "no" if n == 700 else n} for n in range(1000)]
        await one.say("PUBLISH", topic="t", corrs=list(range(1000)), events=events)
        said = [await one.hear() for _ in events]
        assert [frame["corr"] for frame in said if frame["type"] == "ERROR"] == [700]
        assert {frame["corr"] for frame in said} == set(range(1000))
        assert (sum(sizes), len(sizes) <= 10) == (999, True)
        kept = [record.event.payload for record in await broker.hub.bus.read("t", limit=2000)]
        assert kept == [n for n in range(1000) if n != 700], "in order"

    @pytest.mark.parametrize("again", [False, True])
    async def test_what_comes_later_stays_behind_those_that_are_kept_apart_from_a_bad_one(
        self, broker: Broker, one: Peer, monkeypatch: pytest.MonkeyPatch, again: bool
    ) -> None:
        await broker.hub.registry.add("t", {"type": "integer"})
        publish, synced = broker.hub.bus.publish_many, asyncio.Event()

        async def slow(topic: str, events: Any) -> Any:
            receipts = await publish(topic, events)
            await synced.wait()
            return receipts

        monkeypatch.setattr(broker.hub.bus, "publish_many", slow)
        for start in (0, 8, 16):
            events = [{"topic": "t", "payload": start + n} for n in range(7)]
            events.insert(1, {"topic": "t", "payload": "no"})
            corrs = [start + n for n in range(8)]
            await one.say("PUBLISH", topic="t", corrs=corrs, events=events, again=again)
            assert (await one.ask("PING"))["type"] == "PONG"
            await one.say("PUBLISH", topic="t", payload=start + 7, corr=f"last {start}")
            assert (await one.ask("PING"))["type"] == "PONG"
        synced.set()
        said = [await one.hear() for _ in range(27)]
        assert [frame["corr"] for frame in said if frame["type"] == "ERROR"] == [1, 9, 17]
        kept = [record.event.payload for record in await broker.hub.bus.read("t")]
        assert kept == list(range(24))

    async def test_what_is_sent_again_keeps_its_place_among_the_rest(
        self, broker: Broker, one: Peer
    ) -> None:
        def publish(n: int) -> dict[str, Any]:
            again = {"event": {"topic": "t", "payload": n}, "again": True}
            return {"type": "PUBLISH", **(again if n % 2 else {"topic": "t", "payload": n})}

        await one.socket.send(json.dumps([publish(n) for n in range(6)]))
        for _ in range(6):
            await one.hear("PUBLISHED")
        kept = [record.event.payload for record in await broker.hub.bus.read("t")]
        assert kept == list(range(6))

    @pytest.mark.parametrize("is_lost", [False, True])
    async def test_a_new_connection_of_a_client_takes_the_place_of_the_one_before(
        self, broker: Broker, monkeypatch: pytest.MonkeyPatch, is_lost: bool
    ) -> None:
        """What the first has still to publish is said again on the second."""
        publish, synced = broker.hub.bus.publish_many, asyncio.Event()

        async def slow(topic: str, events: Any) -> Any:
            await synced.wait()
            return await publish(topic, events)

        monkeypatch.setattr(broker.hub.bus, "publish_many", slow)
        whole = {"topic": "t", "ts": "2026-05-04T12:00:00Z", "payload": 1}
        begun, waits = ({**whole, "event_id": name} for name in "ab")
        async with peer(broker.url, client="c") as one:
            await one.say("PUBLISH", event=begun, again=True)
            await one.say("PUBLISH", event=waits)
            assert (await one.ask("PING"))["type"] == "PONG"
            if is_lost:
                one.socket.transport.abort()
                await until(lambda: not broker.hub.sessions)
            async with peer(broker.url, client="c") as two, peer(broker.url, client="d"):
                await asyncio.wait_for(one.socket.wait_closed(), 10)
                for event in (begun, waits):
                    await two.say("PUBLISH", event=event, again=True)
                assert (await two.ask("PING"))["type"] == "PONG"
                synced.set()
                assert [(await two.hear("PUBLISHED"))["offset"] for _ in "ab"] == [1, 2]
        assert await broker.hub.bus.bounds("t") == (1, 3)
        await until(lambda: not broker.hub.clients)

    async def test_a_message_may_be_an_array_of_frames(self, one: Peer) -> None:
        frames = [{"type": "PUBLISH", "topic": "t", "payload": n, "corr": n} for n in range(3)]
        await one.socket.send(json.dumps([*frames, {"type": "NO", "corr": 9}]))
        found = [await one.hear() for _ in range(4)]
        assert {f["corr"]: f["type"] for f in found} == {
            **dict.fromkeys(range(3), "PUBLISHED"),
            9: "ERROR",
        }

    async def test_an_array_may_begin_with_space(self, one: Peer) -> None:
        await one.socket.send('\r\n [{"type":"PING","corr":1}]')
        assert await one.hear() == {"type": "PONG", "corr": 1}

    async def test_a_batch_does_not_overtake_what_was_said_before_it(self, one: Peer) -> None:
        single = {"type": "PUBLISH", "topic": "t", "payload": 1, "key": "k", "corr": "single"}
        event = {"topic": "t", "payload": 2, "key": "k"}
        await one.socket.send(
            json.dumps([single, {"type": "PUBLISH", "events": [event], "corr": "batch"}])
        )
        found = [await one.hear("PUBLISHED") for _ in range(2)]
        assert {f["corr"]: f["offset"] for f in found} == {"single": 1, "batch": 2}

    async def test_one_bad_event_of_many_harms_no_other(self, one: Peer) -> None:
        frames = [{"type": "PUBLISH", "topic": "t", "payload": n, "corr": n} for n in range(4)]
        frames[2]["payload"] = "x" * 1_100_000
        await one.socket.send(json.dumps(frames))
        found = [await one.hear() for _ in range(4)]
        assert {f["corr"]: f["type"] for f in found} == {
            0: "PUBLISHED",
            1: "PUBLISHED",
            2: "ERROR",
            3: "PUBLISHED",
        }

    async def test_a_payload_too_deep_for_the_topics_schema_is_answered(
        self, one: Peer, broker: Broker
    ) -> None:
        await broker.hub.registry.add("t", {"type": "object"})
        deep = "[" * 300 + "]" * 300
        for corr, payload in (("bad", deep), ("good", "{}")):
            data = f'{{"type":"PUBLISH","corr":"{corr}","topic":"t","payload":{payload}}}'
            await one.socket.send(data)
        said = {frame["corr"]: frame for frame in [await one.hear(), await one.hear()]}
        assert said["bad"]["code"] == "invalid_event"
        assert said["good"]["type"] == "PUBLISHED"

    async def test_what_goes_wrong_unexpectedly_is_answered_too(
        self, one: Peer, broker: Broker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any) -> None:
            raise RuntimeError("nobody thought of this")

        monkeypatch.setattr(broker.hub.registry, "check", fail)
        assert (await one.ask("PUBLISH", topic="t", payload=1))["code"] == "internal"
        assert (await one.ask("PUBLISH", events=[{"topic": "t"}]))["code"] == "internal"

    async def test_a_message_in_pieces_is_one_message(self, one: Peer) -> None:
        text = json.dumps({"type": "PUBLISH", "topic": "t", "payload": 1, "corr": 1})
        await one.socket.send([text[:10], text[10:20], text[20:]])
        assert (await one.hear())["type"] == "PUBLISHED"
        await one.socket.send(text.encode())
        assert (await one.hear())["offset"] == 2


class TestErrors:
    @pytest.mark.parametrize(
        ("text", "code"),
        [
            ("{", "bad_frame"),
            ("null", "bad_frame"),
            ("", "bad_frame"),
            ("[" * 5000, "bad_frame"),
            ('{"type":"PUBLISH","topic":7}', "bad_frame"),
            ('{"type":"ACK"}', "bad_frame"),
            ('{"type":"WAT"}', "unknown_type"),
            ('{"type":"PUBLISH","topic":"a/b","payload":1}', "invalid_name"),
            ('{"type":"PUBLISH","topic":"a","payload":1e999}', "invalid_event"),
            (
                '{"type":"PUBLISH","topic":"a","payload":' + "[" * 200 + "]" * 200 + "}",
                "invalid_event",
            ),
            ('{"type":"PUBLISH","topic":"a","headers":{"ttl_s":"x"},"payload":1}', "invalid_event"),
            ('{"type":"SUBSCRIBE","topic":"a","group":"_b"}', "invalid_name"),
            ('{"type":"SUBSCRIBE","topic":"a","group":"b","where":">>"}', "invalid_filter"),
            ('{"type":"SUBSCRIBE","topic":"a","group":"b","policy":{"x":1}}', "invalid_option"),
            ('{"type":"UNSUBSCRIBE","topic":"a","group":"b"}', "not_found"),
            ('{"type":"CALL","op":"nothing"}', "bad_frame"),
        ],
        ids=lambda value: value[:50],
    )
    async def test_a_bad_frame_is_answered_and_harms_nothing(
        self, one: Peer, text: str, code: str
    ) -> None:
        await one.socket.send(text)
        said = await one.hear()
        assert (said["type"], said["code"]) == ("ERROR", code)
        assert said["message"]
        assert (await one.ask("PING"))["type"] == "PONG"

    async def test_an_error_carries_the_mark_of_its_frame(self, one: Peer) -> None:
        await one.say("PUBLISH", topic=7, corr="mine")
        assert (await one.hear("ERROR"))["corr"] == "mine"

    @pytest.mark.parametrize("settings", [{"frame_bytes": 2000}])
    async def test_a_frame_that_is_too_large_ends_the_connection_alone(
        self, one: Peer, two: Peer
    ) -> None:
        await one.say("PUBLISH", topic="t", payload="x" * 3000)
        with pytest.raises(Exception, match=r"100[69]"):
            await one.hear()
        assert (await two.ask("PUBLISH", topic="t", payload=1))["offset"] == 1, "it was not kept"

    @pytest.mark.parametrize("settings", [{"rate_frames_s": 5}])
    async def test_too_many_frames_are_refused_with_a_time_to_wait(self, one: Peer) -> None:
        for _ in range(20):
            await one.say("PUBLISH", topic="t", payload=1)
        found = [await one.hear() for _ in range(20)]
        refused = [frame for frame in found if frame["type"] == "ERROR"]
        assert 10 <= len(refused) < 20
        assert {frame["code"] for frame in refused} == {"rate"}
        assert all(0 < frame["retry_s"] <= 1 for frame in refused)

    @pytest.mark.parametrize("settings", [{"rate_frames_s": 5}])
    async def test_each_of_several_in_one_frame_has_its_own_rate(
        self, broker: Broker, one: Peer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(broker.hub.clock, "monotonic", lambda: 0.0)
        events = [{"topic": "t", "payload": n} for n in range(8)]
        await one.say("PUBLISH", topic="t", corrs=list(range(8)), events=events)
        said = {frame["corr"]: frame for frame in [await one.hear() for _ in events]}
        assert [said[n]["type"] for n in range(8)] == ["PUBLISHED"] * 5 + ["ERROR"] * 3
        assert [(said[n]["code"], said[n]["retry_s"]) for n in range(5, 8)] == [("rate", 0.2)] * 3


class TestDelivery:
    async def test_an_ack_settles_what_its_own_subscription_has(self, one: Peer) -> None:
        for n in range(6):
            await one.ask("PUBLISH", topic="t", payload=n)
        for sub in ("a", "b"):
            await one.subscribe("t", "g", sub=sub, max_inflight=3)
        mine = [m for m in [await one.hear("MESSAGE") for _ in range(6)] if m["sub"] == "b"]
        place = {"topic": "t", "partition": 0, "group": "g"}
        last = max(message["offset"] for message in mine)
        assert (await one.ask("ACK", **place, offset=last))["count"] == 3

    async def test_a_time_to_begin_has_a_value_and_an_offset_is_the_first(self, one: Peer) -> None:
        said = await one.subscribe("t", "g", **{"from": {"kind": "timestamp"}})
        assert (said["type"], said["code"]) == ("ERROR", "invalid_option")
        said = await one.subscribe("t", "g", **{"from": {"kind": "offset", "value": 1.5}})
        assert (said["type"], said["code"]) == ("ERROR", "invalid_option")
        await one.say("PUBLISH", topic="t", payload=1)
        assert (await one.subscribe("t", "g", **{"from": {"kind": "offset"}}))["type"] == "OK"
        assert (await one.hear("MESSAGE"))["offset"] == 1

    async def test_subscribing_is_answered(self, one: Peer) -> None:
        await one.say("SUBSCRIBE", topic="t", group="g")
        assert await one.hear() == {"type": "OK", "topic": "t", "group": "g"}

    @pytest.mark.parametrize(
        ("topic", "members", "linger_s"),
        [
            ("a", {"max_inflight": 100}, 0.005),
            ("a", {"max_inflight": 100, "policy": {"ordering": "none"}}, 0.005),
            ("a", {"max_inflight": 100, "policy": {"ordering": "partition"}}, None),
            ("a", {"max_inflight": 10}, None),
            ("a.*", {"max_inflight": 100}, None),
        ],
    )
    async def test_acks_may_linger_where_nothing_waits_for_them(
        self, one: Peer, topic: str, members: dict[str, Any], linger_s: float | None
    ) -> None:
        assert (await one.subscribe(topic, "g", **members)).get("linger_s") == linger_s

    async def test_a_subscription_that_was_refused_late_holds_nothing(
        self, one: Peer, broker: Broker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def refuse(_: Subscriber) -> float | None:
            raise LockTimeout("t__g.lock has been locked for 10 s")

        with monkeypatch.context() as patch:
            patch.setattr(Subscriber, "linger_s", refuse)
            said = await one.ask("SUBSCRIBE", topic="t", group="g")
        assert said["type"] == "ERROR"
        assert (await broker.hub.bus.health())["groups"] == 0
        await one.subscribe("t", "g")

    @pytest.mark.parametrize("error", [OSError(5, "Input/output error"), LockTimeout("locked")])
    async def test_a_subscription_that_fails_by_itself_is_told(
        self, one: Peer, broker: Broker, error: Exception
    ) -> None:
        await one.subscribe("t", "g")
        stream = next(iter(broker.hub.bus._pumps.subscriptions))
        stream.fail(error)
        said = await one.hear("ERROR")
        code = "busy" if isinstance(error, LockTimeout) else "internal"
        assert (said["code"], said["topic"], said["group"]) == (code, "t", "g")
        assert (await one.subscribe("t", "g"))["type"] == "OK"

    async def test_latest_is_the_tail(self, one: Peer) -> None:
        await one.ask("PUBLISH", topic="t", payload="old")
        for group, start in (("a", {"kind": "latest"}), ("b", None)):
            await one.subscribe("t", group, **{"from": start})
        await one.say("PUBLISH", topic="t", payload="new")
        found = [await one.hear("MESSAGE") for _ in range(2)]
        assert {(m["group"], m["envelope"]["payload"]) for m in found} == {
            ("a", "new"),
            ("b", "new"),
        }

    async def test_a_group_begins_at_an_offset_or_a_time(self, one: Peer) -> None:
        for n in range(1, 5):
            await one.ask("PUBLISH", topic="t", payload=n)
        await one.subscribe("t", "a", **{"from": {"kind": "offset", "value": 3}})
        assert (await one.hear("MESSAGE"))["offset"] == 3
        await one.subscribe("t", "b", **{"from": {"kind": "timestamp", "value": 1000}})
        assert [m["offset"] for m in [await one.hear("MESSAGE") for _ in range(5)]][-1] == 4

    async def test_no_more_than_the_window_is_sent(self, one: Peer) -> None:
        for n in range(6):
            await one.ask("PUBLISH", topic="t", payload=n)
        await one.subscribe("t", "g", max_inflight=2, ack="each")
        first = [await one.hear("MESSAGE") for _ in range(2)]
        assert await one.silent()
        await one.ack(first[1])
        assert (await one.hear("MESSAGE"))["offset"] == 3
        assert await one.silent()

    async def test_an_ack_settles_everything_up_to_it(self, one: Peer, broker: Broker) -> None:
        for n in range(5):
            await one.ask("PUBLISH", topic="t", payload=n)
        await one.subscribe("t", "g")
        found = [await one.hear("MESSAGE") for _ in range(5)]
        await one.nack(found[1], delay_s=0.05)
        said = await one.ask("ACK", topic="t", partition=0, group="g", offset=4)
        assert (said["type"], said["count"]) == ("OK", 3), "what was nacked is not settled"
        again = await one.hear("MESSAGE")
        assert (again["offset"], again["attempt"]) == (2, 2)

    async def test_an_ack_settles_one_where_that_is_asked_for(self, one: Peer) -> None:
        for n in range(3):
            await one.ask("PUBLISH", topic="t", payload=n)
        await one.subscribe("t", "g", ack="each")
        for _ in range(3):
            await one.hear("MESSAGE")
        said = await one.ask("ACK", topic="t", partition=0, group="g", offset=3)
        assert said["count"] == 1
        said = await one.ask("ACK", topic="t", partition=0, group="g", offset=3)
        assert said["count"] == 0, "a second time it does nothing"
        said = await one.ask("ACK", topic="t", partition=0, group="g", offset=1, offsets=[2])
        assert said["count"] == 2

    async def test_an_ack_of_what_one_does_not_hold_does_nothing(self, one: Peer) -> None:
        said = await one.ask("ACK", topic="t", partition=0, group="g", offset=99)
        assert (said["type"], said["count"]) == ("OK", 0)

    async def test_each_way_to_settle_answers_with_a_number(self, one: Peer) -> None:
        for number in range(4):
            await one.ask("PUBLISH", topic="t", payload=number)
        await one.subscribe("t", "g", ack="each")
        place = {"topic": "t", "partition": 0, "group": "g"}
        for _ in range(4):
            await one.hear("MESSAGE")
        said = [
            await one.ask("EXTEND", **place, offset=1),
            await one.ask("ACK", **place, offset=1),
            await one.ask("NACK", **place, offset=2, delay_s=60),
            await one.ask("NACK", **place, offset=3, dead=True),
            await one.ask("NACK", **place, offset=9),
        ]
        assert json.dumps([answer["count"] for answer in said]) == "[1, 1, 1, 1, 0]"

    async def test_a_nack_comes_again_and_dies_after_its_attempts(
        self, one: Peer, broker: Broker
    ) -> None:
        await one.ask("PUBLISH", topic="t", payload="bad")
        policy = {"max_retries": 2, "backoff_base_s": 0.0}
        await one.subscribe("t", "g", policy=policy)
        for attempt in (1, 2, 3):
            message = await one.hear("MESSAGE")
            assert message["attempt"] == attempt
            await one.nack(message, reason="no good")
        await one.subscribe("t.DLQ", "g")
        letter = (await one.hear("MESSAGE"))["envelope"]
        assert letter["payload"] == "bad"
        assert letter["headers"]["dlq-error"] == "no good"
        assert (letter["headers"]["dlq-group"], letter["headers"]["dlq-attempts"]) == ("g", "3")

    async def test_a_dead_nack_dies_at_once(self, one: Peer) -> None:
        await one.ask("PUBLISH", topic="t", payload="bad")
        await one.subscribe("t", "g")
        await one.nack(await one.hear("MESSAGE"), dead=True, reason="never")
        await one.subscribe("t.DLQ", "g")
        assert (await one.hear("MESSAGE"))["envelope"]["headers"]["dlq-reason"] == "rejected"

    async def test_without_acks_a_full_window_is_delivered_again_and_then_dies(
        self, one: Peer
    ) -> None:
        for n in range(4):
            await one.ask("PUBLISH", topic="t", payload=n)
        policy = {"ack_timeout_s": 0.1, "max_retries": 1, "backoff_base_s": 0.0}
        await one.subscribe("t", "g", max_inflight=2, policy=policy)
        found = [await one.hear("MESSAGE") for _ in range(8)]
        tries = sorted((m["offset"], m["attempt"]) for m in found)
        assert tries == [(o, a) for o in (1, 2, 3, 4) for a in (1, 2)]
        await one.subscribe("t.DLQ", "d")
        dead = [await one.hear("MESSAGE") for _ in range(4)]
        assert sorted(m["envelope"]["headers"]["dlq-offset"] for m in dead) == ["1", "2", "3", "4"]

    async def test_a_lease_can_be_extended(self, one: Peer) -> None:
        await one.ask("PUBLISH", topic="t", payload=1)
        await one.subscribe("t", "g", policy={"ack_timeout_s": 0.4, "backoff_base_s": 0.0})
        await one.hear("MESSAGE")
        for _ in range(4):
            assert await one.silent(0.2)
            said = await one.ask("EXTEND", topic="t", partition=0, group="g", offset=1)
            assert said["count"] == 1
        assert (await one.hear("MESSAGE"))["attempt"] == 2

    async def test_members_on_two_connections_share(self, one: Peer, two: Peer) -> None:
        await one.subscribe("t", "g", max_inflight=5)
        await two.subscribe("t", "g", max_inflight=5)
        for n in range(10):
            await one.ask("PUBLISH", topic="t", payload=n)
        mine = [await one.hear("MESSAGE") for _ in range(5)]
        theirs = [await two.hear("MESSAGE") for _ in range(5)]
        assert sorted(m["offset"] for m in mine + theirs) == list(range(1, 11))

    async def test_what_a_lost_connection_held_goes_to_another_at_once(
        self, broker: Broker, one: Peer
    ) -> None:
        for n in range(3):
            await one.ask("PUBLISH", topic="t", payload=n)
        async with peer(broker.url) as other:
            await other.subscribe("t", "g")
            for _ in range(3):
                await other.hear("MESSAGE")
            await one.subscribe("t", "g")
            assert await one.silent()
            other.socket.transport.abort()
            found = [await one.hear("MESSAGE") for _ in range(3)]
        # The client may have begun the first frame; it cannot have begun the others.
        assert sorted((m["offset"], m["attempt"]) for m in found) == [(1, 2), (2, 1), (3, 1)]

    async def test_partitions_come_together_on_one_connection(
        self, one: Peer, broker: Broker
    ) -> None:
        await broker.hub.bus.define("t", partitions=3)
        for n in range(9):
            await one.ask("PUBLISH", topic="t", key=f"k{n}", payload=n)
        await one.subscribe("t", "g")
        found = [await one.hear("MESSAGE") for _ in range(9)]
        assert {m["partition"] for m in found} == {0, 1, 2}
        assert sorted(m["envelope"]["payload"] for m in found) == list(range(9))

    async def test_sticky_members_own_partitions_and_hand_them_over(
        self, one: Peer, broker: Broker
    ) -> None:
        bus = broker.hub.bus
        await bus.define("t", partitions=4)
        await one.subscribe("t", "g", sticky=True, ack="each")
        async with peer(broker.url) as other:
            await other.subscribe("t", "g", sticky=True, ack="each")
            for n in range(40):
                await bus.publish("t", n, key=f"k{n}")
            owned: dict[str, set[int]] = {"one": set(), "other": set()}
            count = 0
            for name, who in (("one", one), ("other", other)):
                while not await who.silent(0.3):
                    message = await who.hear("MESSAGE")
                    owned[name].add(message["partition"])
                    await who.ack(message)
                    count += 1
            assert count == 40
            assert {len(places) for places in owned.values()} == {2}
            assert not owned["one"] & owned["other"]
        await until(lambda: len(broker.hub.sessions) == 1)
        for n in range(40):
            await bus.publish("t", n, key=f"k{n}")
        seen = set()
        for _ in range(40):
            message = await one.hear("MESSAGE")
            seen.add(message["partition"])
            await one.ack(message)
        assert seen == {0, 1, 2, 3}

    async def test_filters_by_key_header_and_condition(self, one: Peer) -> None:
        for n in range(4):
            await one.ask(
                "PUBLISH", topic="t", key=f"k{n % 2}", headers={"n": str(n)}, payload={"n": n}
            )
        wanted: dict[str, tuple[dict[str, Any], list[int]]] = {
            "a": ({"filter": {"key": "k1"}}, [1, 3]),
            "b": ({"filter": {"header": ["n", "2"]}}, [2]),
            "c": ({"where": "payload.n >= 2"}, [2, 3]),
            "d": ({"where": "payload.n >= 2", "filter": {"key": "k0"}}, [2]),
        }
        for group, (members, payloads) in wanted.items():
            await one.subscribe("t", group, **members)
            found = []
            for _ in payloads:  # those of one key come one by one
                message = await one.hear("MESSAGE")
                await one.ack(message)
                found.append(message["envelope"]["payload"]["n"])
            assert found == payloads
            assert await one.silent(0.05)

    async def test_credits_bound_what_is_sent(self, one: Peer) -> None:
        for n in range(6):
            await one.ask("PUBLISH", topic="t", payload=n)
        await one.say("FLOW", credits=2)
        await one.subscribe("t", "g")
        assert [(await one.hear("MESSAGE"))["offset"] for _ in range(2)] == [1, 2]
        assert await one.silent()
        await one.say("ACK", topic="t", partition=0, group="g", offset=2)
        assert await one.silent(), "an ack is no credit"
        await one.say("FLOW", credits=3)
        assert [(await one.hear("MESSAGE"))["offset"] for _ in range(3)] == [3, 4, 5]
        assert await one.silent()

    async def test_credits_may_follow_the_subscription_at_once(self, one: Peer) -> None:
        await one.ask("PUBLISH", topic="t", payload=1)
        start = {"kind": "earliest"}
        await one.say("SUBSCRIBE", topic="t", group="g", sub="s", credits=0, **{"from": start})
        await one.say("FLOW", credits=1, sub="s", corr=2)
        assert (await one.hear("MESSAGE"))["offset"] == 1
        assert [(await one.hear("OK")).get("corr") for _ in range(2)] == [None, 2]

    async def test_a_subscription_may_have_credits_of_its_own(self, one: Peer) -> None:
        for n in range(6):
            await one.ask("PUBLISH", topic="t", payload=n)
        await one.subscribe("t", "g", sub="s", credits=1)
        await one.subscribe("t", "h")
        found = [await one.hear("MESSAGE") for _ in range(7)]
        assert [m["offset"] for m in found if m["group"] == "g"] == [1]
        assert await one.silent()
        assert (await one.ask("FLOW", credits=2, sub="s"))["type"] == "OK"
        assert [(await one.hear("MESSAGE"))["offset"] for _ in range(2)] == [2, 3]
        await one.say("FLOW", credits=9, sub="nobody")
        assert await one.silent()
        await one.ask("FLOW", credits=0, sub="s")
        await one.say("FLOW", credits=1, sub="s")
        assert (await one.hear("MESSAGE"))["offset"] == 4
        assert await one.silent()

    async def test_what_waits_for_a_credit_is_not_tried(self, one: Peer, two: Peer) -> None:
        await one.ask("PUBLISH", topic="t", payload=1)
        await one.say("FLOW", credits=1)
        await one.subscribe("t", "g")
        await one.subscribe("t", "h")
        sent = (await one.hear("MESSAGE"))["group"]
        assert await one.silent(), "there was one credit for both"
        await one.socket.close()
        await two.subscribe("t", "g")
        await two.subscribe("t", "h")
        found = [await two.hear("MESSAGE") for _ in range(2)]
        assert {m["group"]: m["attempt"] for m in found} == {"g": 1, "h": 1, sent: 2}

    async def test_credits_are_for_the_subscription_that_was_last_asked_for(
        self, one: Peer
    ) -> None:
        mine = {"topic": "t", "group": "g", "sub": "s"}
        frames = [
            {"type": "UNSUBSCRIBE", **mine, "corr": 2},
            {"type": "SUBSCRIBE", **mine, "topic": "u", "credits": 0, "corr": 3},
            {"type": "CALL", "op": "topics", "corr": 4},
            {"type": "FLOW", "credits": 1, "sub": "s", "corr": 5},
            {"type": "FLOW", "credits": 0, "sub": "s", "corr": 6},
            {"type": "FLOW", "credits": 2, "sub": "s", "corr": 7},
        ]
        assert (await one.subscribe("t", "g", sub="s", credits=0))["type"] == "OK"
        await one.socket.send(json.dumps(frames))
        assert [(await one.hear())["corr"] for _ in frames] == [2, 3, 4, 5, 6, 7]
        for n in range(3):
            await one.say("PUBLISH", topic="u", payload=n)
        assert [(await one.hear("MESSAGE"))["offset"] for _ in range(2)] == [1, 2]
        assert await one.silent()

    async def test_another_gets_what_there_is_no_credit_for(self, one: Peer, two: Peer) -> None:
        await one.say("FLOW", credits=2)
        for group in ("g", "h"):
            await one.subscribe("t", group)
            await two.subscribe("t", group, credits=0, sub=group)
        events = [{"topic": "t", "payload": n} for n in range(5)]
        await two.ask("PUBLISH", topic="t", events=events)
        sent = [await one.hear("MESSAGE") for _ in range(2)]
        assert await one.silent(), "there were two credits for both"
        for group in ("g", "h"):
            await two.say("FLOW", credits=9, sub=group)
        found = [await two.hear("MESSAGE") for _ in range(8)]
        assert {m["attempt"] for m in found} == {1}
        places = {(m["group"], m["offset"]) for m in (*sent, *found)}
        assert places == {(group, 1 + n) for group in "gh" for n in range(5)}
        await two.socket.close()
        await one.say("FLOW", credits=8)
        again = [await one.hear("MESSAGE") for _ in range(8)]
        assert {(m["group"], m["offset"]) for m in again} == {
            (m["group"], m["offset"]) for m in found
        }
        assert sorted(m["attempt"] for m in again) == [1, 1, 1, 1, 1, 1, 2, 2]

    async def test_unsubscribing_gives_back_what_was_held(self, one: Peer, two: Peer) -> None:
        await one.ask("PUBLISH", topic="t", payload=1)
        await one.subscribe("t", "g")
        await one.hear("MESSAGE")
        assert (await one.ask("UNSUBSCRIBE", topic="t", group="g"))["type"] == "OK"
        await two.subscribe("t", "g")
        assert (await two.hear("MESSAGE"))["attempt"] == 2
        assert await one.silent()

    async def test_subscribing_twice_is_a_conflict(self, one: Peer) -> None:
        await one.subscribe("t", "g")
        assert (await one.subscribe("t", "g"))["code"] == "conflict"
        assert (await one.subscribe("t", "g", sub="other"))["type"] == "OK"

    @pytest.mark.parametrize("settings", [{"subscriptions": 2}])
    async def test_there_are_only_so_many_subscriptions(self, one: Peer) -> None:
        for group in ("a", "b"):
            assert (await one.subscribe("t", group))["type"] == "OK"
        assert (await one.subscribe("t", "c"))["code"] == "too_many"

    @pytest.mark.parametrize("settings", [{"ack_timeout_s": 0.2, "max_inflight": 3}])
    async def test_the_broker_has_defaults_for_new_groups(self, one: Peer) -> None:
        for n in range(5):
            await one.ask("PUBLISH", topic="t", payload=n)
        await one.subscribe("t", "g", max_inflight=None)
        assert [(await one.hear("MESSAGE"))["offset"] for _ in range(3)] == [1, 2, 3]
        again = await one.hear("MESSAGE")
        assert again["attempt"] == 2 or again["offset"] > 3


class TestCloudEvents:
    async def test_events_are_cloudevents_in_both_directions(self, broker: Broker) -> None:
        event = {"specversion": "1.0", "id": "e1", "source": "/s", "type": "t", "topic": "orders"}
        async with peer(broker.url, subprotocols=["cloudevents.json"]) as one:
            assert one.socket.subprotocol == "cloudevents.json"
            await one.socket.send(json.dumps({**event, "data": {"n": 1}}))
            assert (await one.hear("PUBLISHED"))["corr"] == "e1"
            await one.socket.send(json.dumps([{**event, "id": f"b{n}"} for n in range(2)]))
            assert (await one.hear("PUBLISHED"))["count"] == 2
            await one.socket.send(json.dumps({**event, "id": ""}))
            said = await one.hear("ERROR")
            assert (said["code"], said["corr"]) == ("invalid_event", "")
            await one.subscribe("orders", "g", ack="each")
            found = [await one.hear("t") for _ in range(3)]
            assert (found[0]["specversion"], found[0]["data"]) == ("1.0", {"n": 1})
            assert (found[0]["group"], found[0]["attempt"], found[0]["offset"]) == ("g", 1, "1")
            said = await one.ask("ACK", topic="orders", partition=0, group="g", offset=1)
            assert said["count"] == 1

    @pytest.mark.parametrize(
        ("broken", "corr", "wrong"),
        [
            ({"id": "e1", "type": "t", "source": "/s"}, "e1", "topic"),
            ({"id": "e2", "type": "t", "topic": "t"}, "e2", "source"),
            ([{"id": "e3", "type": "t", "topic": "t"}, 1], "e3", "source"),
            ({"id": 4}, None, "id"),
        ],
    )
    async def test_the_answer_names_the_cloudevent_that_was_refused(
        self, broker: Broker, broken: Any, corr: str | None, wrong: str
    ) -> None:
        several = broken if isinstance(broken, list) else [broken]
        several[0]["specversion"] = "1.0"
        async with peer(broker.url, subprotocols=["cloudevents.json"]) as one:
            await one.socket.send(json.dumps(broken))
            said = await one.hear("ERROR")
            assert (said["code"], said.get("corr")) == ("invalid_event", corr)
            assert said["message"].endswith(f"the attribute {wrong}")

    async def test_a_frame_may_carry_a_cloudevent_as_its_payload(self, broker: Broker) -> None:
        async with peer(broker.url, subprotocols=["cloudevents.json"]) as one:
            frame = {"type": "PUBLISH", "topic": "t", "payload": {"specversion": "0.3"}}
            await one.socket.send(json.dumps(frame))
            await one.socket.send(json.dumps([frame, {**frame, "corr": 2}]))
            assert [(await one.hear("PUBLISHED"))["offset"] for _ in range(3)] == [1, 2, 3]
