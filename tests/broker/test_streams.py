"""Topics as Durable Streams: the rules that our topics add to the protocol's own suite."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from trunkline.access import Grant
from trunkline.broker.server import Broker
from trunkline.broker.streams import _NOT_OFFERED

JSON = {"content-type": "application/json"}
TEXT = {"content-type": "text/plain"}


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"poll_s": 0.2}


@pytest.fixture
async def http(broker: Broker) -> AsyncIterator[httpx.AsyncClient]:
    base = broker.url.replace("ws", "http", 1)
    async with httpx.AsyncClient(base_url=base, trust_env=False, timeout=30) as client:
        yield client


async def test_a_topic_is_a_stream_of_the_payloads_of_all_publishers(
    http: httpx.AsyncClient, broker: Broker
) -> None:
    await broker.hub.bus.publish("t", {"n": 1}, key="k")
    made = await http.put("/v1/stream/t", headers=JSON)
    assert made.status_code == 200, "the topic is there, and is JSON"
    done = await http.post("/v1/stream/t", content=b'[{"n":2},[3]]', headers=JSON)
    assert (done.status_code, done.headers["stream-next-offset"]) == (204, f"{4:016d}")
    found = await http.get("/v1/stream/t?offset=-1")
    assert found.json() == [{"n": 1}, {"n": 2}, [3]]
    assert found.headers["stream-up-to-date"] == "true"
    rest = await http.get("/v1/stream/t", params={"offset": f"{3:016d}"})
    assert rest.json() == [[3]]
    assert [one.event.payload for one in await broker.hub.bus.read("t")] == found.json()


async def test_an_append_is_kept_all_or_none(http: httpx.AsyncClient, broker: Broker) -> None:
    await http.put("/schemas/t", json={"schema": {"type": "integer"}})
    await http.put("/v1/stream/t", headers=JSON)
    done = await http.post("/v1/stream/t", content=b'[1,"two",3]', headers=JSON)
    assert (done.status_code, done.json()["code"]) == (400, "schema")
    assert await broker.hub.bus.read("t") == []


async def test_a_long_stream_is_read_by_chunks(http: httpx.AsyncClient, broker: Broker) -> None:
    await broker.hub.bus.publish_many("t", ["x" * 100_000] * 25)
    offset, seen, chunks = "-1", 0, 0
    while True:
        found = await http.get("/v1/stream/t", params={"offset": offset})
        seen, chunks = seen + len(found.json()), chunks + 1
        offset = found.headers["stream-next-offset"]
        if "stream-up-to-date" in found.headers:
            break
    assert (seen, chunks) == (25, 3)


async def test_a_place_that_is_gone_is_told(http: httpx.AsyncClient, broker: Broker) -> None:
    bus = broker.hub.bus
    await bus.publish_many("t", [1, 2, 3])
    await bus.store.trim("t", 0, 3)
    assert (await http.get("/v1/stream/t?offset=-1")).json() == [3]
    for offset in (1, 9):
        done = await http.get("/v1/stream/t", params={"offset": f"{offset:016d}"})
        assert done.status_code == 410


async def test_what_is_not_offered_is_refused_and_never_ignored(
    http: httpx.AsyncClient, broker: Broker
) -> None:
    await http.put("/v1/stream/t", headers=JSON)
    for name in _NOT_OFFERED:
        for method, topic in (("PUT", "new"), ("POST", "t")):
            headers = {**JSON, name: "1"}
            done = await http.request(method, f"/v1/stream/{topic}", content=b"1", headers=headers)
            assert (done.status_code, done.json()["code"]) == (501, "not_offered"), name
    assert await broker.hub.bus.read("t") == []
    assert "new" not in await broker.hub.bus.topics()


async def test_a_topic_of_several_partitions_is_no_stream(
    http: httpx.AsyncClient, broker: Broker
) -> None:
    await broker.hub.bus.define("wide", partitions=2)
    for method in ("GET", "POST", "PUT"):
        done = await http.request(method, "/v1/stream/wide", content=b"1", headers=JSON)
        assert (done.status_code, done.json()["code"]) == (409, "conflict"), method


async def test_the_text_of_a_stream_comes_back_line_by_line(http: httpx.AsyncClient) -> None:
    text = " two  spaces\n\n: no comment\nevent: control\n é" + "y" * 300_000
    await http.put("/v1/stream/t", content=text.encode(), headers=TEXT)
    assert (await http.get("/v1/stream/t")).text == text
    lines = []
    async with http.stream("GET", "/v1/stream/t?offset=-1&live=sse") as answer:
        async for line in answer.aiter_lines():
            if line == "event: control":
                break
            if line.startswith("data:"):
                lines.append(line[5:].removeprefix(" "))
    assert "\n".join(lines) == text


async def test_bytes_that_are_no_text_are_kept_as_they_are(http: httpx.AsyncClient) -> None:
    for kind in ("text/plain", "application/octet-stream"):
        topic = kind.replace("/", "-")
        body = bytes(range(256)) * 2000
        await http.put(f"/v1/stream/{topic}", content=body, headers={"content-type": kind})
        assert (await http.get(f"/v1/stream/{topic}")).content == body


async def test_a_long_poll_answers_when_something_comes_and_when_the_stream_goes(
    http: httpx.AsyncClient, broker: Broker
) -> None:
    await http.put("/v1/stream/t", headers=JSON)
    empty = await http.get("/v1/stream/t?offset=now&live=long-poll")
    assert (empty.status_code, empty.headers["stream-next-offset"]) == (204, f"{1:016d}")
    object.__setattr__(broker.hub, "options", _patient(broker))
    waiting = asyncio.ensure_future(http.get("/v1/stream/t?offset=now&live=long-poll"))
    await asyncio.sleep(0.1)
    await broker.hub.bus.publish("t", "news")
    assert (await waiting).json() == ["news"]
    waiting = asyncio.ensure_future(http.get("/v1/stream/t?offset=now&live=long-poll"))
    await asyncio.sleep(0.1)
    assert (await http.delete("/v1/stream/t")).status_code == 204
    assert (await waiting).status_code == 404


def _patient(broker: Broker) -> Any:
    import msgspec

    return msgspec.structs.replace(broker.hub.options, poll_s=20.0)


async def test_the_events_of_a_stream_are_data_and_where_it_goes_on(
    http: httpx.AsyncClient, broker: Broker
) -> None:
    await broker.hub.bus.publish_many("t", [1, 2])
    found: list[str] = []
    async with http.stream("GET", "/v1/stream/t?offset=-1&live=sse") as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        async for line in answer.aiter_lines():
            found.append(line)
            if len(found) == 6:
                await broker.hub.bus.publish("t", 3)
            if len(found) == 12:
                break
    assert found[:3] == ["event: data", "data:[1,2]", ""]
    assert json.loads(found[4][5:])["streamNextOffset"] == f"{3:016d}"
    assert found[6:8] == ["event: data", "data:[3]"]


class TestRights:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"auth": True, "poll_s": 0.2}

    async def test_each_call_needs_its_own_right(
        self, http: httpx.AsyncClient, broker: Broker
    ) -> None:
        rights = broker.hub.rights
        await broker.hub.bus.publish("t", 1)
        wanted = {"read": ["GET", "HEAD", "PUT"], "publish": ["POST"], "admin": []}
        for right, allowed in wanted.items():
            grants = [Grant((right,), ("t",))]  # type: ignore[arg-type]
            text, _ = await rights.create(right, grants)
            headers = {**JSON, "authorization": f"Bearer {text}"}
            for method in ("GET", "HEAD", "POST", "PUT"):
                done = await http.request(method, "/v1/stream/t", content=b"2", headers=headers)
                may = right == "admin" or method in allowed
                assert done.is_success is may, (right, method, done.status_code)
                if not may:
                    assert done.status_code == 403
            done = await http.put("/v1/stream/new", headers=headers)
            assert done.status_code == 403, "who may not make topics makes no stream"
        assert (await http.get("/v1/stream/t")).status_code == 401

    async def test_a_ticket_reads_a_stream(self, http: httpx.AsyncClient, broker: Broker) -> None:
        text, _ = await broker.hub.rights.create("page", [Grant(("read",), ("t",))])
        await broker.hub.bus.publish("t", 1)
        shown = {"authorization": f"Bearer {text}"}
        ticket = (await http.post("/tickets", json={}, headers=shown)).json()["ticket"]
        assert (await http.get(f"/v1/stream/t?ticket={ticket}")).json() == [1]
        done = await http.delete(f"/v1/stream/t?ticket={ticket}")
        assert done.status_code == 401
