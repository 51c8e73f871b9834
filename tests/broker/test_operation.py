"""What an operator does to a running broker: settings, certificates, logs."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import socket
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from trunkline.access import Grant, Principal
from trunkline.broker.hub import Hub
from trunkline.broker.logs import JsonLines, Thinned
from trunkline.broker.options import ENVIRONMENT, gather
from trunkline.broker.server import Broker
from trunkline.errors import InvalidOption
from trunkline.options import BrokerOptions

from .client import Launch, peer, until

SAMPLES: dict[str, tuple[str, Any]] = {
    "url": ("file:x", "file:x"),
    "host": ("localhost", "localhost"),
    "auth": ("true", True),
    "origins": ("https://a.example, https://b.example", ("https://a.example", "https://b.example")),
    "hosts": ("a.example", ("a.example",)),
    "tls_cert": ("cert.pem", "cert.pem"),
    "tls_key": ("key.pem", "key.pem"),
    "policy": ("policy.toml", "policy.toml"),
    "tls_client_ca": ("ca.pem", "ca.pem"),
    "audit": ("0.5", 0.5),
    "frame_bytes": ("2048", 2048),
}


@pytest.mark.parametrize("name", BrokerOptions.__struct_fields__)
def test_every_setting_has_an_environment_variable(name: str) -> None:
    text, value = SAMPLES.get(name, ("7", 7))
    variable = f"TRUNKLINE_{name.upper()}"
    assert variable in ENVIRONMENT[name]
    assert getattr(gather({}, {variable: text}), name) == value


@pytest.mark.parametrize("variable", ["TRUNKLINE_AUTH", "TRUNKLINE_CONNECTIONS", "TRUNKLINE_AUDIT"])
def test_a_variable_that_cannot_be_read_is_named(variable: str) -> None:
    with pytest.raises(InvalidOption, match=variable):
        gather({}, {variable: "perhaps"})


def certify(folder: Path, authority: trustme.CA) -> int:
    """Write a new certificate; its serial number."""
    issued = authority.issue_cert("localhost", "127.0.0.1")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    for more in issued.cert_chain_pems[1:]:
        more.write_to_path(folder / "cert.pem", append=True)
    found = ssl._ssl._test_decode_cert(str(folder / "cert.pem"))  # type: ignore[attr-defined]
    return int(found["serialNumber"], 16)


def shown(port: int, authority: trustme.CA) -> int:
    """The serial number of the certificate that a client is shown."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as sock,
    ):
        found = sock.getpeercert()
        assert found is not None
        return int(str(found["serialNumber"]), 16)


async def test_a_certificate_is_read_anew_when_it_changes_and_on_a_signal(
    tmp_path: Path, launch: Launch
) -> None:
    authority = trustme.CA()
    first = certify(tmp_path, authority)
    files = ("--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem"))
    broker = await launch(tmp_path / "bus", *files)
    port = broker.port
    assert await asyncio.to_thread(shown, port, authority) == first

    second = certify(tmp_path, authority)
    await until(lambda: shown(port, authority) == second)
    stamp = os.stat(tmp_path / "cert.pem")
    third = certify(tmp_path, authority)
    for name in ("cert.pem", "key.pem"):
        os.utime(tmp_path / name, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    broker.process.send_signal(signal.SIGHUP)
    await until(lambda: shown(port, authority) == third)


async def test_settings_are_reloaded_and_those_that_cannot_be_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with Broker(BrokerOptions(url="memory:", port=0)) as broker:
        with caplog.at_level(logging.INFO, "trunkline.broker"):
            fresh = BrokerOptions(
                url="memory:", port=0, host="localhost", rate_frames_s=5, hosts=("a.example",)
            )
            await broker.reload(fresh)
        assert broker.hub.options.rate_frames_s == 5
        assert broker.hub.options.host == "127.0.0.1"
        assert broker._gate is not None
        assert broker._gate.refuses({"Host": "a.example"}) is None
    assert "need a new start of the broker: host" in caplog.text
    assert "reloaded: hosts, rate_frames_s" in caplog.text


async def test_a_bad_certificate_is_not_taken_over(tmp_path: Path) -> None:
    authority = trustme.CA()
    first = certify(tmp_path, authority)
    options = BrokerOptions(
        url="memory:",
        port=0,
        tls_cert=str(tmp_path / "cert.pem"),
        tls_key=str(tmp_path / "key.pem"),
    )
    async with Broker(options) as broker:
        (tmp_path / "cert.pem").write_text("garbage")
        with pytest.raises(InvalidOption, match="tls_cert"):
            await broker.reload(options)
        assert await asyncio.to_thread(shown, broker.port, authority) == first


def admitted(port: int, authority: trustme.CA, client: trustme.CA | None) -> bool:
    """Whether a client with a certificate of this authority gets an answer."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    if client is not None:
        client.issue_cert("till.example").configure_cert(context)
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=10) as raw,
            context.wrap_socket(raw, server_hostname="localhost") as sock,
        ):
            sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return sock.recv(12) == b"HTTP/1.1 200"
    except OSError:
        return False


async def test_an_authority_that_was_replaced_lets_nobody_in_any_more(
    tmp_path: Path, launch: Launch
) -> None:
    authority, old, new = trustme.CA(), trustme.CA(), trustme.CA()
    certify(tmp_path, authority)
    old.cert_pem.write_to_path(tmp_path / "clients.pem")
    files = [
        *("--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem")),
        *("--tls-client-ca", str(tmp_path / "clients.pem")),
    ]
    port = (await launch(tmp_path / "bus", *files)).port
    assert await asyncio.to_thread(admitted, port, authority, old)
    assert not await asyncio.to_thread(admitted, port, authority, new)
    new.cert_pem.write_to_path(tmp_path / "clients.pem")
    await until(lambda: admitted(port, authority, new))
    assert not await asyncio.to_thread(admitted, port, authority, old)
    assert not await asyncio.to_thread(admitted, port, authority, None)


async def test_tls_is_not_switched_off_by_a_reload(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = trustme.CA()
    first = certify(tmp_path, authority)
    files: dict[str, Any] = {
        "tls_cert": str(tmp_path / "cert.pem"),
        "tls_key": str(tmp_path / "key.pem"),
    }
    async with Broker(BrokerOptions(url="memory:", port=0, **files)) as broker:
        await broker.reload(BrokerOptions(url="memory:", port=0))
        assert broker.url.startswith("wss:")
        assert await asyncio.to_thread(shown, broker.port, authority) == first
    assert "need a new start of the broker: tls_cert, tls_key" in caplog.text


async def test_reloaded_settings_count_at_once() -> None:
    page = {"Origin": "https://app.example"}
    begun: dict[str, Any] = {"url": "memory:", "port": 0, "metrics_s": 0, "rate_frames_s": 100_000}
    async with Broker(BrokerOptions(**begun)) as broker, asking(broker) as http:
        hub = broker.hub
        body = {"payload": "x" * 2000}
        assert (await http.post("/topics/t/events", json=body)).status_code == 201
        assert (await http.get("/healthz", headers=page)).status_code == 403
        assert "system.metrics" not in await hub.bus.topics()

        changed = {"audit": 1.0, "metrics_s": 0.01, "frame_bytes": 1024, "rate_frames_s": 50_000}
        await broker.reload(
            BrokerOptions(**{**begun, **changed, "origins": ("https://app.example",)})
        )
        answer = await http.get("/healthz", headers=page)
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        asked = {**page, "Access-Control-Request-Method": "POST"}
        assert (await http.options("/topics", headers=asked)).status_code == 200
        assert (await http.post("/topics/t/events", json=body)).status_code == 413
        async with peer(broker.url) as one:
            await one.say("PUBLISH", topic="t", payload="x" * 2000)
            await one.socket.wait_closed()
            assert one.socket.close_code == 1009
        assert hub._buckets["local"].rate == 50_000
        await http.post("/topics/t/events", json={"payload": 1})
        await until_told(hub, "system.bus.audit")
        await until_told(hub, "system.metrics")

        await broker.reload(BrokerOptions(**begun))
        told = await hub.bus.bounds("system.metrics", 0)
        await http.post("/topics/t/events", json={"payload": 1})
        await asyncio.sleep(0.3)
        assert await hub.bus.bounds("system.metrics", 0) == told
        assert (await http.get("/healthz", headers=page)).status_code == 403


async def until_told(hub: Hub, topic: str) -> None:
    async with asyncio.timeout(20):
        while topic not in await hub.bus.topics() or not await hub.bus.read(topic):
            await asyncio.sleep(0.01)


async def test_the_service_manager_is_told_when_the_broker_is_ready(
    tmp_path: Path, launch: Launch
) -> None:
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(address)
        sock.settimeout(20)
        broker = await launch(tmp_path / "bus", env={"NOTIFY_SOCKET": address})
        assert await asyncio.to_thread(sock.recv, 100) == b"READY=1"
        broker.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(sock.recv, 100) == b"STOPPING=1"


def test_a_repeated_warning_is_thinned() -> None:
    now = [0.0]
    thinned = Thinned(lambda: now[0])
    said: list[str] = []

    def say(level: int, message: str, *args: object) -> None:
        record = logging.LogRecord("x", level, "", 0, message, args, None)
        if thinned.filter(record):
            said.append(record.getMessage())

    for _ in range(5):
        say(logging.ERROR, "disk %d is full", 0)
    say(logging.INFO, "hello")
    say(logging.INFO, "hello")
    now[0] = 11.0
    say(logging.ERROR, "disk %d is full", 9)
    assert said == ["disk 0 is full", "hello", "hello", "disk 9 is full (and 4 more like it)"]


def test_a_denial_of_one_agent_does_not_hide_that_of_another() -> None:
    thinned = Thinned(lambda: 0.0)
    passed = []
    for agent in ["bob", "bob", "eve", *(f"agent{n}" for n in range(1000))]:
        record = logging.LogRecord("x", logging.WARNING, "", 0, "denied: %s", (agent,), None)
        if thinned.filter(record):
            passed.append(agent)
    assert passed[:2] == ["bob", "eve"]
    assert len(passed) == 20, "nobody fills the log by asking under many names"


def test_a_line_of_the_log_is_json() -> None:
    record = logging.LogRecord("trunkline", logging.WARNING, "", 0, "denied: %s", ("bob",), None)
    record.agent = "bob"
    row = json.loads(JsonLines().format(record))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", row.pop("ts"))
    assert row == {
        "level": "warning",
        "logger": "trunkline",
        "message": "denied: bob",
        "agent": "bob",
    }


async def test_a_denial_is_logged_with_the_missing_grant(caplog: pytest.LogCaptureFixture) -> None:
    async with Broker(BrokerOptions(url="memory:", port=0, auth=True)) as broker:
        token, _ = await broker.hub.rights.create("bob", [Grant(("publish",), ("a",))])
        async with httpx.AsyncClient(
            base_url=broker.url.replace("ws", "http", 1), trust_env=False
        ) as client:
            headers = {"Authorization": f"Bearer {token}"}
            found = await client.post("/topics/b/events", json={"payload": 1}, headers=headers)
            assert found.status_code == 403
    assert "denied: bob may not publish b (missing: publish on b)" in caplog.text


def asking(broker: Broker, token: str = "") -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    base = broker.url.replace("ws", "http", 1)
    return httpx.AsyncClient(base_url=base, headers=headers, trust_env=False)


async def test_an_open_broker_refuses_lists_of_agents() -> None:
    async with Broker(BrokerOptions(url="memory:", port=0)) as broker, asking(broker) as http:
        refusable: list[dict[str, list[str]]] = [
            {"publishACL": ["bob"]},
            {"subscribeACL": ["bob"]},
            {"deny": ["bob"]},
            {"allow": []},
            {"subscribeACL": []},
        ]
        for lists in refusable:
            refused = await http.post("/topics", json={"topic": "t", **lists})
            assert (refused.status_code, refused.json()["code"]) == (409, "open_broker")
        assert (await http.get("/topics/t")).status_code == 404


async def test_a_function_does_not_make_lists_of_agents_mean_something() -> None:
    async with (
        Broker(BrokerOptions(url="memory:", port=0), acl=lambda *_: True) as broker,
        asking(broker) as http,
    ):
        asked: dict[str, Any] = {"topic": "t", "publish_acl": ["bob"]}
        assert (await http.post("/topics", json=asked)).status_code == 409
        found = await http.post("/definitions", json={"topics": [asked]})
        assert found.status_code == 400
        assert (await http.get("/topics/t")).status_code == 404


async def test_allow_deny_and_scopes_decide_which_agent_publishes() -> None:
    async with Broker(BrokerOptions(url="memory:", port=0, auth=True)) as broker:
        rights, anything = broker.hub.rights, [Grant(("publish", "read"), (">",))]
        tokens = {
            "ann": await rights.create("ann", anything),
            "bob": await rights.create("bob", anything, scopes=("shop",)),
            "eve": await rights.create("eve", anything, scopes=("shop", "guest")),
            "ops": await rights.create("ops", [Grant(("admin",), (">",))]),
        }
        async with asking(broker, tokens["ops"][0]) as http:
            asked = {"topic": "t", "allow": ["ann", "shop"], "deny": ["guest"]}
            assert (await http.post("/topics", json=asked)).status_code == 201
        found = {}
        for name in ("ann", "bob", "eve"):
            async with asking(broker, tokens[name][0]) as http:
                event = {"payload": name, "headers": {"scopes": "everything"}}
                found[name] = (await http.post("/topics/t/events", json=event)).status_code
        assert found == {"ann": 201, "bob": 201, "eve": 403}
        events = [record.event for record in await broker.hub.bus.read("t", 1)]
        assert [event.headers.get("scopes") for event in events] == [None, "shop"]


async def test_a_function_decides_besides_tokens() -> None:
    asked: list[tuple[str, str, str]] = []

    def acl(topic: str, action: str, who: Principal) -> bool:
        asked.append((topic, action, who.agent))
        return topic != "secret"

    async with (
        Broker(BrokerOptions(url="memory:", port=0), acl=acl) as broker,
        asking(broker) as http,
    ):
        statuses = [
            (await http.post(f"/topics/{topic}/events", json={"payload": 1})).status_code
            for topic in ("open", "secret")
        ]
    assert statuses == [201, 403]
    assert ("secret", "publish", "local") in asked


async def test_a_token_for_one_group_reads_nothing_else(launch: Launch, tmp_path: Path) -> None:
    from files.harness import TRUNKLINE, runner

    cli = runner(TRUNKLINE, tmp_path)
    made = cli("token", "create", "biller", "--subscribe", "orders", "--group", "billing", "-q",
               "--url", f"file:{tmp_path / 'bus'}")  # fmt: skip
    token = made.out.decode().strip()
    assert cli("pub", "orders", "1", "--url", f"file:{tmp_path / 'bus'}").code == 0
    broker = await launch(tmp_path / "bus")
    async with httpx.AsyncClient(base_url=broker.http, trust_env=False) as http:
        headers = {"Authorization": f"Bearer {token}"}
        assert (await http.get("/topics/orders/events", headers=headers)).status_code == 403
