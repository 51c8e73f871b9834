"""A broker in a process of its own: killed, ended, restarted, and nobody loses anything."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import pytest
import websockets

import trunkline
from trunkline.bus.connect import open_local
from trunkline.bus.remote import RemoteBus
from trunkline.errors import TrunklineError

from .client import Launch, Peer, peer, running, until

ROOT = Path(__file__).resolve().parents[2]


async def test_the_recipe_publish_consume_kill_restart_resume(
    tmp_path: Path, launch: Launch
) -> None:
    """Publish at a rate; a group from offset 0 with a window of 10; kill -9; it resumes from its
    floor, and everything that was acknowledged is there.
    """
    broker = await launch(tmp_path)
    sent: list[int] = []
    seen: list[tuple[int, int, int]] = []

    async def publish(bus: RemoteBus) -> None:
        for n in range(300):
            receipt = await bus.publish("test.topic", {"n": n})
            sent.append(receipt.offset)
            await asyncio.sleep(0.002)

    async def consume(bus: RemoteBus) -> None:
        async with bus.subscribe("test.topic", group="g1", start=0, max_inflight=10) as stream:
            async for delivery in stream:
                seen.append((delivery.offset, delivery.attempt, delivery.event.payload["n"]))
                await delivery.ack()

    async with (
        RemoteBus(broker.url, backoff_base_s=0.05) as one,
        RemoteBus(broker.url, backoff_base_s=0.05) as two,
    ):
        publishing = asyncio.ensure_future(publish(one))
        consuming = asyncio.ensure_future(consume(two))
        for enough in (60, 160):
            await until(partial(_reached, seen, enough))
            broker.kill()
            await broker.process.wait()
            floor = await _floor(tmp_path)
            broker = await launch(tmp_path, port=broker.port)
            assert floor >= enough - 20, "acks advance the group"
        await asyncio.wait_for(publishing, 30)
        await until(lambda: len({offset for offset, _, _ in seen}) == 300, 30)
        consuming.cancel()
        await asyncio.gather(consuming, return_exceptions=True)
    assert sent == list(range(1, 301)), "one record for each event, in order, in spite of the kills"
    assert {n for _, _, n in seen} == set(range(300))
    assert len(seen) <= 300 + 2 * 10 * 3, "no more comes again than was in flight"
    assert await broker.end() == 0


def _reached(seen: list[Any], enough: int) -> bool:
    return len(seen) >= enough


async def _floor(folder: Path) -> int:
    async with open_local(f"file:{folder}", create=False) as bus:
        for key in await bus.store.groups():
            return await bus.store.update(key, lambda group: group.floor)
    return 0


async def test_without_acks_everything_comes_again_and_ends_as_dead_letters(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, "--ack-timeout-ms", "100") as broker:
        async with httpx.AsyncClient(base_url=broker.http, trust_env=False) as http:
            await http.post("/topics", json={"topic": "test.topic", "maxAttempts": 3})
            async with peer(broker.url) as one:
                for n in range(5):
                    await one.ask("PUBLISH", topic="test.topic", payload=n)
                await one.subscribe("test.topic", "g1", max_inflight=10)
                tries = [(await one.hear("MESSAGE"))["attempt"] for _ in range(15)]
                assert sorted(tries) == [1] * 5 + [2] * 5 + [3] * 5
                async with asyncio.timeout(10):
                    while True:
                        found = (await http.get("/topics/test.topic/dlq")).json()["letters"]
                        if len(found) == 5:
                            break
                        await asyncio.sleep(0.05)
        assert {letter["attempts"] for letter in found} == {3}


async def test_a_client_that_reads_late_is_told_what_was_kept_before_the_end(
    tmp_path: Path, launch: Launch
) -> None:
    """Of two that flood the broker and do not read, one reads what it is owed after SIGTERM."""
    broker = await launch(tmp_path)
    answered = 0
    async with (
        peer(broker.url, max_queue=1) as reads,
        peer(broker.url, max_queue=1) as never,
    ):

        async def flood(one: Peer, topic: str) -> None:
            with contextlib.suppress(websockets.ConnectionClosed):
                for n in range(1_000_000):
                    await one.say("PUBLISH", topic=topic, payload="x" * 500, corr=n)

        floods = [asyncio.ensure_future(flood(one, t)) for one, t in ((reads, "t"), (never, "u"))]
        async with open_local(f"file:{tmp_path}") as log:
            await until(lambda: at_least(log, "t", 10_000))
        for one in floods:
            one.cancel()
        started = monotonic()
        ending = asyncio.ensure_future(broker.end())
        with contextlib.suppress(websockets.ConnectionClosed):
            async for said in reads.socket:
                answered += json.loads(said)["type"] == "PUBLISHED"
        assert reads.socket.close_code == 1012
        assert await ending == 0
        assert monotonic() - started < 5
        never.socket.transport.abort()
    async with open_local(f"file:{tmp_path}") as log:
        assert await log.bounds("t") == (1, answered + 1)


async def at_least(log: Any, topic: str, count: int) -> bool:
    return bool((await log.bounds(topic))[1] > count)


async def test_nothing_that_was_acknowledged_is_lost_at_the_end(
    tmp_path: Path, launch: Launch
) -> None:
    """SIGTERM under load: out within 5 seconds, and clients come back by themselves."""
    broker = await launch(tmp_path)
    acknowledged: set[int] = set()
    unsure = 0

    async def publish(bus: RemoteBus, number: int) -> None:
        nonlocal unsure
        for n in range(100_000):
            try:
                acknowledged.add((await bus.publish("t", [number, n])).offset)
            except TrunklineError:
                unsure += 1
                return

    async with RemoteBus(broker.url, backoff_base_s=0.05) as bus:
        tasks = [asyncio.ensure_future(publish(bus, number)) for number in range(32)]
        async with bus.subscribe("t", group="g") as stream:
            for _ in range(100):
                await (await anext(stream)).ack()
            started = monotonic()
            code = await broker.end(10)
            took = monotonic() - started
            before = len(acknowledged)
            broker = await launch(tmp_path, port=broker.port)
            await until(lambda: len(acknowledged) >= before + 200)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    assert (code, unsure) == (0, 0)
    assert took < 5
    assert await broker.end() == 0
    async with open_local(f"file:{tmp_path}") as log:
        kept: dict[int, Any] = {}
        at = 1
        while records := await log.read("t", at, 10_000):
            kept.update({record.offset: record.event.payload for record in records})
            at = records[-1].offset + 1
    assert acknowledged <= kept.keys()
    assert len({tuple(payload) for payload in kept.values()}) == len(kept), "nothing is there twice"


async def test_two_brokers_may_serve_one_folder(tmp_path: Path) -> None:
    async with (
        running(tmp_path) as first,
        running(tmp_path) as second,
        peer(first.url) as one,
        peer(second.url) as two,
    ):
        await two.subscribe("t", "g")
        for n in range(5):
            await one.ask("PUBLISH", topic="t", payload=n)
        found = [(await two.hear("MESSAGE"))["envelope"]["payload"] for _ in range(5)]
        assert found == list(range(5))
        await one.subscribe("t", "g")
        second.kill()
        again = [await one.hear("MESSAGE") for _ in range(5)]
        # The client had the records, and it lives: the end of a broker is nobody's failure.
        assert {message["attempt"] for message in again} == {1}


class TestServe:
    @pytest.mark.parametrize("name", ["BUS_PORT", "TRUNKLINE_PORT"])
    async def test_the_environment_is_read(self, tmp_path: Path, name: str) -> None:
        from trunkline.broker.options import gather

        assert gather({}, {name: "7999"}).port == 7999
        assert gather({"port": 1}, {name: "7999"}).port == 1
        file = tmp_path / "broker.toml"
        file.write_text("[broker]\nport = 5\nmax_inflight = 9\n")
        found = gather({}, {name: "7999", "BUS_ACK_TIMEOUT_MS": "1500"}, str(file))
        assert (found.port, found.max_inflight, found.ack_timeout_s) == (7999, 9, 1.5)
        assert gather({}, {}, str(file)).port == 5
        assert gather({}, {"BUS_PORT": "1", "TRUNKLINE_PORT": "2"}).port == 2
        assert gather({}, {"BUS_MAX_INFLIGHT": "3", "TRUNKLINE_URL": "memory:"}).url == "memory:"

    async def test_what_is_wrong_is_told(self, tmp_path: Path) -> None:
        from trunkline.broker.options import gather

        for flags, environ in (({"port": -1}, {}), ({}, {"BUS_PORT": "x"}), ({"no": 1}, {})):
            with pytest.raises(trunkline.InvalidOption):
                gather(flags, environ)
        file = tmp_path / "broker.toml"
        for text in ("[broker", "broker = 1"):
            file.write_text(text)
            with pytest.raises(trunkline.InvalidOption):
                gather({}, {}, str(file))


def _node() -> str | None:
    found = shutil.which("node")
    if found is None or shutil.which("npm") is None:
        if os.environ.get("CI"):
            pytest.fail("node and npm are needed here")
        pytest.skip("there is no node")
    return found


async def test_a_node_client_publishes_subscribes_and_acks(tmp_path: Path) -> None:
    node = _node()
    client = ROOT / "examples" / "node_client"
    work = tmp_path / "client"
    shutil.copytree(client, work, ignore=shutil.ignore_patterns("node_modules"))
    installed = await asyncio.to_thread(
        subprocess.run,
        ["npm", "install", "--no-audit", "--no-fund", "--prefer-offline", "--loglevel=error"],
        cwd=work,
        capture_output=True,
        text=True,
        timeout=50,
    )
    if installed.returncode != 0:
        if os.environ.get("CI"):
            pytest.fail(installed.stderr)
        pytest.skip("the npm package ws cannot be installed here")
    async with running(tmp_path / "bus") as broker:
        done = await asyncio.to_thread(
            subprocess.run,
            [str(node), "client.mjs"],
            cwd=work,
            env={**os.environ, "BUS_URL": broker.url},
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout.splitlines()[-1])
        assert said == {"published": 20, "received": 20, "retried": 1, "errors": 1}
        async with httpx.AsyncClient(base_url=broker.http, trust_env=False) as http:
            async with asyncio.timeout(10):
                while True:
                    page = (await http.get("/topics/heartbeat.received/offsets")).json()
                    if page["partitions"][0]["groups"][0]["lastCommitted"] == 20:
                        break
                    await asyncio.sleep(0.05)


async def test_a_client_gives_up_after_its_patience(tmp_path: Path) -> None:
    async with RemoteBus("ws://127.0.0.1:9", patience_s=0.2, backoff_base_s=0.02) as bus:
        with pytest.raises(trunkline.TrunklineError, match="no connection"):
            await bus.publish("t", 1)


async def test_what_is_said_after_a_repeat_is_kept_after_it(tmp_path: Path) -> None:
    """To look for an event in the log takes its time."""
    async with running(tmp_path) as broker, peer(broker.url) as one:
        await one.ask("PUBLISH", topic="t", payload=0)
        for n in range(1, 101, 5):
            events = [{"topic": "t", "event_id": f"e{n + k}", "payload": n + k} for k in range(5)]
            await one.say("PUBLISH", corrs=[1, 2], events=events[:2], again=True)
            await one.say("PUBLISH", corr=3, events=events[2:4], again=True)
            await one.say("PUBLISH", corr=4, event=events[4])
            found: dict[int, int] = {}
            while len(found) < 4:
                said = await one.hear("PUBLISHED")
                found[said["corr"]] = said["offset"]
            assert found == {1: n + 1, 2: n + 2, 3: n + 3, 4: n + 5}


async def test_an_event_sent_again_is_kept_once(tmp_path: Path) -> None:
    """The connection breaks after the broker kept the event and before the client knew."""
    async with running(tmp_path) as broker:
        event = {"event_id": "e1", "topic": "t", "payload": 1, "ts": "2026-01-01T00:00:00Z"}
        async with peer(broker.url) as one:
            first = await one.ask("PUBLISH", event=event)
        async with peer(broker.url) as one:
            again = await one.ask("PUBLISH", event=event, again=True)
            batch = await one.ask(
                "PUBLISH", events=[event, {**event, "event_id": "e2"}], again=True
            )
            assert (first["offset"], again["offset"]) == (1, 1)
            assert batch["count"] == 2
            assert (await one.ask("PUBLISH", topic="t", payload=3))["offset"] == 3
