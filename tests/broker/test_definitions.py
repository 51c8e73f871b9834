"""Definitions go out of one broker and into another."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from trunkline.broker.server import Broker
from trunkline.options import BrokerOptions, GroupOptions


@pytest.fixture
async def http(broker: Broker) -> AsyncIterator[httpx.AsyncClient]:
    base = broker.url.replace("ws", "http", 1)
    async with httpx.AsyncClient(base_url=base, trust_env=False, timeout=30) as client:
        yield client


async def _set_up(http: httpx.AsyncClient, broker: Broker) -> None:
    options = {"dedup_window_s": 9.0}
    body = {"topic": "orders", "partitions": 3, "max_attempts": 4, "options": options}
    assert (await http.post("/topics", json=body)).status_code == 201
    await http.put("/v1/stream/notes", headers={"content-type": "text/plain"})
    await http.put("/schemas/orders", json={"schema": {"type": "object"}, "compatibility": "full"})
    policy = GroupOptions(max_retries=7, ordering="none")
    async with broker.hub.bus.subscribe("orders", group="billing", policy=policy):
        pass
    await broker.hub.bus.pause("orders", "billing")
    await broker.hub.bus.publish("orders", {"n": 1})


async def test_what_is_exported_is_imported_elsewhere(
    http: httpx.AsyncClient, broker: Broker
) -> None:
    await _set_up(http, broker)
    page = (await http.get("/definitions")).json()
    assert [one["topic"] for one in page["topics"]] == ["notes", "orders"]
    async with Broker(BrokerOptions(url="memory:", port=0, metrics_s=0)) as other:
        base = other.url.replace("ws", "http", 1)
        async with httpx.AsyncClient(base_url=base, trust_env=False) as there:
            done = await there.post("/definitions", json=page)
            assert done.json() == {"topics": 2, "schemas": 1, "groups": 1}
            again = await there.post("/definitions", json=page)
            assert again.status_code == 200, "it may be imported twice"
            assert (await there.get("/definitions")).json() == page
        groups = await other.hub.bus.groups("orders", "billing")
        assert [(one.paused, one.policy.max_retries) for one in groups] == [(True, 7)] * 3
        assert await other.hub.bus.read("orders") == [], "records stay where they are"


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"topics": [{"topic": "a"}, {"topic": "b", "options": {"partitions": 0}}]},
        {"topics": [{"topic": "a"}], "groups": [{"topic": "a", "group": "a/b"}]},
        {"topics": [{"topic": "a"}], "groups": [{"topic": "a", "group": "g", "policy": {"x": 1}}]},
        {"topics": [{"topic": "a", "publish_acl": ["x"]}]},
        {"topics": [{"topic": "a", "unknown": 1}]},
        {"topics": [{"topic": "a"}, {"topic": "b", "max_attempts": 0}]},
        {"topics": [{"topic": "a"}, {"topic": "b.DLQ", "options": {"partitions": 2}}]},
        {"topics": [{"topic": "a"}, {"topic": "b"}, {"topic": "b"}]},
        {"topics": [{"topic": "a"}], "schemas": [{"topic": "a", "schema": {"type": "nonsense"}}]},
    ],
)
async def test_a_bad_document_changes_nothing(
    http: httpx.AsyncClient, broker: Broker, change: Any
) -> None:
    assert (await http.post("/definitions", json=change)).status_code == 400
    assert "a" not in await broker.hub.bus.topics()


@pytest.mark.parametrize(
    "change",
    [
        {"topics": [{"topic": "orders", "options": {"partitions": 2}}]},
        {"schemas": [{"topic": "orders", "schema": {"type": "object", "required": ["id"]}}]},
    ],
)
async def test_a_document_that_does_not_fit_what_is_there_changes_nothing(
    http: httpx.AsyncClient, broker: Broker, change: Any
) -> None:
    await _set_up(http, broker)
    before = (await http.get("/definitions")).json()
    change["topics"] = [{"topic": "a"}, *change.get("topics", ())]
    assert (await http.post("/definitions", json=change)).status_code == 409
    assert (await http.get("/definitions")).json() == before


async def test_topics_of_the_broker_itself_are_no_part_of_it(
    http: httpx.AsyncClient, broker: Broker
) -> None:
    await _set_up(http, broker)
    assert "system." not in (await http.get("/definitions")).text
    body = {"topics": [{"topic": "system.access"}]}
    assert (await http.post("/definitions", json=body)).status_code == 403
