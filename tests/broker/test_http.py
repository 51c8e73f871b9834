"""The HTTP door."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import unquote

import httpx
import pytest

import trunkline
from trunkline.broker.server import Broker
from trunkline.options import BrokerOptions

from .client import until

CLOUDEVENT = {
    "specversion": "1.0",
    "id": "e1",
    "source": "/shop",
    "type": "order",
    "data": {"n": 1},
}


WAIT = {"Prefer": "wait=20"}


@pytest.fixture
async def http(broker: Broker) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        base_url=broker.url.replace("ws", "http", 1), trust_env=False
    ) as client:
        yield client


async def publish(http: httpx.AsyncClient, topic: str, payload: Any, **members: Any) -> Any:
    done = await http.post(f"/topics/{topic}/events", json={"payload": payload, **members})
    assert done.status_code == 201, done.text
    return done.json()


def counted(monkeypatch: pytest.MonkeyPatch, thing: Any, name: str) -> list[None]:
    """From here on one entry for each call of a method."""
    calls: list[None] = []
    method = getattr(thing, name)

    def call(*args: Any) -> Any:
        calls.append(None)
        return method(*args)

    monkeypatch.setattr(thing, name, call)
    return calls


async def _letters(http: httpx.AsyncClient, count: int) -> Any:
    found = (await http.get("/topics/t/dlq")).json()["letters"]
    return found if len(found) == count else None


class TestTopics:
    async def test_a_topic_is_made_changed_shown_and_removed(self, http: httpx.AsyncClient) -> None:
        wanted = {"topic": "orders", "partitions": 2, "retentionMs": 60000, "maxAttempts": 3}
        made = await http.post("/topics", json=wanted)
        assert (made.status_code, made.json()["partitions"]) == (201, 2)
        again = await http.post("/topics", json={"topic": "orders", "partitions": 4})
        assert (again.status_code, again.json()["maxAttempts"]) == (200, 3)
        assert again.json()["options"] == {"partitions": 4, "retention_age_s": 60.0}
        fewer = await http.post("/topics", json={"topic": "orders", "partitions": 1})
        assert (fewer.status_code, fewer.json()["code"]) == (409, "conflict")
        listed = (await http.get("/topics")).json()["topics"]
        assert "orders" in [topic["topic"] for topic in listed]
        assert (await http.delete("/topics/orders")).status_code == 204
        assert (await http.get("/topics/orders")).status_code == 404

    @pytest.mark.parametrize(
        ("body", "said"),
        [
            ({"topic": "a/b"}, "not a topic name"),
            ({}, "topic is missing"),
            ({"topic": "a", "partitions": 0}, "partitions must be a whole number >= 1"),
            ({"topic": "a", "x": 1}, "there is no field x"),
            ({"topic": "a", "publishACL": ["b", 3]}, "publish_acl[1] must be text, not a whole"),
            ({"topic": "a", "options": {"dedup_keys": "x"}}, "dedup_keys must be a whole number"),
            ([], "it must be an object, not a list"),
        ],
    )
    async def test_a_bad_topic_is_refused(
        self, http: httpx.AsyncClient, body: Any, said: str
    ) -> None:
        done = await http.post("/topics", json=body)
        assert done.status_code == 400
        assert done.json()["code"].startswith("invalid")
        assert said in done.json()["message"]

    async def test_a_body_that_is_not_there_is_told(self, http: httpx.AsyncClient) -> None:
        for path in ("/topics", "/topics/t/groups/g/seek", "/topics/t/dlq/redrive"):
            done = await http.post(path)
            assert (done.status_code, "it is empty" in done.json()["message"]) == (400, True)

    async def test_letters_of_a_topic_that_is_not_there_are_not_found(
        self, http: httpx.AsyncClient
    ) -> None:
        await publish(http, "t", 1)
        assert (await http.get("/topics/t/dlq")).json()["letters"] == []
        assert (await http.get("/topics/tt/dlq")).status_code == 404
        for what in ("redrive", "drop"):
            assert (await http.post(f"/topics/tt/dlq/{what}", json={})).status_code == 404
            assert (await http.post(f"/topics/t/dlq/{what}", json={})).status_code == 202

    async def test_what_the_broker_keeps_for_itself_is_denied_and_counted(
        self, http: httpx.AsyncClient, one: Any
    ) -> None:
        url = "/topics/system.access/events"
        assert (await http.post(url, json={"payload": 1})).status_code == 403
        assert (await http.post("/topics", json={"topic": "system.access"})).status_code == 403
        args = {"topic": "system.access", "options": {}}
        assert (await one.ask("CALL", op="define", args=args))["code"] == "denied"
        assert (await http.get("/stats")).json()["counters"]["denied"] == 3

    async def test_attempts_of_a_topic_are_those_of_its_new_groups(
        self, http: httpx.AsyncClient, one: Any
    ) -> None:
        await http.post("/topics", json={"topic": "t", "maxAttempts": 2, "ackTimeoutMs": 50})
        await publish(http, "t", "bad")
        await one.subscribe("t", "g")
        tries = [(await one.hear("MESSAGE"))["attempt"] for _ in range(2)]
        assert tries == [1, 2]
        letters = await until(lambda: _letters(http, 1))
        assert letters[0]["attempts"] == 2

    async def test_a_group_of_that_name_elsewhere_changes_nothing(
        self, http: httpx.AsyncClient, one: Any
    ) -> None:
        for topic in ("other", "t"):
            await http.post("/topics", json={"topic": topic, "maxAttempts": 2})
            await one.subscribe(topic, "g")
        (group,) = (await http.get("/topics/t/groups/g")).json()["partitions"]
        assert group["policy"] == {"max_retries": 1}

    async def test_a_group_by_a_pattern_has_the_policy_of_each_topic(
        self, http: httpx.AsyncClient, one: Any
    ) -> None:
        await http.post("/topics", json={"topic": "jobs.a", "maxAttempts": 2, "partitions": 2})
        await one.subscribe("jobs.*", "g")
        await http.post("/topics", json={"topic": "jobs.b", "ackTimeoutMs": 50})
        for topic, policy in (("jobs.a", {"max_retries": 1}), ("jobs.b", {"ack_timeout_s": 0.05})):

            async def policies(topic: str = topic) -> Any:
                found = (await http.get(f"/topics/{topic}/groups/g")).json().get("partitions", [])
                return [one["policy"] for one in found]

            assert all(one == policy for one in await until(policies)), topic

    async def test_many_topics_are_looked_for_once(
        self, http: httpx.AsyncClient, broker: Broker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for n in range(50):
            await broker.hub.bus.define(f"t.{n}")
        looks = counted(monkeypatch, broker.hub.bus.store, "topics")
        assert len((await http.get("/topics")).json()["topics"]) == 50
        assert len(looks) < 5
        async with broker.hub.bus.subscribe("t.*", group="g"):
            assert len(looks) < 10

    async def test_what_cannot_be_defined_changes_no_policy(self, http: httpx.AsyncClient) -> None:
        await http.post("/topics", json={"topic": "t", "partitions": 2, "maxAttempts": 2})
        done = await http.post("/topics", json={"topic": "t", "partitions": 1, "maxAttempts": 9})
        assert done.status_code == 409
        assert (await http.get("/topics/t")).json()["maxAttempts"] == 2

    async def test_a_group_shows_its_members(self, http: httpx.AsyncClient, broker: Broker) -> None:
        async with (
            trunkline.connect(broker.url) as bus,
            bus.subscribe("orders", group="billing"),
        ):
            found = (await http.get("/topics/orders/groups/billing")).json()
            (row,) = found["partitions"]
            assert row["members"] == 1
            (member,) = row["subscribed"]
            assert member["pid"] > 0
            assert member["client"]
            assert member["since"].endswith("Z")
            assert member["last_delivery"] is None
            listed = (await http.get("/groups")).json()["groups"]
            assert [one["members"] for one in listed] == [1]
            metrics = (await http.get("/metrics")).text
            assert 'trunkline_group_members{group="billing"' in metrics

    async def test_offsets_show_bounds_and_groups(self, http: httpx.AsyncClient, one: Any) -> None:
        for n in range(3):
            await publish(http, "t", n)
        await one.subscribe("t", "g")
        for _ in range(3):
            await one.hear("MESSAGE")
        await one.ask("ACK", topic="t", partition=0, group="g", offset=2)
        async with asyncio.timeout(10):
            while True:
                (partition,) = (await http.get("/topics/t/offsets")).json()["partitions"]
                if partition["groups"][0]["lastCommitted"] == 2:
                    break
        assert (partition["first"], partition["next"]) == (1, 4)
        assert (partition["groups"][0]["lag"], partition["groups"][0]["inflight"]) == (1, 1)


class TestEvents:
    async def test_events_go_in_and_come_out(self, http: httpx.AsyncClient) -> None:
        for n in range(5):
            receipt = await publish(http, "t", {"n": n}, key="k", headers={"type": "T", "a": "b"})
            assert (receipt["offset"], receipt["duplicate"]) == (n + 1, False)
        page = (await http.get("/topics/t/events?from=2&limit=2")).json()
        assert [event["payload"]["n"] for event in page["events"]] == [1, 2]
        assert page["events"][0]["headers"] == {"type": "T", "a": "b"}
        assert page["next"] == 4
        found = (await http.get("/topics/t/events", params={"where": "payload.n > 2"})).json()
        assert [event["offset"] for event in found["events"]] == [4, 5]
        assert (await http.get("/topics/t/events?from=latest")).json()["events"] == []
        since = await http.get("/topics/t/events?from=2020-01-01T00:00:00Z")
        assert len(since.json()["events"]) == 5

    async def test_a_repeat_is_told_with_the_first_ones_place(
        self, http: httpx.AsyncClient
    ) -> None:
        made = await http.post("/topics", json={"topic": "t", "options": {"dedup_window_s": 60}})
        assert made.status_code == 201, made.text
        first = await publish(http, "t", 1, headers={"idem_key": "a"})
        again = await publish(http, "t", 2, headers={"idem_key": "a"})
        assert again == first | {"duplicate": True}

    async def test_a_place_in_a_partition_that_is_not_there_is_refused(
        self, http: httpx.AsyncClient
    ) -> None:
        await http.post("/topics", json={"topic": "t", "partitions": 2})
        for query in ("from=99:1", "from=0:1,2:1", "from=99:1&partition=1"):
            refused = await http.get(f"/topics/t/events?{query}")
            assert (refused.status_code, refused.json()["code"]) == (404, "out_of_range"), query
        assert (await http.get("/topics/t/events?from=0:1,1:1&partition=1")).status_code == 200

    async def test_all_partitions_are_read_by_time_page_by_page(
        self, http: httpx.AsyncClient
    ) -> None:
        await http.post("/topics", json={"topic": "t", "partitions": 3})
        places = {(await publish(http, "t", n, key=f"k{n}"))["partition"] for n in range(30)}
        assert places == {0, 1, 2}
        seen: list[int] = []
        start = "earliest"
        for _ in range(5):
            page = (await http.get("/topics/t/events", params={"from": start, "limit": 7})).json()
            seen += [event["payload"] for event in page["events"]]
            start = page["next"]
        assert seen == list(range(30))
        assert page["next"].count(":") == 3
        assert "partition" not in page
        await publish(http, "t", 30)
        more = (await http.get("/topics/t/events", params={"from": start})).json()
        assert [event["payload"] for event in more["events"]] == [30]
        found = (await http.get("/topics/t/events", params={"where": "payload > 27"})).json()
        assert [event["payload"] for event in found["events"]] == [28, 29, 30]
        one = (await http.get("/topics/t/events?partition=1")).json()
        assert {event["partition"] for event in one["events"]} == {one["partition"]} == {1}
        assert one["next"] == len(one["events"]) + 1

    async def test_a_partition_that_was_added_is_in_the_next_page(
        self, http: httpx.AsyncClient
    ) -> None:
        await http.post("/topics", json={"topic": "t", "partitions": 2})
        start = (await http.get("/topics/t/events")).json()["next"]
        await http.post("/topics", json={"topic": "t", "partitions": 8})
        for n in range(20):
            await publish(http, "t", n, key=f"k{n}")
        page = (await http.get("/topics/t/events", params={"from": start})).json()
        assert [event["payload"] for event in page["events"]] == list(range(20))

    async def test_an_event_has_a_payload_even_if_it_is_null(self, http: httpx.AsyncClient) -> None:
        for body in ({}, {"key": "k"}):
            done = await http.post("/topics/t/events", json=body)
            assert (done.status_code, done.json()["code"]) == (400, "invalid_option")
            assert "payload is missing" in done.json()["message"]
        await publish(http, "t", None)
        page = (await http.get("/openapi.json")).json()
        assert page["components"]["schemas"]["NewEvent"]["required"] == ["payload"]

    @pytest.mark.parametrize(
        ("path", "hint"),
        [
            ("/topics/t/events?limt=5", "known here: from, where, partition, limit"),
            ("/topics?limt=5", "known here: limit, after"),
            ("/healthz?x", "this takes none"),
        ],
    )
    async def test_an_unknown_parameter_is_named(
        self, http: httpx.AsyncClient, path: str, hint: str
    ) -> None:
        await publish(http, "t", 1)
        done = await http.get(path)
        name = path.partition("?")[2].partition("=")[0]
        assert (done.status_code, done.json()["hint"]) == (400, hint)
        assert repr(name) in done.json()["message"]

    @pytest.mark.parametrize(
        "query", ["limit=0", "limit=x", "from=x", "where=>>", "limit=1&limit=2", "from=0:x,1:2"]
    )
    async def test_a_bad_question_is_refused(self, http: httpx.AsyncClient, query: str) -> None:
        await publish(http, "t", 1)
        assert (await http.get(f"/topics/t/events?{query}")).status_code == 400

    async def test_a_structured_cloudevent_is_an_event(self, http: httpx.AsyncClient) -> None:
        sent = {
            **CLOUDEVENT,
            "subject": "s",
            "partitionkey": "c42",
            "traceparent": "00-aa-bb-01",
            "time": "2026-01-02T03:04:05.000006+00:00",
            "expirytime": "2026-01-02T03:05:05.000006+00:00",
            "dataschema": "https://example.com/order?v=2#now",
            "region": "eu",
        }
        kind = {"content-type": "application/cloudevents+json"}
        done = await http.post("/topics/t/events", content=json.dumps(sent), headers=kind)
        assert (done.status_code, done.json()["id"]) == (201, "e1")
        accept = {"accept": "application/cloudevents-batch+json"}
        answer = await http.get("/topics/t/events", headers=accept)
        assert answer.headers["content-type"] == "application/cloudevents-batch+json"
        (found,) = answer.json()
        assert found == {
            **sent,
            "topic": "t",
            "partition": 0,
            "offset": "1",
            "datacontenttype": "application/json",
        }

    async def test_extensions_come_out_as_the_type_they_came_in_as(
        self, http: httpx.AsyncClient
    ) -> None:
        sent = {"retries": 5, "final": True, "room": "5", "open": "true", "low": -(2**31)}
        body = json.dumps({**CLOUDEVENT, **sent, "wide": 2**31})
        kind = {"content-type": "application/cloudevents+json"}
        assert (await http.post("/topics/t/events", content=body, headers=kind)).status_code == 201
        found = (await http.get("/topics/t/events/0/1?form=cloudevent")).json()
        assert {name: found[name] for name in sent} == sent
        assert found["final"] is True
        assert (found["wide"], "busheaders" in found) == ("2147483648", False)
        back = await http.get("/topics/t/events/0/1?form=binary")
        assert (back.headers["ce-retries"], back.headers["ce-final"]) == ("5", "true")
        again = await http.post(
            "/topics/u/events", content=json.dumps({**found, "topic": "u"}), headers=kind
        )
        assert again.status_code == 201
        same = (await http.get("/topics/u/events/0/1?form=cloudevent")).json()
        assert {name: same[name] for name in sent} == sent
        forged = {
            "typed-attributes": "a,b,datacontenttype",
            "datacontenttype": "5",
            "a": "[",
            "b": "9e9",
        }
        await publish(http, "v", 1, headers=forged)
        found = (await http.get("/topics/v/events/0/1?form=cloudevent")).json()
        assert (found["a"], found["b"], found["datacontenttype"]) == ("[", "9e9", "5")

    @pytest.mark.parametrize(
        ("actor", "source"),
        [
            ("my agent ü, 100%", "my%20agent%20%C3%BC,%20100%25"),
            ("urn:a:b?c=%20#d", "urn:a:b?c=%20#d"),
            ("", "/topics/t"),
        ],
    )
    async def test_what_comes_out_is_a_cloudevent_whatever_went_in(
        self, http: httpx.AsyncClient, actor: str, source: str
    ) -> None:
        await publish(http, "t", 1, key="", headers={"agent_id": actor, "subject": "", "type": ""})
        found = (await http.get("/topics/t/events/0/1?form=cloudevent")).json()
        assert (found["source"], found["type"]) == (source, "t")
        assert not {"subject", "partitionkey"} & found.keys()  # which must not be empty

    async def test_what_expires_needs_no_time(self, http: httpx.AsyncClient) -> None:
        sent = {**CLOUDEVENT, "expirytime": "2126-01-02T03:05:05+00:00"}
        kind = {"content-type": "application/cloudevents+json"}
        done = await http.post("/topics/t/events", content=json.dumps(sent), headers=kind)
        assert done.status_code == 201, done.text
        found = (await http.get("/topics/t/events/0/1?form=cloudevent")).json()
        assert found["expirytime"] == sent["expirytime"]

    async def test_a_binary_cloudevent_is_an_event(self, http: httpx.AsyncClient) -> None:
        ce = {"ce-specversion": "1.0", "ce-id": "e1", "ce-source": "/s", "ce-type": "t"}
        cases = (("application/json", b'{"n":1}'), ("text/plain", b"hi"), ("image/png", b"\x89P"))
        for offset, (kind, body) in enumerate(cases, 1):
            headers = {**ce, "content-type": kind, "ce-note": "a%20b"}
            done = await http.post("/topics/t/events", content=body, headers=headers)
            assert done.status_code == 201, done.text
            back = await http.get(f"/topics/t/events/0/{offset}?form=binary")
            assert back.content == body
            assert back.headers["content-type"].startswith(kind)
            assert (back.headers["ce-id"], back.headers["ce-note"]) == ("e1", "a%20b")

    @pytest.mark.parametrize(
        ("kind", "body", "data"),
        [
            ("text/plain; charset=utf-8", "ü".encode(), {"data": "ü"}),
            ("text/plain; charset=iso-8859-1", b"\xfc", {"data_base64": "/A=="}),
            ("text/plain", b"\xfc", {"data_base64": "/A=="}),
            ("application/json; charset=utf-8", b'"a"', {"data": "a"}),
            ('multipart/mixed; boundary="a b"', b"--a b", {"data_base64": "LS1hIGI="}),
            ("text/plain", b"", {}),
        ],
    )
    async def test_a_content_type_is_kept_whole(
        self, http: httpx.AsyncClient, kind: str, body: bytes, data: Any
    ) -> None:
        ce = {"ce-specversion": "1.0", "ce-id": "e1", "ce-source": "/s", "ce-type": "t"}
        headers = {**ce, "content-type": kind}
        done = await http.post("/topics/t/events", content=body, headers=headers)
        assert done.status_code == 201, done.text
        found = (await http.get("/topics/t/events/0/1?form=cloudevent")).json()
        assert found["datacontenttype"] == kind
        assert {name: found[name] for name in found if name.startswith("data")} == {
            **data,
            "datacontenttype": kind,
        }
        back = await http.get("/topics/t/events/0/1?form=binary")
        assert (back.headers["content-type"], back.content) == (kind, body)

    @pytest.mark.parametrize(
        ("value", "subject"),
        [
            (b"a%20%C3%BC%e2%82%ac", "a ü€"),
            (b'"a \\"b\\" %25"', 'a "b" %'),
            ("ü€".encode(), "ü€"),
            (b'"', '"'),
            (b"%C0%A0", None),
            (b"\xfc", None),
        ],
    )
    async def test_a_header_is_read_as_the_binding_says(
        self, http: httpx.AsyncClient, value: bytes, subject: str | None
    ) -> None:
        ce = {b"ce-specversion": b"1.0", b"ce-id": b"e1", b"ce-source": b"/s", b"ce-type": b"t"}
        done = await http.post("/topics/t/events", headers={**ce, b"ce-subject": value})
        assert done.status_code == (400 if subject is None else 201), done.text
        if subject is None:
            assert "ce-subject" in done.json()["message"]
            return
        found = (await http.get("/topics/t/events/0/1?form=cloudevent")).json()
        assert found["subject"] == subject

    async def test_an_event_without_data_has_no_content_type(self, http: httpx.AsyncClient) -> None:
        ce = {"ce-specversion": "1.0", "ce-id": "e1", "ce-source": "/s", "ce-type": "t"}
        done = await http.post("/topics/t/events", content=b"", headers=ce)
        assert done.status_code == 201, done.text
        back = await http.get("/topics/t/events/0/1?form=binary")
        assert ("content-type" in back.headers, back.content) == (False, b"")

    async def test_bytes_of_no_known_type_stay_bytes(self, http: httpx.AsyncClient) -> None:
        kind = {"content-type": "application/cloudevents+json"}
        for offset, extra in enumerate(({}, {"datacontenttype": "application/json"}), 1):
            sent = {name: value for name, value in CLOUDEVENT.items() if name != "data"}
            sent |= {"data_base64": "AAEC", **extra}
            await http.post("/topics/t/events", content=json.dumps(sent), headers=kind)
            back = await http.get(
                f"/topics/t/events/0/{offset}", headers={"accept": kind["content-type"]}
            )
            assert back.headers["content-type"] == "application/cloudevents+json"
            assert back.json().items() >= sent.items()
            assert back.json().get("datacontenttype") == extra.get("datacontenttype")
        back = await http.get("/topics/t/events/0/1?form=binary")
        assert back.headers["content-type"] == "application/octet-stream"
        assert back.content == b"\0\1\2"

    async def test_a_batch_of_cloudevents_is_kept_all_or_none(
        self, http: httpx.AsyncClient
    ) -> None:
        kind = {"content-type": "application/cloudevents-batch+json"}
        batch = [{**CLOUDEVENT, "id": f"e{n}"} for n in range(3)]
        done = await http.post("/topics/t/events", content=json.dumps(batch), headers=kind)
        assert [receipt["offset"] for receipt in done.json()["receipts"]] == [1, 2, 3]
        batch.append({"specversion": "1.0"})
        done = await http.post("/topics/t/events", content=json.dumps(batch), headers=kind)
        assert done.status_code == 400
        assert len((await http.get("/topics/t/events")).json()["events"]) == 3
        done = await http.post("/topics/t/events", content=b"[]", headers=kind)
        assert (done.status_code, done.json()) == (201, {"receipts": []})

    async def test_an_attribute_that_is_null_is_none(self, http: httpx.AsyncClient) -> None:
        kind = {"content-type": "application/cloudevents+json"}
        unset = dict.fromkeys(("subject", "time", "dataschema", "data_base64", "ext"))
        body = json.dumps({**CLOUDEVENT, **unset})
        done = await http.post("/topics/t/events", content=body, headers=kind)
        assert done.status_code == 201, done.text
        (event,) = (await http.get("/topics/t/events")).json()["events"]
        assert (event["headers"].keys(), event["payload"]) == ({"type", "agent_id"}, {"n": 1})

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            ("application/xml", "application/xml"),
            ("text/plain; charset=utf-8", "text/plain; charset=utf-8"),
            ("text/x\r\nset-cookie: a=b", "text/x%0D%0Aset-cookie: a=b"),
            ("text/ü", "text/%C3%BC"),
        ],
    )
    async def test_text_comes_out_as_text_with_a_type_that_is_one_header(
        self, http: httpx.AsyncClient, content: str, said: str
    ) -> None:
        kind = {"content-type": "application/cloudevents+json"}
        body = json.dumps({**CLOUDEVENT, "datacontenttype": content, "data": "<a/>"})
        await http.post("/topics/t/events", content=body, headers=kind)
        found = await http.get("/topics/t/events/0/1?form=binary")
        assert (found.status_code, found.text) == (200, "<a/>")
        assert found.headers["content-type"] == said

    @pytest.mark.parametrize("settings", [{"pending_bytes": 10_000}])
    async def test_a_page_has_a_size(self, http: httpx.AsyncClient) -> None:
        for _ in range(5):
            await publish(http, "t", "x" * 4000)
        page = (await http.get("/topics/t/events")).json()
        assert (len(page["events"]), page["next"]) == (3, 4)
        page = (await http.get("/topics/t/events?from=4")).json()
        assert (len(page["events"]), page["next"]) == (2, 6)

    @pytest.mark.parametrize(
        "broken",
        [
            {"specversion": "0.3"},
            {"id": ""},
            {"source": None},
            {"time": "yesterday"},
            {"Bad-Name": "x"},
            {"ext": [1]},
            {"topic": "other"},
            {"data_base64": "??"},
        ],
        ids=str,
    )
    async def test_a_broken_cloudevent_is_refused(
        self, http: httpx.AsyncClient, broken: Any
    ) -> None:
        kind = {"content-type": "application/cloudevents+json"}
        body = json.dumps({**CLOUDEVENT, **broken})
        done = await http.post("/topics/t/events", content=body, headers=kind)
        assert (done.status_code, done.json()["code"]) == (400, "invalid_event")

    async def test_another_media_type_is_refused(self, http: httpx.AsyncClient) -> None:
        done = await http.post(
            "/topics/t/events", content=b"<a/>", headers={"content-type": "application/xml"}
        )
        assert done.status_code == 415

    @pytest.mark.parametrize("digits", [20, 5000])
    async def test_a_record_at_a_number_that_none_has_is_not_found(
        self, http: httpx.AsyncClient, digits: int
    ) -> None:
        await publish(http, "t", 1)
        for place in (f"0/{'9' * digits}", f"{'9' * digits}/1"):
            found = await http.get(f"/topics/t/events/{place}")
            assert (found.status_code, found.json()["code"]) == (404, "not_found")

    @pytest.mark.parametrize("settings", [{"frame_bytes": 2000}])
    async def test_a_body_that_is_too_large_is_refused(self, http: httpx.AsyncClient) -> None:
        done = await http.post("/topics/t/events", json={"payload": "x" * 3000})
        assert (done.status_code, done.json()["code"]) == (413, "too_large")

    async def test_the_tail_goes_on_where_it_was(self, http: httpx.AsyncClient) -> None:
        for n in range(3):
            await publish(http, "t", n)
        seen: list[tuple[str, Any]] = []

        async def follow(count: int, **headers: str) -> None:
            url = f"/topics/t/tail?from=earliest&limit={count}"
            async with http.stream("GET", url, headers=headers) as answer:
                assert answer.headers["content-type"].startswith("text/event-stream")
                name = ""
                async for line in answer.aiter_lines():
                    if line.startswith("id: "):
                        name = line[4:]
                    elif line.startswith("data: "):
                        seen.append((name, json.loads(line[6:])["payload"]))

        await follow(2)
        following = asyncio.ensure_future(follow(2, **{"last-event-id": "2"}))
        await asyncio.sleep(0.1)
        await publish(http, "t", 3)
        await asyncio.wait_for(following, 10)
        assert seen == [("1", 0), ("2", 1), ("3", 2), ("4", 3)]

    @pytest.mark.parametrize("settings", [{"rights_s": 0.05}])
    async def test_a_tail_says_that_it_waits_and_ends_no_event_by_it(
        self, http: httpx.AsyncClient, broker: Broker
    ) -> None:
        await publish(http, "t", 1)
        lines: list[str] = []

        async def ring() -> None:
            while True:
                broker.hub.bus.store.bell.ring(None)  # as a folder does, to be on the safe side
                await asyncio.sleep(0.02)

        ringing = asyncio.create_task(ring())
        async with asyncio.timeout(5), http.stream("GET", "/topics/t/tail?from=earliest") as answer:
            async for line in answer.aiter_lines():
                lines.append(line)
                if lines.count(": still here") == 2:
                    break
        ringing.cancel()
        assert [line[:3] for line in lines] == [": f", "id:", "dat", "", ": s", ": s"]

    async def test_the_tail_follows_every_partition_and_goes_on_in_each(
        self, http: httpx.AsyncClient
    ) -> None:
        await http.post("/topics", json={"topic": "t", "partitions": 3})
        for n in range(30):
            await publish(http, "t", n, key=f"k{n}")
        seen: list[int] = []
        mark: dict[str, str] = {}
        for _ in range(6):
            answer = await http.get("/topics/t/tail?from=earliest&limit=5", headers=mark)
            lines = answer.text.splitlines()
            seen += [json.loads(line[6:])["payload"] for line in lines if line[:6] == "data: "]
            mark = {"last-event-id": [line[4:] for line in lines if line[:4] == "id: "][-1]}
        assert sorted(seen) == list(range(30))
        one = await http.get("/topics/t/tail?from=earliest&limit=1&partition=2")
        assert "id: 1\n" in one.text

    async def test_the_tail_follows_partitions_that_are_added(
        self, http: httpx.AsyncClient
    ) -> None:
        await publish(http, "t", 0)

        async def payloads(mark: str = "") -> list[int]:
            headers = {"last-event-id": mark} if mark else {}
            address = "/topics/t/tail?from=earliest&limit=9"
            async with asyncio.timeout(10):
                lines = (await http.get(address, headers=headers)).text.splitlines()
            return [json.loads(line[6:])["payload"] for line in lines if line[:6] == "data: "]

        following = asyncio.create_task(payloads())
        await asyncio.sleep(0.1)
        await http.post("/topics", json={"topic": "t", "partitions": 4})
        for n in range(1, 10):
            await publish(http, "t", n, key=f"k{n}")
        assert set(await following) < set(range(10))
        assert sorted(await payloads("1")) == list(range(1, 10))

    async def test_a_tail_that_wants_nothing_lets_others_have_their_turn(
        self, http: httpx.AsyncClient, broker: Broker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        await broker.hub.bus.publish_many("t", [*([0] * 2000), 1])
        store = broker.hub.bus.store
        read, reads, worst = store.read, 0, 0

        async def counted(*args: Any) -> Any:
            nonlocal reads, worst
            reads += 1
            worst = max(worst, reads)
            return await read(*args)

        async def others() -> None:
            nonlocal reads
            while True:
                reads = 0
                await asyncio.sleep(0)

        monkeypatch.setattr(store, "read", counted)
        turns = asyncio.create_task(others())
        found = await http.get("/topics/t/tail?from=earliest&limit=1&where=payload = 1")
        turns.cancel()
        assert '"payload":1' in found.text
        assert worst < 5

    @pytest.mark.parametrize("settings", [{"stall_s": 0.2}])
    async def test_a_client_that_reads_nothing_of_an_answer_is_let_go(
        self, http: httpx.AsyncClient, broker: Broker
    ) -> None:
        for _ in range(20):
            await publish(http, "t", "x" * 500_000)
        _, writer = await asyncio.open_connection("127.0.0.1", broker.port, limit=1)
        ask = f"GET /topics/t/tail?from=earliest HTTP/1.1\r\nHost: 127.0.0.1:{broker.port}\r\n\r\n"
        writer.write(ask.encode())
        await until(lambda: broker.hub.counts.evicted == 1)
        writer.close()

    async def test_a_tail_follows_a_topic_that_is_made_anew(self, http: httpx.AsyncClient) -> None:
        for n in range(3):
            await publish(http, "t", n)
        async with http.stream("GET", "/topics/t/tail?from=earliest&limit=4") as answer:
            lines = answer.aiter_lines()
            found = [line for line in [await anext(lines) for _ in range(11)] if "data:" in line]
            assert len(found) == 3
            await http.delete("/topics/t")
            await publish(http, "t", "anew")
            async with asyncio.timeout(20):
                while "data:" not in (line := await anext(lines)):
                    pass
            assert "anew" in line

    async def test_a_client_that_asks_for_the_head_of_a_tail_alone_gets_no_more(
        self, http: httpx.AsyncClient, broker: Broker
    ) -> None:
        await publish(http, "t", 1)
        reader, writer = await asyncio.open_connection("127.0.0.1", broker.port)
        host = f"Host: 127.0.0.1:{broker.port}\r\n\r\n"
        asked = f"HEAD /topics/t/tail HTTP/1.1\r\n{host}GET /healthz HTTP/1.1\r\n{host}"
        writer.write(asked.encode())
        async with asyncio.timeout(10):
            said = await reader.readuntil(b'{"ok":true}')
        assert said.count(b"HTTP/1.1 200 ") == 2
        assert b"text/event-stream" in said
        writer.close()

    async def test_the_head_of_a_request_is_only_so_long(self, broker: Broker) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", broker.port)
        host = f"Host: 127.0.0.1:{broker.port}\r\n"
        asked = f"GET /healthz HTTP/1.1\r\n{host}\r\n".encode()
        writer.write(asked * 2000 + asked[:-2])  # many at once, the last one not yet whole
        for _ in range(2000):
            assert b" 200 " in await reader.readline()
            await reader.readuntil(b'{"ok":true}')
        writer.write(b"X: ")
        connections = broker._server.server_state.connections  # type: ignore[union-attr]
        size = 0
        while connections:
            writer.write(b"x" * 1000)
            size += 1000
            await asyncio.sleep(0.001)
        assert 60_000 < size < 200_000
        writer.close()

    @pytest.mark.parametrize("who", ["client", "broker"])
    async def test_a_client_that_leaves_in_the_middle_of_a_request_is_no_error(
        self, who: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        options = BrokerOptions(url="memory:", port=0, metrics_s=0, drain_s=10)
        async with Broker(options) as broker:
            reader, writer = await asyncio.open_connection("127.0.0.1", broker.port)
            host = f"Host: 127.0.0.1:{broker.port}\r\nExpect: 100-continue\r\n"
            kind = "Content-Type: application/json\r\nContent-Length: 100\r\n\r\n"
            writer.write(f'POST /topics/t/events HTTP/1.1\r\n{host}{kind}{{"pay'.encode())
            assert b"100 Continue" in await reader.readline()  # the body is waited for
            if who == "client":
                writer.close()
                connections = broker._server.server_state.connections  # type: ignore[union-attr]
                await until(lambda: not connections)
            left = monotonic()
        assert monotonic() - left < options.drain_s
        writer.close()
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]

    @pytest.mark.parametrize("path", ["events?partition=1", "tail?partition=1&limit=1"])
    async def test_a_partition_that_is_not_there_is_told(
        self, http: httpx.AsyncClient, path: str
    ) -> None:
        await publish(http, "t", 1)
        done = await http.get(f"/topics/t/{path}")
        assert (done.status_code, done.json()["code"]) == (404, "out_of_range")

    async def test_a_mark_of_a_partition_that_is_not_there_is_told(
        self, http: httpx.AsyncClient
    ) -> None:
        await publish(http, "t", 1)
        for mark in ("99:1", "0:0,1:1"):
            marks = {"last-event-id": mark}
            done = await http.get("/topics/t/tail?limit=1&from=earliest", headers=marks)
            assert (done.status_code, done.json()["code"]) == (404, "out_of_range")

    async def test_what_is_wrong_is_told_by_its_name(self, http: httpx.AsyncClient) -> None:
        await publish(http, "t", 1)
        url = "/topics/t/events"

        async def refused(status: int, kind: str, body: str) -> str:
            done = await http.post(url, content=body, headers={"content-type": kind})
            assert done.status_code == status, done.text
            return str(done.json())

        good = {"specversion": "1.0", "id": "1", "source": "s", "type": "t"}
        batch = json.dumps([good, {**good, "specversion": "0.3"}])
        said = await refused(400, "application/cloudevents-batch+json", batch)
        assert "event 1 of the batch: specversion must be '1.0'" in said
        assert "payload" in await refused(400, "application/json", '{"a":1}')
        said = await refused(415, "text/csv", "1,2")
        assert "application/json, application/cloudevents+json or" in said
        for mark in ("banana", "0:1,0:2"):
            marks = {"last-event-id": mark}
            done = await http.get("/topics/t/tail?limit=1&from=earliest", headers=marks)
            assert (done.status_code, "Last-Event-ID" in done.text) == (400, True)


class TestGroupsAndLetters:
    async def test_a_group_is_moved_paused_and_resumed(
        self, http: httpx.AsyncClient, one: Any
    ) -> None:
        for n in range(3):
            await publish(http, "t", n)
        await one.subscribe("t", "g")
        for _ in range(3):
            await one.ack(await one.hear("MESSAGE"))
        assert (await http.post("/topics/t/groups/g/pause")).json()["partitions"][0]["paused"]
        await publish(http, "t", 3)
        assert await one.silent()
        await http.post("/topics/t/groups/g/resume")
        await one.ack(await one.hear("MESSAGE"))
        moved = await http.post("/topics/t/groups/g/seek", json={"to": 2}, headers=WAIT)
        assert moved.json()["partitions"][0]["lastCommitted"] == 1
        assert [(await one.hear("MESSAGE"))["offset"] for _ in range(3)] == [2, 3, 4]
        assert (await http.get("/groups")).json()["groups"][0]["group"] == "g"
        bad = await http.post("/topics/t/groups/g/seek", json={"to": "x"})
        assert bad.status_code == 400
        assert bad.json()["message"] == "to is an offset, earliest, latest or a time"
        assert (await http.post("/topics/t/groups/no/pause")).status_code == 404

    async def test_a_groups_policy_is_edited(self, http: httpx.AsyncClient, one: Any) -> None:
        await publish(http, "t", 1)
        await one.subscribe("t", "g")
        await one.ack(await one.hear("MESSAGE"))
        done = await http.patch("/topics/t/groups/g", json={"policy": {"max_retries": 9}})
        assert done.json()["partitions"][0]["policy"]["max_retries"] == 9
        bad = await http.patch("/topics/t/groups/g", json={"policy": {"max_retrys": 9}})
        assert (bad.status_code, "max_retrys" in bad.json()["message"]) == (400, True)
        assert (await http.patch("/topics/t/groups/g", json={"policy": {}})).status_code == 400
        none = await http.patch("/topics/t/groups/no", json={"policy": {"max_retries": 9}})
        assert none.status_code == 404

    async def test_dead_letters_are_listed_redriven_and_dropped(
        self, http: httpx.AsyncClient, one: Any
    ) -> None:
        for n in range(2):
            await publish(http, "t", n)
        await one.subscribe("t", "g")
        for _ in range(2):
            await one.nack(await one.hear("MESSAGE"), dead=True, reason="no")
        found = await until(lambda: _letters(http, 2))
        assert [letter["error"] for letter in found] == ["no", "no"]
        first = found[0]["offset"]
        page = (await http.get("/topics/t/dlq?limit=1")).json()
        assert page == {"letters": found[:1], "next": first + 1}
        page = (await http.get(f"/topics/t/dlq?from={page['next']}")).json()
        assert page["letters"] == found[1:]
        dry = await http.post("/topics/t/dlq/redrive", json={"dryRun": True}, headers=WAIT)
        assert len(dry.json()["redriven"]) == 2
        for what in ("redrive", "drop"):
            wrong = await http.post(
                f"/topics/t/dlq/{what}", json={"offsets": [98, first, 99]}, headers=WAIT
            )
            assert (wrong.status_code, wrong.json()["message"]) == (
                404,
                "no open letter 98 99 of t",
            )
        assert await _letters(http, 2), "all of them, or none"
        done = await http.post("/topics/t/dlq/redrive", json={"offsets": [first]}, headers=WAIT)
        assert [one["offset"] for one in done.json()["redriven"]] == [first]
        assert (await one.hear("MESSAGE"))["offset"] == found[0]["origin"]
        dropped = await http.post("/topics/t/dlq/drop", json={"group": "g"}, headers=WAIT)
        assert len(dropped.json()["dropped"]) == 1
        assert (await http.get("/topics/t/dlq")).json()["letters"] == []

    async def test_the_group_that_keeps_the_books_is_shown_when_asked_for(
        self, http: httpx.AsyncClient, one: Any
    ) -> None:
        await publish(http, "t", 1)
        await one.subscribe("t", "g")
        await one.nack(await one.hear("MESSAGE"), dead=True)
        await until(lambda: _letters(http, 1))

        async def names(query: str) -> list[str]:
            found = (await http.get(f"/groups{query}")).json()["groups"]
            return [group["group"] for group in found]

        assert await names("") == ["g"]
        assert sorted(await names("?all=true")) == ["desk", "g"]

    async def test_a_dead_letter_is_not_made_by_hand(
        self, http: httpx.AsyncClient, one: Any
    ) -> None:
        done = await http.post("/topics/t.DLQ/events", json={"payload": 1})
        assert (done.status_code, done.json()["code"]) == (400, "invalid_event")
        said = await one.ask("PUBLISH", topic="t.DLQ", payload=1)
        assert (said["type"], said["code"]) == ("ERROR", "invalid_event")
        assert (await http.get("/topics/t.DLQ")).status_code == 404


class TestSchemas:
    async def test_a_payload_that_does_not_fit_is_refused_with_its_path(
        self, http: httpx.AsyncClient, one: Any
    ) -> None:
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        done = await http.put("/schemas/t", json={"schema": schema})
        assert (done.status_code, done.json()["version"]) == (200, 1)
        bad = await http.post("/topics/t/events", json={"payload": {"n": "x"}})
        assert (bad.status_code, bad.json()["code"], bad.json()["path"]) == (400, "schema", "/n")
        assert bad.json()["message"] == (
            "the payload does not fit the schema of t: it must be integer"
        )
        said = await one.ask("PUBLISH", topic="t", payload={"n": "x"})
        assert (said["type"], said["code"], said["path"]) == ("ERROR", "schema", "/n")
        await publish(http, "t", {"n": 1})
        worse = {**schema, "required": ["n", "m"]}
        refused = await http.put("/schemas/t", json={"schema": worse})
        assert (refused.status_code, refused.json()["code"]) == (409, "conflict")
        forced = await http.put("/schemas/t", json={"schema": worse, "compatibility": "none"})
        assert forced.json()["version"] == 2
        assert len((await http.get("/schemas/t/versions")).json()["versions"]) == 2
        assert (await http.delete("/schemas/t")).status_code == 204
        assert (await http.get("/schemas/t")).status_code == 404
        await publish(http, "t", "anything")

    async def test_what_is_no_schema_is_refused(self, http: httpx.AsyncClient) -> None:
        for bad in ({"type": "nonsense"}, {"$ref": "http://example.com/x"}):
            done = await http.put("/schemas/t", json={"schema": bad})
            assert done.status_code == 400


class TestTheBroker:
    async def test_health_stats_and_metrics(self, http: httpx.AsyncClient, one: Any) -> None:
        await publish(http, "t", 1)
        assert (await http.get("/healthz")).json() == {"ok": True}
        assert (await http.get("/readyz")).json() == {"ok": True}
        stats = (await http.get("/stats")).json()
        assert (stats["counters"]["publishes"], stats["gauges"]["connections"]) == (1, 1)
        answer = await http.get("/metrics")
        assert "trunkline_publishes_total 1.0" in answer.text
        assert 'trunkline_topic_published_total{topic="t"} 1.0' in answer.text
        assert "events_storage_full 0.0" in answer.text

    async def test_the_pages_describe_what_is_there(
        self, http: httpx.AsyncClient, broker: Broker
    ) -> None:
        page = (await http.get("/openapi.json")).json()
        assert page["openapi"] == "3.1.0"
        assert (page["security"], page["servers"]) == ([], [{"url": "/"}])
        kinds = page["paths"]["/topics/{topic}/events"]["post"]["requestBody"]["content"]
        assert kinds["application/json"]["schema"] == {"$ref": "#/components/schemas/NewEvent"}
        assert {"/topics", "/topics/{topic}/events", "/stats"} <= page["paths"].keys()
        frames = (await http.get("/asyncapi.json")).json()
        assert frames["asyncapi"] == "3.0.0"
        host = {"host": f"127.0.0.1:{broker.port}", "protocol": "ws"}
        assert frames["servers"] == {"this": host}
        assert {"PUBLISH", "SUBSCRIBE", "MESSAGE", "ACK"} <= frames["components"]["messages"].keys()

    @pytest.mark.parametrize(
        ("schema", "payload"),
        [
            (True, {}),
            (False, {"not": {}}),
            (
                {"definitions": {"a": {}}, "properties": {"const": {"$ref": "#/definitions/a"}}},
                {"definitions": {"a": {}}, "properties": {"const": {"$ref": "@/definitions/a"}}},
            ),
            ({"items": {"$ref": "#"}}, {"items": {"$ref": "@"}}),
            (
                {"$defs": {"a": {"$anchor": "b"}}, "anyOf": [{"$ref": "#b"}]},
                {
                    "$defs": {"a": {"$anchor": "b"}},
                    "anyOf": [{"description": "#b in the topic's schema"}],
                },
            ),
            (
                {"$defs": {"a/b c": {"$id": "x:y", "$defs": {"c": {}}, "$ref": "#/$defs/c"}}},
                {
                    "$defs": {
                        "a/b c": {
                            "$id": "x:y",
                            "$defs": {"c": {}},
                            "$ref": "@/$defs/a~1b%20c/$defs/c",
                        }
                    }
                },
            ),
            (
                {
                    "$schema": "http://json-schema.org/draft-04/schema#",
                    "minimum": 1,
                    "exclusiveMinimum": True,
                    "not": {"$ref": "#/definitions/a"},
                    "definitions": {"a": {}},
                },
                {
                    "schemaFormat": "application/schema+json;version=draft-04",
                    "schema": {
                        "$schema": "http://json-schema.org/draft-04/schema#",
                        "minimum": 1,
                        "exclusiveMinimum": True,
                        "not": {"$ref": "@/schema/definitions/a"},
                        "definitions": {"a": {}},
                    },
                },
            ),
        ],
    )
    async def test_the_schema_of_a_topic_is_whole_on_the_page_of_frames(
        self, http: httpx.AsyncClient, schema: Any, payload: Any
    ) -> None:
        done = await http.put("/schemas/frames", json={"schema": schema})
        assert done.status_code == 200, done.text
        page = (await http.get("/asyncapi.json")).json()
        place = "#/channels/frames/messages/event/payload"
        found = page["channels"]["frames"]["messages"]["event"]["payload"]
        assert found == json.loads(json.dumps(payload).replace("@", place))
        for reference in re.findall(r'"\$ref": "#/([^"]*)"', json.dumps(page)):
            at = page
            for step in unquote(reference).split("/"):
                at = at[step.replace("~1", "/").replace("~0", "~")]

    async def test_an_unknown_path_or_method_is_told(self, http: httpx.AsyncClient) -> None:
        for path in ("/", "/nothing"):
            done = await http.get(path)
            assert (done.status_code, done.json()["code"]) == (404, "not_found")
            assert "/openapi.json" in done.json()["hint"]
        done = await http.patch("/topics")
        assert (done.status_code, done.json()["code"]) == (405, "bad_method")
        assert "/openapi.json" in done.json()["hint"]
        assert {"GET", "POST"} <= set(done.headers["allow"].split(", "))

    async def test_every_answer_forbids_what_a_browser_might_do(
        self, http: httpx.AsyncClient
    ) -> None:
        for path in ("/topics", "/nothing", "/healthz"):
            headers = (await http.get(path)).headers
            assert headers["x-content-type-options"] == "nosniff"
            assert "default-src 'none'" in headers["content-security-policy"]

    async def test_another_host_or_origin_is_refused(
        self, http: httpx.AsyncClient, broker: Broker
    ) -> None:
        done = await http.get("/topics", headers={"host": "evil.example"})
        assert (done.status_code, "--name" in done.json()["message"]) == (421, True)
        for origin in ("http://evil.example", "null", "http://[", "://"):
            assert (await http.get("/topics", headers={"origin": origin})).status_code == 403
        own = {"origin": broker.url.replace("ws", "http", 1)}
        assert (await http.get("/topics", headers=own)).status_code == 200

    async def test_a_page_of_an_allowed_origin_may_call_and_read_the_answer(
        self, tmp_path: Path
    ) -> None:
        page = "https://app.example"
        options = BrokerOptions(url=f"file:{tmp_path / 'bus'}", port=0, origins=(page + "/",))
        async with Broker(options) as broker:
            url = broker.url.replace("ws", "http", 1)
            async with httpx.AsyncClient(base_url=url, headers={"origin": page}) as http:
                asked = {
                    "access-control-request-method": "POST",
                    "access-control-request-headers": "authorization,ce-id,content-type",
                }
                before = await http.options("/topics/orders/events", headers=asked)
                assert before.status_code == 200
                assert before.headers["access-control-allow-origin"] == page
                assert "POST" in before.headers["access-control-allow-methods"]
                assert "ce-id" in before.headers["access-control-allow-headers"]
                for done in (await http.get("/topics"), await http.get("/topics/none")):
                    assert done.headers["access-control-allow-origin"] == page
                    assert done.headers["access-control-expose-headers"] == "*"  # ce-…, retry-after
                    assert "access-control-allow-credentials" not in done.headers
                evil = {"origin": "https://evil.example", **asked}
                refused = await http.options("/topics/orders/events", headers=evil)
                assert refused.status_code == 403
                assert "access-control-allow-origin" not in refused.headers


async def test_an_answer_on_a_kept_alive_connection_does_not_wait_for_a_delayed_ack(
    broker: Broker,
) -> None:
    accepted: list[socket.socket] = []
    server = broker._server
    assert server is not None
    async with httpx.AsyncClient(base_url=broker.url.replace("ws", "http", 1)) as client:
        await client.get("/healthz")
        accepted += [
            connection.transport.get_extra_info("socket")
            for connection in server.server_state.connections
        ]
        assert accepted
        assert all(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for one in accepted)


def test_an_embedded_broker_may_open_as_many_files_as_the_command() -> None:
    program = """
import asyncio, resource
from trunkline.broker.options import BrokerOptions
from trunkline.broker.server import Broker
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
async def main():
    async with Broker(BrokerOptions(url="memory:", port=0)):
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class TestLongWork:
    """Redrive, drop, seek, purge and compact are jobs."""

    async def letters(self, http: httpx.AsyncClient, one: Any, count: int) -> None:
        for n in range(count):
            await publish(http, "t", n)
        await one.subscribe("t", "g", max_inflight=count)
        for _ in range(count):
            await one.nack(await one.hear("MESSAGE"), dead=True, reason="no")
        await until(lambda: _letters(http, count))

    async def test_a_job_has_an_id_progress_a_rate_and_results(
        self, http: httpx.AsyncClient, one: Any
    ) -> None:
        await self.letters(http, one, 3)
        begun = await http.post("/topics/t/dlq/redrive", json={})
        assert begun.status_code == 202
        name = begun.json()["job"]["id"]
        assert begun.headers["location"] == f"/jobs/{name}"

        async def ended() -> Any:
            job = (await http.get(f"/jobs/{name}")).json()
            return job if job["state"] == "done" else None

        job = await until(ended)
        assert (job["kind"], job["topic"], job["done"], job["refused"]) == ("redrive", "t", 3, 0)
        assert job["rate"] > 0
        assert len(job["results"]) == 3
        assert [job["id"] for job in (await http.get("/jobs")).json()["jobs"]] == [name]
        assert (await http.get("/jobs/none")).status_code == 404

    async def test_a_job_with_a_rate_is_cancelled(self, http: httpx.AsyncClient, one: Any) -> None:
        await self.letters(http, one, 3)
        slow = {"rate": 0.1}
        name = (await http.post("/topics/t/dlq/redrive", json=slow)).json()["job"]["id"]
        again = await http.post("/topics/t/dlq/redrive", json=slow)
        assert (again.status_code, again.json()["code"]) == (409, "running")
        ended = (await http.delete(f"/jobs/{name}")).json()
        assert ended["state"] == "cancelled"
        assert ended["done"] <= 1
        assert (await http.get("/healthz")).status_code == 200

    async def test_a_topic_is_purged(self, http: httpx.AsyncClient, one: Any) -> None:
        for n in range(5):
            await publish(http, "t", n)
        done = await http.post("/topics/t/purge", json={"before": 4}, headers=WAIT)
        assert done.json()["partitions"] == [{"partition": 0, "first": 4, "next": 6}]
        events = (await http.get("/topics/t/events")).json()["events"]
        assert [event["offset"] for event in events] == [4, 5]
        assert (await http.post("/topics/none/purge", json={})).status_code == 404

    async def test_only_a_folder_is_compacted_on_request(self, http: httpx.AsyncClient) -> None:
        await publish(http, "t", 1)
        refused = await http.post("/topics/t/compact")
        assert (refused.status_code, refused.json()["code"]) == (409, "unsupported")


async def test_a_topic_of_a_folder_is_compacted(tmp_path: Path) -> None:
    options = BrokerOptions(url=f"file:{tmp_path / 'bus'}", port=0)
    async with (
        Broker(options) as broker,
        httpx.AsyncClient(base_url=broker.url.replace("ws", "http", 1)) as http,
    ):
        made = {"topic": "t", "options": {"segment_records": 10, "compact": True}}
        assert (await http.post("/topics", json=made)).status_code == 201
        for n in range(25):
            await publish(http, "t", n, key="k")
        done = await http.post("/topics/t/compact", headers=WAIT)
        assert done.status_code == 200
        assert done.json()["partitions"][0]["removed"] > 0
        plain = {"topic": "u"}
        await http.post("/topics", json=plain)
        assert (await http.post("/topics/u/compact")).status_code == 400


async def test_lists_are_paged(http: httpx.AsyncClient) -> None:
    for n in range(5):
        await publish(http, f"t{n}", n)
    names: list[str] = []
    after = ""
    while after is not None:
        query = f"?limit=2&after={after}" if after else "?limit=2"
        page = (await http.get(f"/topics{query}")).json()
        assert len(page["topics"]) <= 2
        names += [topic["topic"] for topic in page["topics"]]
        after = page["next"]
    assert [name for name in names if name.startswith("t")] == [f"t{n}" for n in range(5)]


async def test_a_list_is_gathered_once_for_all_callers(
    broker: Broker, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = counted(monkeypatch, broker.hub.bus.store, "groups")
    await asyncio.gather(*(http.get("/groups") for _ in range(20)))
    assert len(calls) == 1


class TestAudit:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"audit": 1.0}

    async def test_the_audit_does_not_feed_on_itself(
        self, broker: Broker, http: httpx.AsyncClient, one: Any
    ) -> None:
        await one.subscribe("system.bus.audit", "auditor")
        await publish(http, "t", 1)
        heard = await one.hear("MESSAGE")
        assert heard["envelope"]["payload"]["what"] == "publish"
        await one.ack(heard)
        assert await one.silent(0.5)
        topics = await broker.hub.bus.topics()
        assert topics["system.bus.audit"].retention_age_s is not None


class TestMetricsTopic:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"metrics_s": 0.05}

    async def test_nothing_is_written_while_nothing_happens(
        self, broker: Broker, http: httpx.AsyncClient
    ) -> None:
        async def end() -> int:
            return (await broker.hub.bus.bounds("system.metrics")).next

        await publish(http, "t", 1)
        await until(end)
        await asyncio.sleep(0.5)
        before = await end()
        await asyncio.sleep(0.5)
        assert await end() == before
        await publish(http, "t", 2)

        async def more() -> bool:
            return await end() > before

        await until(more)
