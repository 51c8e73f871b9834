"""What HTTP answers look like, and what the headers of a request say: names, times, keys, traces,
tokens, tickets, and the pages from which clients are generated.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from datetime import datetime
from typing import Any

import httpx
import pytest
import websockets

from trunkline.access import EVERYTHING, Grant
from trunkline.broker.server import Broker
from trunkline.broker.spelling import SHOWN
from trunkline.testing.clock import ManualClock

from .client import Peer, peer

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
async def http(broker: Broker) -> AsyncIterator[httpx.AsyncClient]:
    base = broker.url.replace("ws", "http", 1)
    async with httpx.AsyncClient(base_url=base, trust_env=False, timeout=30) as client:
        yield client


def members(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list):
        for one in value:
            yield from members(one)
    elif isinstance(value, dict):
        for name, one in value.items():
            yield name, one
            if name not in ("payload", "headers", "schema", "by_topic", "byTopic"):
                yield from members(one)


async def test_every_answer_has_one_case_and_one_format_of_time(
    http: httpx.AsyncClient, one: Peer, broker: Broker
) -> None:
    body = {"topic": "t", "retention_ms": 60_000, "max_attempts": 3, "ack_timeout_ms": 900}
    answers = [await http.post("/topics", json=body)]
    await one.subscribe("t", "g")
    event = {"payload": {"aB": 1}, "headers": {"not_before": "95617584000000"}}
    answers.append(await http.post("/topics/t/events", json=event))
    answers.append(await http.post("/topics/t/events", json={"payload": 1, "id": "x", "key": "k"}))
    await one.nack(await one.hear("MESSAGE"), dead=True)
    async with asyncio.timeout(20):
        while not (await http.get("/topics/t/dlq")).json()["letters"]:
            await asyncio.sleep(0.01)
    await broker.hub.bus.publish("t", 2)
    answers.append(await http.post("/topics/t/groups/h/fetch", json={"limit": 9}))
    paths = (
        *("/topics", "/topics/t", "/topics/t/offsets", "/topics/t/events", "/groups"),
        "/topics/t/events/0/2",
        "/topics/t/groups/g",
        "/topics/t/dlq",
        "/stats",
        "/readyz",
    )
    answers += [await http.get(path) for path in paths]
    wait = {"Prefer": "wait=20"}
    answers.append(await http.post("/topics/t/dlq/redrive", json={"dry_run": True}, headers=wait))
    answers.append(await http.post("/topics/t/groups/g/seek", json={"to": "latest"}, headers=wait))
    answers += [await http.get(path) for path in ("/jobs", "/tokens")]
    answers.append(await http.post("/tickets", json={}))
    times = 0
    for answer in answers:
        assert answer.is_success, (answer.url, answer.text)
        for name, value in members(answer.json()):
            if name not in SHOWN.values():
                assert re.fullmatch(r"[a-z][a-z0-9_]*(\.[a-z.]+)?", name), (answer.url, name)
            if name in ("time", "at", "started", "leased_until", "next_due", "since", "expires"):
                times += value is not None
                assert value is None or re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z", value), value
    assert times >= 9
    row = (await http.get("/topics/t")).json()
    assert (row["retention_ms"], row["retentionMs"]) == (60_000, 60_000)
    assert (row["max_attempts"], row["maxAttempts"], row["ack_timeout_ms"]) == (3, 3, 900)
    (event,) = (await http.get("/topics/t/events?from=2&limit=1")).json()["events"]
    assert round(datetime.fromisoformat(event["time"]).timestamp() * 1000) == event["ts"]


async def test_a_body_may_use_the_older_name_but_not_both(http: httpx.AsyncClient) -> None:
    done = await http.post("/topics", json={"topic": "a", "maxAttempts": 4})
    assert done.json()["max_attempts"] == 4
    both = await http.post("/topics", json={"topic": "a", "maxAttempts": 4, "max_attempts": 4})
    assert (both.status_code, "given twice" in both.json()["message"]) == (400, True)


class TestIdempotencyKey:
    async def test_a_publish_that_is_sent_again_is_kept_once(
        self, http: httpx.AsyncClient, broker: Broker
    ) -> None:
        async def send(payload: Any, key: str) -> Any:
            headers = {"Idempotency-Key": key}
            done = await http.post("/topics/t/events", json={"payload": payload}, headers=headers)
            assert done.status_code == 201, done.text
            return done.json()

        first = await send(1, "order-1")
        assert await send(1, "order-1") == first | {"duplicate": True}
        assert await send(1, '"order-1"') == first | {"duplicate": True}, "the draft's quoted form"
        assert (await send(1, "order-2"))["offset"] == 2
        assert [one.event.idem_key for one in await broker.hub.bus.read("t")] == [
            "order-1",
            "order-2",
        ]

    async def test_a_batch_that_is_sent_again_is_kept_once(
        self, http: httpx.AsyncClient, broker: Broker
    ) -> None:
        batch = [
            {"specversion": "1.0", "id": str(n), "source": "/s", "type": "t", "data": n}
            for n in range(3)
        ]
        kind = "application/cloudevents-batch+json"
        for duplicate in (False, True):
            done = await http.post(
                "/topics/t/events",
                content=json.dumps(batch),
                headers={"content-type": kind, "idempotency-key": "b"},
            )
            assert [one["duplicate"] for one in done.json()["receipts"]] == [duplicate] * 3
        assert len(await broker.hub.bus.read("t")) == 3

    async def test_what_the_event_says_itself_counts(
        self, http: httpx.AsyncClient, broker: Broker
    ) -> None:
        body = {"payload": 1, "headers": {"idem_key": "own"}}
        await http.post("/topics/t/events", json=body, headers={"Idempotency-Key": "header"})
        (record,) = await broker.hub.bus.read("t")
        assert record.event.idem_key == "own"

    async def test_a_key_that_is_too_long_is_refused(self, http: httpx.AsyncClient) -> None:
        for key in ("", "x" * 201):
            headers = {"Idempotency-Key": key}
            done = await http.post("/topics/t/events", json={"payload": 1}, headers=headers)
            assert done.status_code == 400


@pytest.mark.parametrize(
    ("header", "kept"),
    [
        (TRACE, TRACE),
        (TRACE.upper(), None),
        ("00-" + "0" * 32 + TRACE[35:], None),
        ("nonsense", None),
    ],
)
async def test_the_trace_of_a_request_is_the_events(
    http: httpx.AsyncClient, broker: Broker, header: str, kept: str | None
) -> None:
    headers = {"traceparent": header, "tracestate": "vendor=1"}
    await http.post("/topics/t/events", json={"payload": 1}, headers=headers)
    own = {"payload": 2, "headers": {"traceparent": TRACE[:-1] + "0"}}
    await http.post("/topics/t/events", json=own, headers=headers)
    first, second = await broker.hub.bus.read("t")
    assert first.event.trace == kept
    assert first.event.headers == ({"tracestate": "vendor=1"} if kept else {})
    assert second.event.trace == TRACE[:-1] + "0"


class TestTokens:
    async def test_a_token_is_made_listed_used_and_revoked(
        self, http: httpx.AsyncClient, broker: Broker
    ) -> None:
        weak = await http.post(
            "/tokens", json={"agent": "shop", "grants": [{"actions": ["publish"], "topics": ["t"]}]}
        )
        assert weak.status_code == 400, "the first one must be able to make others"
        admin = (await http.post("/tokens", json={"agent": "ops", "admin": True})).json()
        assert (await http.get("/tokens")).status_code == 401, "the first one shuts the broker"
        http.headers["authorization"] = f"Bearer {admin['token']}"
        body = {
            "agent": "shop",
            "grants": [{"actions": ["publish"], "topics": ["t"]}],
            "scopes": ["till"],
            "expires_s": 60,
        }
        made = await http.post("/tokens", json=body)
        assert made.status_code == 201
        shop = made.json()
        assert shop["token"].startswith(f"tl_{shop['id']}_")
        rows = (await http.get("/tokens")).json()["tokens"]
        assert [row["agent"] for row in rows] == ["ops", "shop"]
        assert "token" not in rows[1]
        assert "digest" not in json.dumps(rows)
        as_shop = {"authorization": f"Bearer {shop['token']}"}
        done = await http.post("/topics/t/events", json={"payload": 1}, headers=as_shop)
        assert done.status_code == 201
        assert (await http.get("/tokens", headers=as_shop)).status_code == 403
        gone = await http.delete(f"/tokens/{shop['id']}")
        assert (gone.status_code, gone.json()["valid"]) == (200, False)
        done = await http.post("/topics/t/events", json={"payload": 1}, headers=as_shop)
        assert done.status_code == 401
        assert (await http.delete("/tokens/none")).status_code == 404

    async def test_only_an_admin_of_everything_makes_tokens(
        self, http: httpx.AsyncClient, broker: Broker
    ) -> None:
        rights = broker.hub.rights
        await rights.create("ops", [EVERYTHING])
        almost = {
            "of tokens": [Grant(("admin",), ("system.access",))],
            "of topics": [Grant(("admin",), (">",))],
            "but one": [EVERYTHING, Grant(("admin",), ("secret",), deny=True)],
        }
        for agent, grants in almost.items():
            text, _ = await rights.create(agent, grants)
            headers = {"authorization": f"Bearer {text}"}
            body = {"agent": "x", "admin": True}
            done = await http.post("/tokens", json=body, headers=headers)
            assert done.status_code == 403, agent

    @pytest.mark.parametrize(
        "body",
        [
            {"agent": ""},
            {"agent": "x"},
            {"agent": "x", "admin": True, "scopes": ["a b"]},
            {"agent": "x", "admin": True, "expires_s": -1},
            {"agent": "x", "admin": True, "grants": [{"actions": ["fly"], "topics": ["t"]}]},
            {"agent": "x", "admin": True, "grants": [{"actions": ["read"], "topics": ["a//b"]}]},
        ],
    )
    async def test_a_bad_token_is_refused(self, http: httpx.AsyncClient, body: Any) -> None:
        assert (await http.post("/tokens", json=body)).status_code == 400
        assert (await http.get("/tokens")).json()["tokens"] == []


class TestTickets:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"auth": True, "rights_s": 0.05}

    async def ticket(self, http: httpx.AsyncClient, token: str, **members: Any) -> str:
        headers = {"authorization": f"Bearer {token}"}
        done = await http.post("/tickets", json=members, headers=headers)
        assert done.status_code == 201
        found: str = done.json()["ticket"]
        return found

    async def test_a_browser_follows_a_topic_and_connects_with_a_ticket(
        self, http: httpx.AsyncClient, broker: Broker
    ) -> None:
        token, _ = await broker.hub.rights.create("page", [Grant(("read", "subscribe"), ("t",))])
        await broker.hub.bus.publish("t", 1)
        ticket = await self.ticket(http, token)
        tail = f"/topics/t/tail?from=earliest&limit=1&ticket={ticket}"
        assert '"payload":1' in (await http.get(tail)).text
        async with peer(f"{broker.url}/?ticket={ticket}") as one:
            await one.subscribe("t", "g")
            assert (await one.hear("MESSAGE"))["offset"] == 1
        other = f"/topics/u/tail?limit=1&ticket={ticket}"
        assert (await http.get(other)).status_code == 403, "no more than its token may"

    async def test_a_ticket_opens_nothing_else(
        self, http: httpx.AsyncClient, broker: Broker
    ) -> None:
        token, _ = await broker.hub.rights.create("page", [EVERYTHING])
        ticket = await self.ticket(http, token)
        for method, path in (("GET", "/topics"), ("DELETE", "/topics/t"), ("POST", "/tickets")):
            done = await http.request(method, f"{path}?ticket={ticket}")
            assert done.status_code == 401, path

    async def test_a_ticket_ends_with_its_time_and_with_its_token(
        self, http: httpx.AsyncClient, broker: Broker
    ) -> None:
        rights, tickets = broker.hub.rights, broker.hub.tickets
        token, kept = await rights.create("page", [Grant(("read",), ("t",))])
        await broker.hub.bus.publish("t", 1)
        tail = "/topics/t/tail?from=earliest&limit=1&ticket="
        clock = tickets._clock = ManualClock()
        short = await self.ticket(http, token, ttl_s=30)
        clock.advance(31)
        assert (await http.get(tail + short)).status_code == 401
        longer = await self.ticket(http, token)
        assert (await http.get(tail + longer)).status_code == 200
        await rights.revoke(kept.id)
        assert (await http.get(tail + longer)).status_code == 401
        with pytest.raises(websockets.InvalidStatus) as caught:
            async with peer(f"{broker.url}/?ticket={longer}"):
                pass
        assert caught.value.response.status_code == 401


async def test_a_tail_waits_for_a_topic_that_is_not_there_yet(
    http: httpx.AsyncClient, broker: Broker
) -> None:
    async with http.stream("GET", "/topics/later/tail?limit=2") as answer:
        assert answer.status_code == 200
        lines = answer.aiter_lines()
        assert await anext(lines) == ": following"
        await broker.hub.bus.define("later", partitions=2)
        await broker.hub.bus.publish("later", "a", key="k")
        await broker.hub.bus.publish("later", "b", key="j")
        told = [line async for line in lines if line.startswith("data: ")]
    assert sorted(json.loads(line[6:])["payload"] for line in told) == ["a", "b"]


SCHEMA = {
    "type": "object",
    "required": ["id"],
    "properties": {"id": {"type": "integer"}, "parts": {"$ref": "#/$defs/parts"}},
    "$defs": {"parts": {"type": "array", "items": {"type": "string"}}},
}


class TestPages:
    async def test_a_topic_with_a_schema_is_typed_in_openapi(self, http: httpx.AsyncClient) -> None:
        await http.put("/schemas/shop.orders", json={"schema": SCHEMA})
        page = (await http.get("/openapi.json")).json()
        own = page["paths"]["/topics/shop.orders/events"]
        assert [one["name"] for one in own["get"]["parameters"]] == [
            *("from", "where", "partition", "limit")
        ]
        body = own["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": "#/components/schemas/NewEvent__shop.orders"}
        schemas = page["components"]["schemas"]
        payload = {"$ref": "#/components/schemas/Payload__shop.orders"}
        assert schemas["NewEvent__shop.orders"]["properties"]["payload"] == payload
        assert schemas["Event__shop.orders"]["properties"]["payload"] == payload
        typed = schemas["Payload__shop.orders"]
        place = "#/components/schemas/Payload__shop.orders/$defs/parts"
        assert typed["properties"] == {"id": {"type": "integer"}, "parts": {"$ref": place}}
        fetched = page["paths"]["/topics/shop.orders/groups/{group}/fetch"]["post"]
        assert "Event__shop.orders" in json.dumps(fetched["responses"]["200"])
        ids = [one["operationId"] for path in page["paths"].values() for one in path.values()]
        assert len(set(ids)) == len(ids)
        assert "publish__shop_orders" in ids

    async def test_a_topic_with_a_schema_has_operations_in_asyncapi(
        self, http: httpx.AsyncClient
    ) -> None:
        await http.put("/schemas/orders", json={"schema": SCHEMA})
        page = (await http.get("/asyncapi.json")).json()
        for name, action in (("publish__orders", "receive"), ("deliver__orders", "send")):
            operation = page["operations"][name]
            assert operation["action"] == action
            assert operation["channel"] == {"$ref": "#/channels/orders"}
        event = page["channels"]["orders"]["messages"]["event"]
        assert event["payload"]["required"] == ["id"]
