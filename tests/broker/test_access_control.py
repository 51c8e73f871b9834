"""Who may do what, at both doors: exactly what is documented, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets

from trunkline.access import EVERYTHING, Grant
from trunkline.broker.server import Broker, check_exposed
from trunkline.broker.tokens import Rights
from trunkline.broker.topic_rules import Config
from trunkline.bus.connect import open_local
from trunkline.bus.remote import RemoteBus
from trunkline.errors import ConnectionLost, Denied, InvalidOption
from trunkline.options import BrokerOptions
from trunkline.testing.clock import ManualClock

from .client import Peer, peer, running, until

GRANTS: dict[str, list[Grant]] = {
    "read-only": [Grant(("read",), ("orders",))],
    "publisher": [Grant(("publish",), ("orders",))],
    "consumer": [Grant(("subscribe", "read"), ("orders",), ("billing",))],
    "other-topic": [Grant(("publish", "subscribe", "read", "admin"), ("refunds.>",))],
    "other-group": [Grant(("subscribe",), ("orders",), ("audit",))],
    "manager": [Grant(("admin",), ("orders",))],
    "admin": [EVERYTHING],
}
NOBODY = ("none", "wrong", "expired", "revoked")
EVERYBODY = (*NOBODY, *GRANTS)


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"auth": True, "rights_s": 0.05}


@pytest.fixture
async def tokens(broker: Broker) -> dict[str, str | None]:
    rights = broker.hub.rights
    found: dict[str, str | None] = {"none": None, "wrong": "tl_" + "0" * 12 + "_" + "A" * 43}
    for agent, grants in GRANTS.items():
        found[agent], _ = await rights.create(agent, grants)
    past = rights.now() - timedelta(seconds=1)
    found["expired"], _ = await rights.create("expired", [EVERYTHING], past)
    found["revoked"], token = await rights.create("revoked", [EVERYTHING])
    await rights.revoke(token.id)
    return found


PLACE = {"topic": "orders", "partition": 0, "group": "billing", "offset": 1}

LETTER = {"dlq-reason": "rejected"}

# What each frame needs: the frame, and who may.
FRAMES: tuple[tuple[dict[str, Any], set[str]], ...] = (
    ({"type": "PUBLISH", "topic": "orders", "payload": 1}, {"publisher", "manager", "admin"}),
    (
        {"type": "PUBLISH", "events": [{"topic": "orders", "payload": 1}]},
        {"publisher", "manager", "admin"},
    ),
    (
        {"type": "PUBLISH", "corrs": ["ask"], "events": [{"topic": "orders", "payload": 1}]},
        {"publisher", "manager", "admin"},
    ),
    ({"type": "PUBLISH", "topic": "orders.DLQ", "payload": 1, "headers": LETTER}, {"admin"}),
    ({"type": "PUBLISH", "topic": "system.metrics", "payload": 1}, {"admin"}),
    ({"type": "PUBLISH", "topic": "system.access", "payload": 1}, set()),
    (
        {"type": "SUBSCRIBE", "topic": "orders", "group": "billing"},
        {"consumer", "manager", "admin"},
    ),
    (
        {"type": "SUBSCRIBE", "topic": "orders", "group": "audit"},
        {"other-group", "manager", "admin"},
    ),
    ({"type": "SUBSCRIBE", "topic": ">", "group": "billing"}, {"admin"}),
    ({"type": "SUBSCRIBE", "topic": "orders.DLQ", "group": "billing"}, {"admin"}),
    ({"type": "SUBSCRIBE", "topic": "system.access", "group": "billing"}, {"admin"}),
    (
        {"type": "CALL", "op": "read", "args": {"topic": "orders"}},
        {"read-only", "consumer", "manager", "admin"},
    ),
    (
        {"type": "CALL", "op": "bounds", "args": {"topic": "orders"}},
        {"read-only", "consumer", "manager", "admin"},
    ),
    ({"type": "CALL", "op": "define", "args": {"topic": "orders"}}, {"manager", "admin"}),
    ({"type": "CALL", "op": "define", "args": {"topic": "system.access"}}, set()),
    ({"type": "CALL", "op": "letters", "args": {"topic": "orders"}}, {"admin"}),
    ({"type": "CALL", "op": "redrive", "args": {"topic": "orders"}}, {"manager", "admin"}),
    ({"type": "CALL", "op": "drop", "args": {"topic": "orders"}}, {"manager", "admin"}),
    (
        {"type": "CALL", "op": "lag", "args": {"groups": [["orders", "billing"]]}},
        {"consumer", "manager", "admin"},
    ),
    (
        {"type": "CALL", "op": "forget", "args": {"topic": "orders", "group": "none"}},
        {"manager", "admin"},
    ),
    (
        {"type": "CALL", "op": "forget_left", "args": {"topic": "orders", "prefix": "none-"}},
        set(GRANTS),
    ),
    (
        {"type": "CALL", "op": "policy", "args": {"topic": "orders", "group": "billing"}},
        {"consumer", "manager", "admin"},
    ),
    ({"type": "CALL", "op": "topics"}, set(GRANTS)),
    ({"type": "CALL", "op": "health"}, set(GRANTS)),
    ({"type": "PING"}, set(GRANTS)),
    ({"type": "FLOW", "credits": 10}, set(GRANTS)),
    (
        {"type": "ACK", "topic": "orders", "partition": 0, "group": "billing", "offset": 1},
        set(GRANTS),
    ),
    (
        {"type": "NACK", "topic": "orders", "partition": 0, "group": "billing", "offset": 1},
        set(GRANTS),
    ),
)

SEEN = {"read-only", "consumer", "manager", "admin"}
ROUTES: tuple[tuple[str, str, Any, set[str]], ...] = (
    ("GET", "/topics", None, set(GRANTS)),
    ("POST", "/topics", {"topic": "orders"}, {"manager", "admin"}),
    ("POST", "/topics", {"topic": "brand-new"}, {"admin"}),
    ("GET", "/topics/orders", None, SEEN),
    ("GET", "/topics/orders/offsets", None, SEEN),
    ("GET", "/topics/orders/events", None, SEEN),
    ("GET", "/topics/orders/events/0/1", None, SEEN),
    ("GET", "/topics/orders/tail?from=earliest&limit=1", None, SEEN),
    ("GET", "/topics/system.access/events", None, {"admin"}),
    ("POST", "/topics/orders/events", {"payload": 1}, {"publisher", "manager", "admin"}),
    ("POST", "/topics/system.access/events", {"payload": 1}, set()),
    ("GET", "/groups", None, set(GRANTS)),
    ("GET", "/topics/orders/groups/billing", None, SEEN),
    ("POST", "/topics/orders/groups/billing/pause", None, {"manager", "admin"}),
    ("POST", "/topics/orders/groups/billing/resume", None, {"manager", "admin"}),
    ("POST", "/topics/orders/groups/billing/seek", {"to": "latest"}, {"manager", "admin"}),
    ("POST", "/topics/orders/groups/billing/fetch", {}, {"consumer", "manager", "admin"}),
    ("POST", "/topics/orders/groups/audit/fetch", {}, {"other-group", "manager", "admin"}),
    ("POST", "/topics/system.access/groups/billing/fetch", {}, {"admin"}),
    ("GET", "/tokens", None, {"admin"}),
    ("POST", "/tokens", {"agent": "x", "admin": True}, {"admin"}),
    ("POST", "/tickets", {}, set(GRANTS)),
    ("GET", "/topics/orders/dlq", None, {"admin"}),
    ("POST", "/topics/orders/dlq/redrive", {}, {"manager", "admin"}),
    ("POST", "/topics/orders/dlq/drop", {}, {"manager", "admin"}),
    ("GET", "/schemas", None, set(GRANTS)),
    ("GET", "/schemas/orders/versions", None, SEEN),
    ("PUT", "/schemas/orders", {"schema": True}, {"manager", "admin"}),
    ("DELETE", "/schemas/orders", None, {"manager", "admin"}),
    ("GET", "/stats", None, {"admin"}),
    ("GET", "/metrics", None, {"admin"}),
    ("GET", "/healthz", None, set(EVERYBODY)),
    ("GET", "/readyz", None, set(EVERYBODY)),
    ("GET", "/openapi.json", None, set(EVERYBODY)),
    ("GET", "/asyncapi.json", None, set(EVERYBODY)),
    ("POST", "/topics", {"topic": "system.access"}, set()),
    ("DELETE", "/topics/system.access", None, set()),
    ("DELETE", "/topics/orders/groups/billing", None, {"manager", "admin"}),
    ("DELETE", "/topics/orders", None, {"manager", "admin"}),
)


async def prepare(broker: Broker) -> None:
    bus = broker.hub.bus
    await bus.publish("orders", 1)
    async with bus.subscribe("orders", group="billing"):
        pass
    await broker.hub.registry.add("orders", True)


@pytest.mark.parametrize("agent", EVERYBODY)
async def test_every_frame_is_allowed_to_exactly_the_agents_that_have_the_right(
    broker: Broker, tokens: dict[str, str | None], agent: str
) -> None:
    await prepare(broker)
    if agent in NOBODY[1:]:
        with pytest.raises(websockets.InvalidStatus) as caught:
            async with peer(broker.url, tokens[agent]):
                pass
        assert caught.value.response.status_code == 401
        return
    if agent == "none":
        for frame, _ in FRAMES:
            async with peer(broker.url) as one:
                said = await answer(one, frame)
                assert said == ("ERROR", "unauthenticated", "not authenticated")
        return
    problems = []
    async with peer(broker.url, tokens[agent]) as one:
        for frame, allowed in FRAMES:
            said = await answer(one, frame)
            got = said[0] != "ERROR"
            assert got or said[1:] == ("denied", "access denied")
            if got is not (agent in allowed):
                problems.append((frame, said))
    assert problems == []


async def answer(one: Peer, frame: dict[str, Any]) -> tuple[str, str, str]:
    members = {name: value for name, value in frame.items() if name != "type"}
    said = await one.ask(frame["type"], **members)
    return said["type"], said.get("code", ""), said.get("message", "")


@pytest.mark.parametrize("agent", EVERYBODY)
async def test_every_route_is_allowed_to_exactly_the_agents_that_have_the_right(
    broker: Broker, tokens: dict[str, str | None], agent: str
) -> None:
    await prepare(broker)
    headers = {"authorization": f"Bearer {tokens[agent]}"} if tokens[agent] else {}
    problems = []
    base = broker.url.replace("ws", "http", 1)
    async with httpx.AsyncClient(base_url=base, headers=headers, trust_env=False) as http:
        for method, path, body, allowed in ROUTES:
            answer = await http.request(method, path, json=body)
            status = answer.status_code
            wanted = "2xx" if agent in allowed else "401" if agent in NOBODY else "403"
            if not (200 <= status < 300 if wanted == "2xx" else str(status) == wanted):
                problems.append((method, path, status, wanted, answer.text))
    assert problems == []


async def test_a_listing_shows_what_one_may_see(
    broker: Broker, tokens: dict[str, str | None]
) -> None:
    await prepare(broker)
    await broker.hub.bus.publish("refunds.eu", 1)
    seen = {}
    base = broker.url.replace("ws", "http", 1)
    for agent in ("read-only", "other-topic", "publisher", "admin"):
        headers = {"authorization": f"Bearer {tokens[agent]}"}
        async with httpx.AsyncClient(base_url=base, headers=headers, trust_env=False) as http:
            topics = (await http.get("/topics")).json()["topics"]
            seen[agent] = {topic["topic"] for topic in topics}
    page = broker.url.replace("ws", "http", 1) + "/asyncapi.json"
    for agent, sees in (("none", False), ("publisher", False), ("read-only", True)):
        shown = {"authorization": f"Bearer {tokens[agent]}"} if tokens[agent] else {}
        async with httpx.AsyncClient(headers=shown, trust_env=False) as http:
            found = await http.get(page)
        assert ("orders" in found.json()["channels"]) is sees
    assert seen["read-only"] == {"orders"}
    assert seen["other-topic"] == {"refunds.eu"}
    assert seen["publisher"] == set()
    assert {"orders", "refunds.eu", "system.access", "system.schemas"} <= seen["admin"]


async def test_the_publisher_is_named_by_the_token_and_never_by_the_client(
    broker: Broker, tokens: dict[str, str | None]
) -> None:
    claimed = {"agent_id": "boss", "auth_principal": "admin", "scopes": "everything"}
    async with peer(broker.url, tokens["publisher"]) as one:
        await one.ask("PUBLISH", topic="orders", headers=claimed, payload=1)
    (record,) = await broker.hub.bus.read("orders")
    assert record.event.headers["auth_principal"] == "publisher"
    assert record.event.actor == "boss", "what is claimed is kept, as a claim"


async def test_nobody_takes_the_place_of_a_connection_by_its_name_alone(
    broker: Broker, tokens: dict[str, str | None]
) -> None:
    mine, theirs = tokens["publisher"], tokens["consumer"]
    async with peer(broker.url, mine, client="c") as one:
        async with peer(broker.url, theirs, client="c"), peer(broker.url, client="c") as two:
            assert (await one.ask("PING"))["type"] == "PONG"
            assert (await two.ask("AUTH", token=mine))["type"] == "OK"  # now it is the same one
            await asyncio.wait_for(one.socket.wait_closed(), 10)
        await until(lambda: not broker.hub.clients)
    with pytest.raises(websockets.InvalidStatus, match="400"):
        async with peer(broker.url, mine, client="c" * 101):
            pass


async def test_the_first_frame_may_carry_the_token(
    broker: Broker, tokens: dict[str, str | None]
) -> None:
    async with peer(broker.url) as one:
        assert (await one.ask("AUTH", token=tokens["publisher"]))["type"] == "OK"
        assert (await one.ask("PUBLISH", topic="orders", payload=1))["type"] == "PUBLISHED"
    async with peer(broker.url) as one:
        assert (await one.ask("AUTH", token="tl_wrong"))["code"] == "unauthenticated"
        await asyncio.wait_for(one.socket.wait_closed(), 10)
        assert one.socket.close_code == 4401


@pytest.mark.parametrize("settings", [{"auth": True, "auth_timeout_s": 0.2}])
async def test_a_client_that_sends_nothing_is_let_go(broker: Broker) -> None:
    async with peer(broker.url) as one:
        await asyncio.wait_for(one.socket.wait_closed(), 10)
        assert one.socket.close_code == 4401


async def test_rights_that_are_revoked_reach_open_connections(broker: Broker) -> None:
    rights = broker.hub.rights
    text, token = await rights.create("shortly", [EVERYTHING])
    async with peer(broker.url, text) as one:
        await one.subscribe("orders", "g")
        await rights.revoke(token.id)
        assert (await one.hear("ERROR"))["code"] == "unauthenticated"
        await asyncio.wait_for(one.socket.wait_closed(), 10)


async def test_rights_are_looked_at_again_after_a_failure(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub = broker.hub
    failed = asyncio.Event()

    async def fail() -> None:
        failed.set()
        raise OSError(errno.EMFILE, "Too many open files")

    text, token = await hub.rights.create("shortly", [EVERYTHING])
    async with peer(broker.url, text) as one:
        monkeypatch.setattr(hub.registry, "refresh", fail)
        for _ in range(3):
            failed.clear()
            await asyncio.wait_for(failed.wait(), 10)
        await hub.rights.revoke(token.id)
        assert (await one.hear("ERROR"))["code"] == "unauthenticated"
    assert caplog.text.count("could not be read") == 1


async def test_a_connection_that_changes_its_agent_keeps_what_that_agent_may_have(
    broker: Broker, tokens: dict[str, str | None]
) -> None:
    async with peer(broker.url, tokens["admin"]) as one:
        await one.subscribe("refunds", "billing")
        await one.subscribe("orders", "billing")
        assert (await one.ask("AUTH", token=tokens["consumer"]))["type"] == "OK"
        said = await one.hear("ERROR")
        assert (said["code"], said["topic"]) == ("denied", "refunds")
        for topic in ("refunds", "orders"):
            await broker.hub.bus.publish(topic, 1)
        assert (await one.hear("MESSAGE"))["topic"] == "orders"
        assert await one.silent()


@pytest.mark.parametrize("how", ["revoked", "denied"])
async def test_rights_are_looked_at_when_all_has_come(broker: Broker, how: str) -> None:
    hub = broker.hub
    text, token = await hub.rights.create("slow", [Grant(("publish",), ("orders",))])
    reader, writer = await asyncio.open_connection("127.0.0.1", broker.port)
    body = b'{"payload":1}'
    lines = [
        *("POST /topics/orders/events HTTP/1.1", f"Host: 127.0.0.1:{broker.port}"),
        *(f"Authorization: Bearer {text}", "Content-Type: application/json"),
        *(f"Content-Length: {len(body)}", "Expect: 100-continue", "", ""),
    ]
    writer.write("\r\n".join(lines).encode())
    assert b"100 Continue" in await reader.readline()
    await reader.readline()
    if how == "revoked":
        await hub.rights.revoke(token.id)
    else:
        await hub.configs.set(Config("orders", publish_acl=["!slow"]))
    writer.write(body)
    expected = b"401" if how == "revoked" else b"403"
    assert expected in await asyncio.wait_for(reader.readline(), 10)
    writer.close()
    assert not await hub.bus.read("orders")


async def test_rights_that_are_revoked_end_a_tail(broker: Broker) -> None:
    rights = broker.hub.rights
    await broker.hub.bus.publish("orders", 1)
    text, token = await rights.create("shortly", [Grant(("read",), ("orders",))])
    base = broker.url.replace("ws", "http", 1)
    headers = {"authorization": f"Bearer {text}"}
    lines = []
    async with (
        httpx.AsyncClient(base_url=base, headers=headers, trust_env=False) as http,
        http.stream("GET", "/topics/orders/tail?from=earliest") as answer,
        asyncio.timeout(20),
    ):
        async for line in answer.aiter_lines():
            lines.append(line)
            if line.startswith("id: "):
                await rights.revoke(token.id)
    assert lines[-3:-1] == ["event: error", 'data: {"code":"denied"}']


async def test_a_token_that_expires_ends_its_connection() -> None:
    clock = ManualClock()
    options = BrokerOptions(port=0, rights_s=0.05, metrics_s=0)
    async with open_local("memory:", clock=clock) as bus, Broker(options, bus=bus) as broker:
        rights = broker.hub.rights
        soon = rights.now() + timedelta(seconds=60)
        text, _ = await rights.create("shortly", [EVERYTHING], soon)
        async with peer(broker.url, text) as one:
            clock.advance(59)
            assert (await one.ask("PING"))["type"] == "PONG"
            clock.advance(1)
            await asyncio.wait_for(one.socket.wait_closed(), 10)
            assert one.socket.close_code == 4401


async def test_what_another_process_says_of_a_token_counts_at_once(tmp_path: Path) -> None:
    url = f"file:{tmp_path / 'bus'}"
    options = BrokerOptions(url=url, port=0, auth=True, rights_s=3600, metrics_s=0)
    async with Broker(options) as broker, open_local(url) as elsewhere:
        rights = Rights(elsewhere)
        text, token = await rights.create("till", [EVERYTHING])

        async def status() -> int:
            base = broker.url.replace("ws", "http", 1)
            headers = {"authorization": f"Bearer {text}"}
            async with httpx.AsyncClient(headers=headers, trust_env=False) as http:
                return (await http.get(f"{base}/topics")).status_code

        async with asyncio.timeout(20):
            while await status() != 200:
                await asyncio.sleep(0.01)
            await rights.revoke(token.id)
            while (seen := await status()) == 200:
                await asyncio.sleep(0.01)
        assert seen == 401


async def test_a_topics_own_list_is_needed_too(
    broker: Broker, tokens: dict[str, str | None]
) -> None:
    base = broker.url.replace("ws", "http", 1)
    headers = {"authorization": f"Bearer {tokens['admin']}"}
    async with httpx.AsyncClient(base_url=base, headers=headers, trust_env=False) as http:
        body = {"topic": "orders", "publishACL": ["somebody"], "subscribeACL": ["*", "!consumer"]}
        assert (await http.post("/topics", json=body)).status_code == 201
    async with peer(broker.url, tokens["publisher"]) as one:
        assert (await one.ask("PUBLISH", topic="orders", payload=1))["code"] == "denied"
    async with peer(broker.url, tokens["consumer"]) as one:
        assert (await one.subscribe("orders", "billing"))["code"] == "denied"
    async with peer(broker.url, tokens["other-group"]) as one:
        assert (await one.subscribe("orders", "audit"))["type"] == "OK"
    text, _ = await broker.hub.rights.create("consumer", [Grant(("subscribe",), ("*",))])
    async with peer(broker.url, text) as one:
        assert (await one.subscribe("*", "billing"))["code"] == "denied", "nor by a pattern"
        assert (await one.subscribe("refunds", "billing"))["type"] == "OK"


async def test_an_agent_that_may_follow_everything_does_not_see_tokens(broker: Broker) -> None:
    text, _ = await broker.hub.rights.create("all", [Grant(("subscribe", "read"), (">",))])
    async with peer(broker.url, text) as one:
        for topic in (">", "*.*", "system.access", "*.access"):
            assert (await one.subscribe(topic, "g"))["code"] == "denied"
        assert (await one.subscribe("orders.>", "g"))["type"] == "OK"


async def test_the_python_client_says_that_it_was_denied(
    broker: Broker, tokens: dict[str, str | None]
) -> None:
    async with RemoteBus(broker.url, token=tokens["consumer"]) as bus:
        with pytest.raises(Denied):
            await bus.publish("orders", 1)
        async with bus.subscribe("orders", group="billing"):
            pass
    async with RemoteBus(broker.url, token="tl_wrong") as bus:
        with pytest.raises(Denied):
            await bus.publish("orders", 1)


class TestTheDoor:
    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        return {"origins": ("https://app.example",), "connections": 2}

    @pytest.mark.parametrize(
        ("origin", "allowed"),
        [
            ("https://app.example", True),
            ("https://evil.example", False),
            ("null", False),
            ("https://app.example.evil", False),
            ("https://[", False),
        ],
    )
    async def test_pages_of_other_origins_are_refused(
        self, broker: Broker, origin: Any, allowed: bool
    ) -> None:
        if allowed:
            async with peer(broker.url, origin=origin) as one:
                assert (await one.ask("PING"))["type"] == "PONG"
            return
        with pytest.raises(websockets.InvalidStatus) as caught:
            async with peer(broker.url, origin=origin):
                pass
        assert caught.value.response.status_code == 403

    async def test_another_name_is_refused(self, broker: Broker) -> None:
        port = broker.port
        with pytest.raises(websockets.InvalidStatus) as caught:
            async with websockets.connect(
                f"ws://evil.example:{port}/", host="127.0.0.1", port=port, proxy=None
            ):
                pass
        assert caught.value.response.status_code == 421

    @pytest.mark.parametrize("settings", [{"host": "127.8.8.8"}])
    async def test_another_name_is_refused_on_every_address_of_this_machine(
        self, broker: Broker
    ) -> None:
        base = f"http://127.8.8.8:{broker.port}"
        rebound = {"host": "evil.example", "origin": "http://evil.example"}
        async with httpx.AsyncClient(base_url=base, trust_env=False) as http:
            assert (await http.get("/topics")).status_code == 200
            assert (await http.get("/topics", headers=rebound)).status_code == 421

    async def test_another_path_is_not_there(self, broker: Broker) -> None:
        with pytest.raises(websockets.InvalidStatus) as caught:
            async with peer(broker.url + "/nothing"):
                pass
        assert caught.value.response.status_code == 404

    @pytest.mark.parametrize("settings", [{"auth_timeout_s": 0.2}])
    @pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nHost: loc"], ids=["none", "half"])
    async def test_a_request_that_does_not_come_is_not_waited_for(
        self, broker: Broker, said: bytes
    ) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", broker.port)
        writer.write(said)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()

    async def test_there_are_only_so_many_connections_without_a_request(
        self, broker: Broker
    ) -> None:
        first = [await asyncio.open_connection("127.0.0.1", broker.port) for _ in range(2)]
        reader, writer = await asyncio.open_connection("127.0.0.1", broker.port)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 10) == b""
        for _, one in (*first, (reader, writer)):
            one.close()

    async def test_there_are_only_so_many_connections(self, broker: Broker) -> None:
        async with peer(broker.url), peer(broker.url):
            with pytest.raises(websockets.InvalidStatus) as caught:
                async with peer(broker.url):
                    pass
            assert caught.value.response.status_code == 503
        await until(lambda: not broker.hub.sessions)
        async with peer(broker.url) as one:
            assert (await one.ask("PING"))["type"] == "PONG"


class TestExposure:
    @pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.7", "::", "example.com"])
    def test_a_broker_that_others_reach_needs_a_guard(self, host: str) -> None:
        with pytest.raises(InvalidOption, match="nothing guards"):
            check_exposed(BrokerOptions(host=host), is_guarded=False)
        check_exposed(BrokerOptions(host=host), is_guarded=True)

    @pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
    def test_this_machine_alone_needs_none(self, host: str) -> None:
        check_exposed(BrokerOptions(host=host), is_guarded=False)

    async def test_serve_refuses_to_start_unguarded(self, tmp_path: Path) -> None:
        with pytest.raises(RuntimeError, match="ended with 4"):
            async with running(tmp_path / "bus", "--host", "0.0.0.0"):
                pass
        assert not (tmp_path / "bus").exists(), "it leaves nothing behind"

    async def test_a_bus_with_a_token_is_guarded(self, tmp_path: Path) -> None:
        async with open_local(f"file:{tmp_path}") as bus:
            await Rights(bus).create("me", [EVERYTHING])
        async with running(tmp_path, "--host", "0.0.0.0") as broker:
            assert broker.process.returncode is None


def _files(folder: Path) -> tuple[bytes, set[int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    modes = {path.stat().st_mode & 0o777 for path in files if path.suffix == ".jsonl"}
    return b"".join(path.read_bytes() for path in files), modes


class TestTokens:
    async def test_nothing_of_a_token_is_kept_but_its_digest(self, tmp_path: Path) -> None:
        async with open_local(f"file:{tmp_path}") as bus:
            text, token = await Rights(bus).create("me", [EVERYTHING])
        secret = text.split("_", 2)[2]
        kept, modes = _files(tmp_path)
        assert secret.encode() not in kept
        assert token.digest.encode() in kept
        assert modes == {0o600}

    async def test_a_broker_sees_tokens_that_another_process_makes(self, tmp_path: Path) -> None:
        async with Broker(
            BrokerOptions(url=f"file:{tmp_path}", port=0, rights_s=0.05, metrics_s=0)
        ) as broker:
            async with peer(broker.url) as one:
                assert (await one.ask("PUBLISH", topic="t", payload=1))["type"] == "PUBLISHED"
                async with open_local(f"file:{tmp_path}") as bus:
                    text, _ = await Rights(bus).create("me", [Grant(("publish",), ("t",))])
                assert (await one.hear("ERROR"))["code"] == "unauthenticated"
            async with peer(broker.url, text) as one:
                assert (await one.ask("PUBLISH", topic="t", payload=1))["type"] == "PUBLISHED"
                assert (await one.ask("PUBLISH", topic="u", payload=1))["code"] == "denied"

    async def test_an_unguarded_broker_is_open_to_this_machine(self, tmp_path: Path) -> None:
        options = BrokerOptions(url="memory:", port=0)
        async with Broker(options) as broker, peer(broker.url) as one:
            assert (await one.subscribe(">", "g"))["type"] == "OK"


class TestTls:
    async def test_clients_and_broker_speak_tls(self, tmp_path: Path) -> None:
        import ssl

        import trustme

        authority = trustme.CA()
        cert = authority.issue_cert("localhost", "127.0.0.1")
        cert.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
        cert.private_key_pem.write_to_path(tmp_path / "key.pem")
        authority.cert_pem.write_to_path(tmp_path / "ca.pem")
        trust = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        options = BrokerOptions(
            url="memory:",
            port=0,
            tls_cert=str(tmp_path / "cert.pem"),
            tls_key=str(tmp_path / "key.pem"),
        )
        async with Broker(options) as broker:
            assert broker.url.startswith("wss://")
            async with RemoteBus(broker.url, tls=trust) as bus:
                assert (await bus.publish("t", 1)).offset == 1
            async with RemoteBus(broker.url, patience_s=0) as bus:  # to the first attempt's end
                with pytest.raises(ConnectionLost, match="no connection") as untrusted:
                    await bus.publish("t", 1)
            assert "tls=ssl.create_default_context(cafile=" in untrusted.value.hint

    async def test_a_client_without_a_certificate_is_refused_where_one_is_asked_for(
        self, tmp_path: Path
    ) -> None:
        import ssl

        import trustme

        authority = trustme.CA()
        authority.issue_cert("127.0.0.1").cert_chain_pems[0].write_to_path(tmp_path / "c.pem")
        server = authority.issue_cert("127.0.0.1")
        server.private_key_and_cert_chain_pem.write_to_path(tmp_path / "s.pem")
        authority.cert_pem.write_to_path(tmp_path / "ca.pem")
        options = BrokerOptions(
            url="memory:",
            host="127.0.0.1",
            port=0,
            tls_cert=str(tmp_path / "s.pem"),
            tls_client_ca=str(tmp_path / "ca.pem"),
        )
        mine = authority.issue_cert("client.example")
        mine.private_key_and_cert_chain_pem.write_to_path(tmp_path / "m.pem")
        trust = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        known = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        known.load_cert_chain(str(tmp_path / "m.pem"))
        async with Broker(options) as broker:
            async with RemoteBus(broker.url, tls=known) as bus:
                assert (await bus.publish("t", 1)).offset == 1
            stranger = RemoteBus(broker.url, tls=trust, patience_s=0.1, backoff_base_s=0.01)
            async with stranger as bus:
                with pytest.raises(Exception, match=r"no connection|lost"):
                    await bus.publish("t", 1)


class TestCertificates:
    """A client certificate stands for an agent, with the rights that were made for it."""

    @pytest.fixture
    def certified(self, tmp_path: Path) -> Any:
        import ssl

        import trustme

        authority = trustme.CA()
        authority.cert_pem.write_to_path(tmp_path / "ca.pem")
        server = authority.issue_cert("127.0.0.1")
        server.private_key_and_cert_chain_pem.write_to_path(tmp_path / "s.pem")

        def context(*names: str, common: str | None = None) -> ssl.SSLContext:
            mine = authority.issue_cert(*names, common_name=common)
            mine.private_key_and_cert_chain_pem.write_to_path(tmp_path / "m.pem")
            made = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
            made.load_cert_chain(str(tmp_path / "m.pem"))
            return made

        return context

    @pytest.fixture
    def settings(self, certified: Any, tmp_path: Path) -> dict[str, Any]:
        return {
            "rights_s": 0.05,
            "tls_cert": str(tmp_path / "s.pem"),
            "tls_client_ca": str(tmp_path / "ca.pem"),
        }

    @pytest.mark.parametrize(
        "names", [{"common": "shop"}, {"dns": "shop"}], ids=["common name", "alternative name"]
    )
    async def test_its_name_gives_the_rights(
        self, broker: Broker, certified: Any, names: dict[str, str]
    ) -> None:
        rights = broker.hub.rights
        text, token = await rights.create("shop", [Grant(("publish",), ("t",))], certificate=True)
        assert text == ""
        tls = certified(names.get("dns", "x.example"), common=names.get("common"))
        async with peer(broker.url, ssl=tls) as one:
            assert (await one.ask("PUBLISH", topic="t", payload=1))["type"] == "PUBLISHED"
            assert (await one.ask("PUBLISH", topic="u", payload=1))["code"] == "denied"
            (record,) = await broker.hub.bus.read("t")
            assert record.event.headers["auth_principal"] == "shop"
            base = broker.url.replace("ws", "http", 1)
            async with httpx.AsyncClient(base_url=base, verify=tls, trust_env=False) as http:
                done = await http.post("/topics/t/events", json={"payload": 1})
                assert done.status_code == 201
                assert (await http.get("/topics/t/events")).status_code == 403
            await rights.revoke(token.id)
            assert (await one.hear("ERROR"))["code"] == "unauthenticated"

    async def test_another_name_gives_none_and_a_token_comes_first(
        self, broker: Broker, certified: Any
    ) -> None:
        rights = broker.hub.rights
        await rights.create("shop", [EVERYTHING], certificate=True)
        text, _ = await rights.create("reader", [Grant(("read",), ("t",))])
        async with peer(broker.url, ssl=certified("shop.example")) as one:
            assert (await one.ask("PING"))["code"] == "unauthenticated"
        async with peer(broker.url, text, ssl=certified("shop")) as one:
            assert (await one.ask("PUBLISH", topic="t", payload=1))["code"] == "denied"
        secret = "tl_" + next(iter(rights.tokens)) + "_" + "A" * 43
        with pytest.raises(websockets.InvalidStatus):
            async with peer(broker.url, secret, ssl=certified("shop")):
                pass


def test_secrets_are_not_in_addresses() -> None:
    for url in ("ws://me:secret@host:7070", "ws://host?token=tl_1", "http://host"):
        with pytest.raises(InvalidOption) as caught:
            RemoteBus(url)
        assert "secret" not in str(caught.value)


class TestLists:
    """Lists of agents, with a hostile eye: on every door, by agent and by scope."""

    async def doors(self, broker: Broker, token: str) -> dict[str, bool]:
        """What a token may do with the topic, door by door."""
        base = broker.url.replace("ws", "http", 1)
        shown = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        found = {}
        async with (
            httpx.AsyncClient(base_url=base, headers=shown, trust_env=False) as http,
            peer(broker.url, token) as one,
        ):
            said = await one.ask("PUBLISH", topic="t", payload=1, headers={"scopes": "boss"})
            found["ws publish"] = said["type"] == "PUBLISHED"
            calls = {
                "http publish": ("POST", "/topics/t/events", '{"payload":1}'),
                "stream append": ("POST", "/v1/stream/t", "1"),
                "http read": ("GET", "/topics/t/events", None),
                "http tail": ("GET", "/topics/t/tail?from=earliest&limit=1", None),
                "stream read": ("GET", "/v1/stream/t", None),
                "http fetch": ("POST", "/topics/t/groups/g/fetch", "{}"),
            }
            for name, (method, path, body) in calls.items():
                done = await http.request(method, path, content=body)
                assert done.is_success or done.status_code == 403, (name, done.text)
                found[name] = done.is_success
            for topic in ("t", "*"):
                said = await one.subscribe(topic, "g")
                found[f"ws subscribe {topic}"] = said["type"] == "OK"
            said = await one.ask("CALL", op="read", args={"topic": "t"})
            found["ws read"] = said["type"] == "OK"
        return found

    @pytest.mark.parametrize(
        ("rules", "writes", "reads"),
        [
            ({"allow": ["ann"]}, {"ann"}, {"ann", "bob"}),
            ({"deny": ["ann"]}, {"bob"}, {"ann", "bob"}),
            ({"allow": ["till"], "deny": ["ann"]}, {"bob"}, {"ann", "bob"}),
            ({"allow": []}, set(), {"ann", "bob"}),
            ({"publishACL": ["*", "!till"]}, {"ann"}, {"ann", "bob"}),
            ({"subscribeACL": ["ann"]}, {"ann", "bob"}, {"ann"}),
            ({"subscribeACL": []}, {"ann", "bob"}, set()),
            ({"subscribe_acl": ["*", "!bob"]}, {"ann", "bob"}, {"ann"}),
        ],
    )
    async def test_a_list_counts_at_every_door(
        self, broker: Broker, rules: dict[str, Any], writes: set[str], reads: set[str]
    ) -> None:
        rights = broker.hub.rights
        grants = [Grant(("publish", "subscribe", "read"), ("*",), ("g",))]
        grants.append(Grant(("subscribe",), ("system.>",), ("g",)))
        texts = {
            "ann": (await rights.create("ann", grants))[0],
            "bob": (await rights.create("bob", grants, scopes=("till",)))[0],
        }
        ops, _ = await rights.create("ops", [EVERYTHING])
        base = broker.url.replace("ws", "http", 1)
        shown = {"authorization": f"Bearer {ops}"}
        async with httpx.AsyncClient(base_url=base, headers=shown, trust_env=False) as http:
            done = await http.post("/topics", json={"topic": "t", **rules})
            assert done.status_code == 201
            await http.post("/topics/t/events", json={"payload": 0})
        await broker.hub.bus.publish("t", 0)
        for agent, text in texts.items():
            for door, may in (await self.doors(broker, text)).items():
                wanted = writes if "publish" in door or "append" in door else reads
                if door == "ws subscribe *":
                    wanted = reads
                assert may is (agent in wanted), (agent, door)
        for record in await broker.hub.bus.read("t"):
            claimed = record.event.headers.get("scopes")
            assert claimed in (None, "till"), "a client cannot claim a scope"

    async def test_no_agent_has_a_name_that_a_list_reads_as_something_else(
        self, broker: Broker
    ) -> None:
        for name in ("*", "!ann", "!"):
            with pytest.raises(InvalidOption):
                await broker.hub.rights.create(name, [EVERYTHING])
