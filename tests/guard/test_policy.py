"""A policy decides by role and attribute, and says which grant is missing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import trunkline
from trunkline.cli import main
from trunkline.errors import Denied, Invalid, InvalidOption
from trunkline.event import Event
from trunkline.guard.policy import Policy, Question
from trunkline.guard.policy_guard import PolicyFile, PolicyGuard
from trunkline.testing import ManualClock

TEXT = """
[actors]
anna = ["clerk"]
"till-*" = ["service"]
boss = ["chief"]

[roles.chief]
includes = ["clerk"]
[[roles.chief.allow]]
actions = ["publish", "read", "admin"]
topics = [">", "system.>", "*.DLQ", "*.*.DLQ", "*.*.DLQ.DLQ"]
band = "BLACK"
caps = ["pci", "write"]

[[roles.clerk.allow]]
actions = ["publish", "read"]
topics = ["orders", "orders.>"]
spaces = ["sales", "shop:*"]
band = "AMBER"
caps = ["write"]
[[roles.clerk.deny]]
actions = ["read"]
topics = ["orders.secret"]

[[roles.service.allow]]
actions = ["publish"]
topics = ["orders"]
devices = ["till-*"]
hours = "08:00-18:00"
days = ["mon", "tue", "wed", "thu", "fri"]
zone = "Europe/Berlin"
"""
MONDAY_10 = datetime(2026, 11, 16, 9, 0, tzinfo=UTC)  # in Berlin
POLICY = Policy.parse(tomllib.loads(TEXT))


def decide(actor: str, action: Any, topic: str, now: datetime = MONDAY_10, **fields: Any) -> Any:
    device = fields.pop("device", "")
    return POLICY.decide(Question(actor, action, topic, now, device, Event(topic=topic, **fields)))


def test_a_rule_allows_by_topic_space_band_and_capability() -> None:
    assert decide("anna", "publish", "orders", space="sales").allowed
    assert decide(
        "anna", "read", "orders.eu", space="shop:1", band="AMBER", caps=("write",)
    ).allowed
    assert decide("boss", "publish", "anything", band="BLACK", caps=("pci",)).allowed


@pytest.mark.parametrize(
    ("actor", "action", "topic", "fields", "missing"),
    [
        ("anna", "publish", "orders", {}, "space none is not in sales, shop:*"),
        ("anna", "publish", "orders", {"space": "hr"}, "space hr is not in"),
        ("anna", "publish", "orders", {"space": "sales", "band": "RED"}, "RED is above AMBER"),
        ("anna", "read", "orders", {"space": "sales", "caps": ("pci",)}, "capability pci"),
        ("anna", "admin", "orders", {"space": "sales"}, "no rule of 'anna' (roles: clerk)"),
        ("anna", "read", "orders.secret", {"space": "sales"}, "roles.clerk.deny[0] denies it"),
        ("boss", "read", "orders.secret", {}, "roles.clerk.deny[0] denies it"),
        ("boss", "read", "orders.secret.DLQ", {}, "roles.clerk.deny[0] denies it"),
        ("boss", "read", "orders.secret.DLQ.DLQ", {}, "roles.clerk.deny[0] denies it"),
        ("anna", "read", "orders.DLQ", {"space": "sales"}, "no rule"),
        ("eve", "read", "orders", {}, "no rule of 'eve' (roles: none)"),
        ("till-1", "publish", "orders", {}, "device unknown is not in till-*"),
    ],
)
def test_a_denial_names_the_missing_grant(
    actor: str, action: str, topic: str, fields: dict[str, Any], missing: str
) -> None:
    decision = decide(actor, action, topic, **fields)
    assert not decision.allowed
    assert missing in decision.missing
    assert decision.missing.startswith(f"{action} on {topic}")


def test_attributes_of_time() -> None:
    def at(*when: int) -> Any:
        now = datetime(*when, tzinfo=UTC)  # type: ignore[arg-type, misc]
        return decide("till-7", "publish", "orders", now, device="till-7")

    assert at(2026, 11, 16, 7, 0).allowed  # 08:00 in Berlin
    assert at(2026, 11, 16, 16, 59).allowed
    assert "time 18:00 Europe/Berlin is outside 08:00-18:00" in at(2026, 11, 16, 17, 0).missing
    assert "day sun is not in" in at(2026, 11, 15, 10, 0).missing
    night = Policy.parse(
        {
            "actors": {"x": ["r"]},
            "roles": {
                "r": {"allow": [{"actions": ["read"], "topics": [">"], "hours": "22:00-06:00"}]}
            },
        }
    )
    for hour, allowed in ((23, True), (5, True), (6, False), (21, False)):
        now = datetime(2026, 11, 16, hour, tzinfo=UTC)
        assert night.decide(Question("x", "read", "t", now)).allowed is allowed


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("actors = {a = ['none']}", "there is no role 'none'"),
        ("[[roles.r.allow]]\nactions=['write']\ntopics=['t']", "actions"),
        ("[[roles.r.allow]]\nactions=['read']\ntopics=['a b']", "a b"),
        ("[[roles.r.allow]]\nactions=['read']\ntopics=['t']\nhours='8-18'", "not hours"),
        ("[[roles.r.allow]]\nactions=['read']\ntopics=['t']\nzone='Mars'", "no time zone"),
        ("[[roles.r.allow]]\nactions=['read']\ntopics=['t']\nbands=['RED']", "no field"),
        ("[[roles.r.allow]]\nactions=['read']\ntopics=[]", "has actions and topics"),
        ("[roles.r]\nincludes=['s']", "there is no role 's'"),
    ],
)
def test_a_wrong_policy_is_refused(text: str, said: str) -> None:
    with pytest.raises(Invalid, match=re.escape(said)):
        Policy.parse(tomllib.loads(text))


async def test_the_guard_denies_before_the_append_and_before_the_handler() -> None:
    handled = []
    async with trunkline.connect("memory:") as bus:
        await bus.publish("orders", "by hand", space="hr")  # before there was a policy
        bus.use(PolicyGuard(bus, POLICY, "anna"))

        @bus.on("orders", group="desk")
        async def handle(event: Event) -> None:
            handled.append(event.payload)

        with pytest.raises(Denied, match="band RED is above AMBER") as denied:
            await bus.publish("orders", 1, space="sales", band="RED")
        assert "band RED" in denied.value.missing
        await bus.publish("orders", 2, space="sales")
        await bus.drain(10)
        assert handled == [2]
        assert [r.event.payload for r in await bus.read("orders")] == ["by hand", 2]
        (letter,) = [one async for one in bus.dead_letters("orders").letters()]
        assert "space hr is not in" in letter.error
        told = [record.event.payload for record in await bus.read("system.bus.audit")]
    assert sorted((one["action"], one["agent"], one["topic"]) for one in told) == [
        ("publish", "anna", "orders"),
        ("read", "anna", "orders"),
    ]
    assert all("missing" in one and one["what"] == "denied" for one in told)


def test_the_file_is_read_again_and_a_wrong_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "policy.toml", ManualClock()
    path.write_text(TEXT)
    file = PolicyFile(path, clock=clock)
    ask = Question("eve", "read", "orders", MONDAY_10)
    assert not file.policy.decide(ask).allowed
    path.write_text(TEXT.replace("anna =", "eve =") + "\n")
    assert not file.policy.decide(ask).allowed  # not looked at yet
    clock.advance(1.0)
    assert file.policy.decide(ask).allowed
    path.write_text("actors = 1")
    clock.advance(1.0)
    assert file.policy.decide(ask).allowed
    assert "the policy stays as it was" in caplog.text
    os.unlink(path)
    clock.advance(1.0)
    assert file.policy.decide(ask).allowed


def test_the_command_checks_and_explains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(TEXT)
    assert main(["policy", "check", str(path)]) == 0
    assert "3 actors, 3 roles, 4 rules: valid" in capsys.readouterr().out
    words = ["policy", "explain", str(path), "anna", "publish", "orders"]
    assert main([*words, "--space", "sales", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rule"] == "roles.clerk.allow[0]"
    assert main([*words, "--space", "sales", "--band", "RED"]) == 1
    assert "denied: publish on orders in sales: band RED" in capsys.readouterr().out
    assert main(["policy", "explain", str(path), "till-1", "publish", "orders"]) == 1
    path.write_text("[roles")
    assert main(["policy", "check", str(path)]) == 4


async def test_every_door_of_a_broker_asks_the_policy(tmp_path: Path) -> None:
    pytest.importorskip("picows")
    httpx = pytest.importorskip("httpx")
    from trunkline.broker.server import Broker
    from trunkline.broker.tokens import Rights
    from trunkline.bus.connect import open_local
    from trunkline.options import BrokerOptions

    path = tmp_path / "policy.toml"
    path.write_text(TEXT)
    url = f"file:{tmp_path / 'bus'}"
    async with open_local(url) as bus:
        rights = Rights(bus)
        from trunkline.access import EVERYTHING

        anna, _ = await rights.create("anna", [EVERYTHING])
        boss, _ = await rights.create("boss", [EVERYTHING])
        await bus.publish("orders", "red", space="sales", band="RED")
        await bus.publish("orders", "green", space="sales")
    options = BrokerOptions(url=url, port=0, policy=str(path), rights_s=0.05, metrics_s=0)
    async with Broker(options) as broker:
        http = broker.url.replace("ws", "http", 1)
        shown = {"Authorization": f"Bearer {anna}"}
        async with trunkline.connect(broker.url, token=anna) as bus:
            with pytest.raises(Denied, match=r"^access denied"):
                await bus.publish("orders", 1, space="sales", band="RED")
            with pytest.raises(Denied):
                await bus.publish("other", 1)
            await bus.publish("orders", "mine", space="sales")
            assert [r.event.payload for r in await bus.read("orders")] == ["green", "mine"]
            got = []
            async with bus.subscribe("orders", group="g") as deliveries:
                async for delivery in deliveries:
                    got.append(delivery.event.payload)
                    await delivery.ack()
                    if len(got) == 2:
                        break
            assert got == ["green", "mine"]
        async with httpx.AsyncClient(base_url=http, headers=shown) as client:
            answer = await client.get("/topics/orders/events")
            assert [e["payload"] for e in answer.json()["events"]] == ["green", "mine"], answer.text
            assert (await client.get("/topics/orders/events/0/1")).status_code == 403
            sent = await client.post(
                "/topics/orders/events", json={"payload": 1, "headers": {"space": "hr"}}
            )
            assert sent.status_code == 403
        # The policy changes while the broker runs.
        path.write_text(TEXT.replace('band = "AMBER"', 'band = "RED"'))
        async with asyncio.timeout(10), trunkline.connect(broker.url, token=anna) as bus:
            while True:
                try:
                    await bus.publish("orders", "red now", space="sales", band="RED")
                    break
                except Denied:
                    await asyncio.sleep(0.05)
        async with trunkline.connect(broker.url, token=boss) as bus:
            letters = [one async for one in bus.dead_letters("orders").letters()]
            assert [one.event.payload for one in letters] == ["red"]
    async with trunkline.connect(url) as bus:
        told = [record.event.payload for record in await bus.read("system.bus.audit")]
    missing = [one.get("missing", "") for one in told if one["what"] == "denied"]
    assert any("publish on other: no rule" in one for one in missing)
    async with trunkline.connect(url) as bus:  # what tells of every dead letter quotes none of them
        (mirror,) = [record.event for record in await bus.read("system.bus.dlq")]
    assert "payload" not in mirror.payload
    assert (mirror.space, mirror.band) == ("sales", "RED")
    assert any("band RED is above AMBER" in one for one in missing)
    assert any("read on orders" in one for one in missing)


KEEPER = """
[actors]
keeper = ["keeper"]
[[roles.keeper.allow]]
actions = ["admin", "read"]
topics = ["orders", "orders.DLQ"]
"""


async def test_an_admin_of_a_topic_gets_no_letter_that_the_policy_forbids(tmp_path: Path) -> None:
    """Neither by redriving and dropping it, nor by asking with a filter which ones there are."""
    pytest.importorskip("picows")
    httpx = pytest.importorskip("httpx")
    from trunkline.access import EVERYTHING
    from trunkline.broker.server import Broker
    from trunkline.broker.tokens import Rights
    from trunkline.bus.connect import open_local
    from trunkline.options import BrokerOptions

    path = tmp_path / "policy.toml"
    path.write_text(KEEPER)
    url = f"file:{tmp_path / 'bus'}"
    async with open_local(url) as bus:
        keeper, _ = await Rights(bus).create("keeper", [EVERYTHING])
        await bus.publish("orders", "red", band="RED")
        await bus.publish("orders", "green")
        async with bus.subscribe("orders", group="g") as deliveries:
            async for delivery in deliveries:
                await delivery.term("bad")
                if delivery.offset == 2:
                    break
    options = BrokerOptions(url=url, port=0, policy=str(path), metrics_s=0)
    async with Broker(options) as broker:
        async with trunkline.connect(broker.url, token=keeper) as bus:
            link = bus.link  # type: ignore[attr-defined]
            shown = [one.event.payload async for one in bus.dead_letters("orders").letters()]
            assert shown == ["green"]
            for op in ("redrive", "drop"):
                for chosen in ({"offsets": [1]}, {"where": "payload = 'red'"}):
                    found = await link.call(op, topic="orders", dry_run=True, **chosen)
                    assert found == [], (op, chosen)
                (found,) = await link.call(op, topic="orders", dry_run=True)
                assert found.get("letter", found)["event"]["payload"] == "green"
        bearer = {"Authorization": f"Bearer {keeper}", "Prefer": "wait=10"}
        http = broker.url.replace("ws", "http", 1)
        async with httpx.AsyncClient(base_url=http, headers=bearer) as client:
            answer = await client.post("/topics/orders/dlq/drop", json={"where": "payload = 'red'"})
            assert answer.json()["dropped"] == [], answer.text
            answer = await client.post("/topics/orders/dlq/redrive", json={})
            assert [one["offset"] for one in answer.json()["redriven"]] == [2], answer.text
    async with open_local(url) as bus:
        left = [one.event.payload async for one in bus.dead_letters("orders").letters()]
    assert left == ["red"]


def test_a_guard_needs_an_actor() -> None:
    with pytest.raises(InvalidOption):
        PolicyGuard(trunkline.connect("memory:"), POLICY, "")


READER = """
[actors]
anna = ["reader"]
[[roles.reader.allow]]
actions = ["read", "publish", "admin"]
topics = [">", "*.DLQ", "system.>"]
[[roles.reader.deny]]
actions = ["read"]
topics = ["secret"]
"""


async def test_no_route_of_a_broker_shows_a_record_that_the_policy_denies(tmp_path: Path) -> None:
    """Each route of HTTP, and every kind of subscription: whoever adds a route adds it here."""
    pytest.importorskip("picows")
    httpx = pytest.importorskip("httpx")
    from trunkline.access import EVERYTHING
    from trunkline.broker.routes import ENDPOINTS
    from trunkline.broker.server import Broker
    from trunkline.broker.tokens import Rights
    from trunkline.bus.connect import open_local
    from trunkline.options import BrokerOptions

    (tmp_path / "policy.toml").write_text(READER)
    url, shown = f"file:{tmp_path / 'bus'}", []
    async with open_local(url) as bus:
        anna, _ = await Rights(bus).create("anna", [EVERYTHING])
        await bus.publish("orders", "CANARY", band="RED")
        await bus.publish("orders", "fine")
        await bus.publish_many("secret", ["CANARY", "CANARY again"])
        for topic in ("orders", "secret"):
            async with bus.subscribe(topic, group="g") as deliveries:
                async for delivery in deliveries:
                    await delivery.term("bad")
                    if delivery.offset == 2:
                        break
    options = BrokerOptions(url=url, port=0, policy=str(tmp_path / "policy.toml"), metrics_s=0)
    queries: dict[str, dict[str, Any]] = {
        "tail": {"from": "earliest", "limit": 1},
        "stream": {"offset": "-1"},
    }
    async with Broker(options) as broker:
        bearer = {"Authorization": f"Bearer {anna}", "Prefer": "wait=5"}
        http = broker.url.replace("ws", "http", 1)
        async with httpx.AsyncClient(base_url=http, headers=bearer, timeout=20) as client:
            for one in ENDPOINTS:
                is_asking = one.method == "GET" or one.path.endswith(("fetch", "redrive", "/drop"))
                if not is_asking or "{job}" in one.path:
                    continue
                for topic in ("orders", "secret", "orders.DLQ", "secret.DLQ"):
                    path = one.path.replace("{topic}", topic).replace("{group}", "h")
                    path = path.replace("{partition:int}/{offset:int}", "0/1")
                    words = [text for text in queries if text in path]
                    is_tail = path.endswith("/tail")
                    if is_tail and topic != "orders":
                        continue  # it would wait for what never comes
                    params = queries[words[0]] if words else {"closed": "true"}
                    params = params if words or path.endswith("/dlq") else {}
                    body: dict[str, Any] | None = None if one.method == "GET" else {"dry_run": True}
                    if path.endswith("fetch"):
                        body = {"limit": 10}
                    answer = await client.request(one.method, path, params=params, json=body)
                    assert answer.status_code < 500, (path, answer.text)
                    shown.append((one.method, path, answer.text))
        async with trunkline.connect(broker.url, token=anna) as bus:
            for number, pattern in enumerate((">", "*", "*.DLQ", "orders", "system.bus.dlq")):
                with contextlib.suppress(TimeoutError, Denied):
                    stream = bus.subscribe(pattern, group=f"w{number}")
                    async with asyncio.timeout(1), stream as deliveries:
                        async for delivery in deliveries:
                            shown.append(("subscribe", pattern, repr(delivery.event)))
                            await delivery.ack()
            for topic in ("orders", "secret", "orders.DLQ", "secret.DLQ", "system.bus.dlq"):
                with contextlib.suppress(Denied):
                    shown += [("read", topic, repr(one)) for one in await bus.read(topic)]
            for topic in ("orders", "secret"):
                with contextlib.suppress(Denied):
                    async for letter in bus.dead_letters(topic).letters(closed=True):
                        shown.append(("letters", topic, repr(letter)))
    assert [one for one in shown if "CANARY" in one[2]] == []
    seen = {(kind, path) for kind, path, text in shown if "fine" in text}
    assert {("GET", "/topics/orders/events"), ("GET", "/topics/orders/log")} <= seen
    assert {("GET", "/v1/stream/orders"), ("GET", "/topics/orders/tail")} <= seen
    assert {("POST", "/topics/orders/groups/h/fetch"), ("GET", "/topics/orders/dlq")} <= seen
    assert {("subscribe", "orders"), ("read", "orders"), ("letters", "orders")} <= seen
