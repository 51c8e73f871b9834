"""Consumption over HTTP: fetch with a lease, then ack, nack, extend or term by handle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any

import httpx
import pytest

from trunkline.access import Grant
from trunkline.broker.server import Broker
from trunkline.bus.handles import LeaseHandle

from .client import Peer, until

FETCH = "/topics/t/groups/g/fetch"


@pytest.fixture
async def http(broker: Broker) -> AsyncIterator[httpx.AsyncClient]:
    base = broker.url.replace("ws", "http", 1)
    async with httpx.AsyncClient(base_url=base, trust_env=False, timeout=30) as client:
        yield client


async def fetch(http: httpx.AsyncClient, **members: Any) -> list[dict[str, Any]]:
    done = await http.post(FETCH, json=members)
    assert done.status_code == 200, done.text
    found: list[dict[str, Any]] = done.json()["deliveries"]
    return found


async def settle(
    http: httpx.AsyncClient, verb: str, *deliveries: dict[str, Any], **members: Any
) -> tuple[int, list[str]]:
    handles = [one["handle"] for one in deliveries]
    done = await http.post(f"/leases/{verb}", json={"handles": handles, **members})
    return done.status_code, [one["state"] for one in done.json()["results"]]


async def test_what_is_fetched_is_leased_and_what_is_acked_is_settled(
    http: httpx.AsyncClient, broker: Broker
) -> None:
    bus = broker.hub.bus
    await bus.publish_many("t", ["a", "b", "c"])
    first, second = await fetch(http, limit=2, lease_s=600)
    assert [first["event"]["payload"], second["event"]["payload"]] == ["a", "b"]
    assert (first["attempt"], first["event"]["offset"]) == (1, 1)
    assert datetime.fromisoformat(first["leased_until"]) > bus.clock.now()
    (third,) = await fetch(http, limit=9)
    assert third["event"]["payload"] == "c"
    assert await settle(http, "ack", first, second) == (200, ["acked", "acked"])
    (info,) = await bus.groups("t", "g")
    assert (info.floor, info.leases) == (2, 1)
    assert await settle(http, "ack", first) == (200, ["acked"]), "an ack may be sent again"


async def test_a_nacked_record_comes_again_after_its_delay_and_then_dies(
    http: httpx.AsyncClient, broker: Broker
) -> None:
    bus = broker.hub.bus
    await http.post("/topics", json={"topic": "t", "max_attempts": 2})
    await bus.publish("t", "bad")
    (one,) = await fetch(http)
    assert await settle(http, "nack", one, delay_s=3600) == (200, ["nacked"])
    assert await fetch(http) == []
    await bus.publish("t", "other")
    (two,) = await fetch(http)
    assert await settle(http, "nack", two, delay_s=0, reason="again") == (200, ["nacked"])
    (three,) = await fetch(http, wait_s=10)
    assert three["attempt"] == 2
    assert await settle(http, "nack", three, reason="broken") == (200, ["dead"])
    (letter,) = (await http.get("/topics/t/dlq")).json()["letters"]
    assert (letter["origin"], letter["reason"], letter["error"]) == (2, "retries", "broken")
    assert broker.hub.counts.dead == 1


async def test_term_makes_a_dead_letter_at_once(http: httpx.AsyncClient, broker: Broker) -> None:
    await broker.hub.bus.publish("t", "poison")
    (one,) = await fetch(http)
    assert await settle(http, "term", one, reason="unreadable") == (200, ["dead"])
    assert await settle(http, "term", one) == (409, ["settled"])
    (letter,) = (await http.get("/topics/t/dlq")).json()["letters"]
    assert (letter["reason"], letter["error"], letter["group"]) == ("rejected", "unreadable", "g")
    assert await broker.hub.bus.lag("t", "g") == 0


async def test_a_lease_that_ran_out_is_told_and_the_others_are_settled(
    http: httpx.AsyncClient, broker: Broker
) -> None:
    await broker.hub.bus.publish_many("t", [1, 2])
    (late,) = await fetch(http, lease_s=0.05)
    (kept,) = await fetch(http, lease_s=600)

    async def again() -> Any:
        return await fetch(http, lease_s=600, wait_s=1)

    (other,) = await until(again)
    assert other["event"]["offset"] == late["event"]["offset"]
    assert await settle(http, "extend", late, lease_s=60) == (409, ["taken"])
    assert await settle(http, "ack", late, kept) == (409, ["taken", "acked"])
    assert await settle(http, "extend", other, lease_s=60) == (200, ["held"])
    assert await settle(http, "ack", other) == (200, ["acked"])


async def test_a_fetch_waits_for_the_first_record_of_a_topic_that_is_not_there_yet(
    http: httpx.AsyncClient, broker: Broker
) -> None:
    assert await fetch(http) == []
    waiting = asyncio.ensure_future(fetch(http, wait_s=20))
    await asyncio.sleep(0.05)
    await broker.hub.bus.publish("t", "news")
    (one,) = await waiting
    assert one["event"]["payload"] == "news"


async def test_nothing_is_taken_for_a_client_that_left(
    http: httpx.AsyncClient, broker: Broker
) -> None:
    await broker.hub.bus.define("t")
    with pytest.raises(httpx.ReadTimeout):
        await http.post(FETCH, json={"wait_s": 60}, timeout=0.3)
    await until(lambda: not broker._server.server_state.connections)  # type: ignore[union-attr]
    await broker.hub.bus.publish("t", 1)
    (one,) = await fetch(http, wait_s=10)
    assert one["attempt"] == 1


async def test_a_broker_that_ends_does_not_wait_for_a_fetch(
    http: httpx.AsyncClient, broker: Broker
) -> None:
    await broker.hub.bus.define("t")
    waiting = asyncio.ensure_future(http.post(FETCH, json={"wait_s": 60}))
    await asyncio.sleep(0.1)
    async with asyncio.timeout(20):
        await broker.__aexit__(None, None, None)
        done = await waiting
    assert done.json()["deliveries"] == []


async def test_members_over_http_and_websocket_share_a_group(
    http: httpx.AsyncClient, broker: Broker, one: Peer
) -> None:
    await broker.hub.bus.publish_many("t", [1, 2, 3])
    (mine,) = await fetch(http, lease_s=600)
    await one.subscribe("t", "g")
    theirs = [(await one.hear("MESSAGE"))["offset"] for _ in range(2)]
    assert sorted([mine["event"]["offset"], *theirs]) == [1, 2, 3]
    assert await one.silent()
    assert await settle(http, "nack", mine, delay_s=0) == (200, ["nacked"])
    again = await one.hear("MESSAGE")
    assert (again["offset"], again["attempt"]) == (mine["event"]["offset"], 2)


async def test_an_ack_by_handle_frees_the_key_for_other_members(
    http: httpx.AsyncClient, broker: Broker, one: Peer
) -> None:
    await broker.hub.bus.publish_many("t", [1, 2], key="k")
    (mine,) = await fetch(http, limit=9, lease_s=600)
    await one.subscribe("t", "g")
    assert await one.silent()
    assert await settle(http, "ack", mine) == (200, ["acked"])
    assert (await one.hear("MESSAGE"))["offset"] == 2


@pytest.mark.parametrize(
    "body",
    [
        {"limit": 0},
        {"limit": 1001},
        {"lease_s": 0},
        {"lease_s": 1e9},
        {"wait_s": 61},
        {"from": "yesterday"},
        {"where": "payload.x ="},
        {"unknown": 1},
    ],
)
async def test_a_bad_fetch_is_refused(http: httpx.AsyncClient, body: Any) -> None:
    assert (await http.post(FETCH, json=body)).status_code == 400


@pytest.mark.parametrize("handles", [[], ["x"], ["!"], ["W10"], [1]])
async def test_what_is_no_handle_is_refused(http: httpx.AsyncClient, handles: Any) -> None:
    for verb in ("ack", "nack", "extend", "term"):
        done = await http.post(f"/leases/{verb}", json={"handles": handles})
        assert (done.status_code, done.json()["code"]) == (400, "invalid_option")


class TestRights:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"auth": True}

    async def test_a_handle_is_worth_nothing_to_an_agent_that_may_not_subscribe(
        self, http: httpx.AsyncClient, broker: Broker
    ) -> None:
        rights = broker.hub.rights
        mine, _ = await rights.create("mine", [Grant(("subscribe",), ("t",), ("g",))])
        other, _ = await rights.create("other", [Grant(("subscribe",), ("t",), ("h",))])
        await broker.hub.bus.publish_many("t", [1, 2])
        http.headers["authorization"] = f"Bearer {mine}"
        first, second = await fetch(http, limit=2)
        http.headers["authorization"] = f"Bearer {other}"
        for verb in ("ack", "nack", "extend", "term"):
            done = await http.post(f"/leases/{verb}", json={"handles": [first["handle"]]})
            assert (done.status_code, done.json()["code"]) == (403, "denied")
        handle = LeaseHandle.parse(second["handle"])
        http.headers["authorization"] = f"Bearer {mine}"
        forged = {"handle": str(LeaseHandle(*_forged(handle)))}
        assert await settle(http, "nack", forged) == (409, ["taken"])
        assert await settle(http, "ack", forged) == (409, ["taken"])
        assert await settle(http, "ack", first, second) == (200, ["acked", "acked"])


def _forged(handle: LeaseHandle) -> list[Any]:
    """The place of a lease, without the secret of who holds it."""
    known = [handle.version, handle.topic, handle.partition, handle.group, handle.offset]
    return [*known, handle.attempt, handle.era, handle.by[:-1] + "x"]
