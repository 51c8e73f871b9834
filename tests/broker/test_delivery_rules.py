"""What clients on the wire may rely on: acks, tries, and connections that end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from trunkline.broker.server import Broker
from trunkline.broker.session import Session
from trunkline.bus.connect import connect
from trunkline.bus.remote import RemoteBus
from trunkline.bus.remote_subscription import RemoteSubscription
from trunkline.options import BrokerOptions

from .client import Launch, Peer, peer, until

QUICK = {"ack_timeout_s": 0.5, "max_retries": 2, "backoff_base_s": 0.0}


async def letters(broker: Broker, topic: str = "t") -> list[int]:
    return [one.origin async for one in broker.hub.bus.dead_letters(topic).letters()]


async def floor(broker: Broker, group: str = "g") -> int:
    (found,) = [one for one in await broker.hub.bus.groups() if one.group == group]
    return found.floor


async def test_records_come_in_the_order_of_offsets_whatever_their_keys(
    one: Peer, broker: Broker
) -> None:
    for key in "aab":
        await one.ask("PUBLISH", topic="t", key=key, payload=key)
    await one.subscribe("t", "g")
    found = [await one.hear("MESSAGE") for _ in range(3)]
    assert [m["offset"] for m in found] == [1, 2, 3]
    await one.ack(found[0])
    await one.socket.close()
    async with peer(broker.url) as two:
        await two.subscribe("t", "g")
        assert [(await two.hear("MESSAGE"))["offset"] for _ in range(2)] == [2, 3]


async def test_an_ack_does_not_settle_a_record_that_was_sent_after_its_own(
    one: Peer, broker: Broker
) -> None:
    for n in range(3):
        await one.ask("PUBLISH", topic="t", payload=n)
    await one.subscribe("t", "g", policy=QUICK)
    first, second, third = [await one.hear("MESSAGE") for _ in range(3)]
    await one.nack(first, delay_s=0)
    again = await one.hear("MESSAGE")
    assert (again["offset"], again["attempt"]) == (1, 2)
    assert (await one.ask("ACK", **_place(third)))["count"] == 2
    await one.socket.close()
    async with peer(broker.url) as two:
        await two.subscribe("t", "g")
        assert (await two.hear("MESSAGE"))["offset"] == 1
        assert second["offset"] == 2


def _place(message: dict[str, Any]) -> dict[str, Any]:
    return {name: message[name] for name in ("topic", "partition", "group", "offset")}


async def test_an_ack_of_a_frame_that_is_not_open_settles_nothing(one: Peer) -> None:
    for n in range(2):
        await one.ask("PUBLISH", topic="t", payload=n)
    await one.subscribe("t", "g")
    first, second = [await one.hear("MESSAGE") for _ in range(2)]
    unknown = {**_place(second), "offset": 9}
    assert (await one.ask("ACK", **unknown))["count"] == 0
    assert (await one.ask("ACK", **_place(second)))["count"] == 2
    assert (await one.ask("ACK", **_place(first)))["count"] == 0


async def test_a_nack_brings_back_a_record_that_only_another_ack_covered(
    one: Peer, broker: Broker
) -> None:
    for n in range(3):
        await one.ask("PUBLISH", topic="t", payload=n)
    await one.subscribe("t", "g", policy=QUICK)
    found = [await one.hear("MESSAGE") for _ in range(3)]
    assert (await one.ask("ACK", **_place(found[2])))["count"] == 3
    assert (await one.ask("NACK", **_place(found[0]), delay_s=0))["count"] == 1
    assert (await one.ask("NACK", **_place(found[2]), delay_s=0))["count"] == 0, "it is final"
    again = await one.hear("MESSAGE")
    assert (again["offset"], again["attempt"]) == (1, 2)
    await one.ack(again)
    await until(lambda: _is(floor(broker), 3))


async def test_an_ack_of_its_own_makes_final_what_another_covered(one: Peer) -> None:
    for n in range(3):
        await one.ask("PUBLISH", topic="t", payload=n)
    await one.subscribe("t", "g", policy=QUICK)
    found = [await one.hear("MESSAGE") for _ in range(3)]
    assert (await one.ask("ACK", **_place(found[2])))["count"] == 3
    assert (await one.ask("ACK", **_place(found[0])))["count"] == 0
    assert (await one.ask("NACK", **_place(found[0])))["count"] == 0
    assert (await one.ask("NACK", **_place(found[1])))["count"] == 1


async def test_an_ack_that_names_offsets_covers_no_others(one: Peer) -> None:
    for n in range(3):
        await one.ask("PUBLISH", topic="t", payload=n)
    await one.subscribe("t", "g", policy=QUICK)
    found = [await one.hear("MESSAGE") for _ in range(3)]
    assert (await one.ask("ACK", **_place(found[0]), offsets=[3]))["count"] == 2
    assert (await one.ask("NACK", **_place(found[1]), delay_s=60))["count"] == 1
    assert (await one.ask("NACK", **_place(found[1]), delay_s=60))["count"] == 0, "it failed once"


async def _is(found: Any, wanted: int) -> bool:
    return bool(await found == wanted)


@pytest.mark.parametrize("keys", [0, 1, 10])
async def test_a_client_that_acks_every_tenth_flows(keys: int, one: Peer, broker: Broker) -> None:
    events = [
        {"topic": "t", "payload": n, **({"key": f"k{n % keys}"} if keys else {})}
        for n in range(200)
    ]
    await one.ask("PUBLISH", topic="t", events=events)
    await one.subscribe("t", "g", max_inflight=32)
    for n in range(200):
        message = await one.hear("MESSAGE")
        assert message["envelope"]["payload"] == n
        if n % 10 == 9:
            await one.ack(message)
    await until(lambda: _is(floor(broker), 200))
    assert await letters(broker) == []


async def test_a_crash_counts_for_the_record_in_work_alone(one: Peer, broker: Broker) -> None:
    await one.ask("PUBLISH", topic="t", events=[{"topic": "t", "payload": n} for n in range(32)])
    policy = {**QUICK, "ack_timeout_s": 30.0}
    for _ in range(3):  # each client dies of the first record
        async with peer(broker.url) as client:
            await client.subscribe("t", "g", policy=policy, max_inflight=32, ack="each")
            assert (await client.hear("MESSAGE"))["offset"] == 1
            client.socket.transport.abort()
        await asyncio.sleep(0.05)
    await one.subscribe("t", "g", max_inflight=32, ack="each")
    found = [await one.hear("MESSAGE") for _ in range(31)]
    assert sorted(m["offset"] for m in found) == list(range(2, 33))
    assert await until(lambda: letters(broker)) == [1]
    assert max(m["attempt"] for m in found) == 1


async def test_a_message_says_for_how_long_it_is_leased(one: Peer) -> None:
    await one.ask("PUBLISH", topic="t", payload=1)
    await one.subscribe("t", "g", policy=QUICK)
    assert 0.3 < (await one.hear("MESSAGE"))["lease_s"] <= 0.5


STOPPED = """
import asyncio, os, signal, sys, trunkline
async def main():
    async with trunkline.connect(sys.argv[1]) as bus:
        async with bus.subscribe("t", group="g", max_inflight=8) as deliveries:
            async for d in deliveries:
                print(d.offset, d.attempt, flush=True)
                await asyncio.sleep(3600)
asyncio.run(main())
"""


async def test_a_stopped_client_uses_up_no_tries(tmp_path: Path) -> None:
    options = BrokerOptions(url="memory:", port=0)
    async with Broker(options) as broker, peer(broker.url) as one:
        for n in range(3):
            await one.ask("PUBLISH", topic="t", payload=n)
        await one.subscribe("t", "g", policy={**QUICK, "ack_timeout_s": 0.4})
        await one.ask("UNSUBSCRIBE", topic="t", group="g")
        client = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", STOPPED, broker.url), stdout=asyncio.subprocess.PIPE
        )
        try:
            assert client.stdout is not None
            assert (await asyncio.wait_for(client.stdout.readline(), 20)).startswith(b"1 ")
            client.send_signal(signal.SIGSTOP)
            await asyncio.sleep(3.0)  # many ack timeouts
            assert len(await letters(broker)) <= 1
            await one.subscribe("t", "g")
            found = [await one.hear("MESSAGE") for _ in range(2)]
            assert {2, 3} <= {m["offset"] for m in found} or found[0]["offset"] == 1
        finally:
            client.send_signal(signal.SIGCONT)
            client.kill()
            await client.wait()


async def test_a_graceful_stop_takes_the_acks_that_are_on_their_way(
    launch: Launch, tmp_path: Path
) -> None:
    broker = await launch(tmp_path / "bus")
    async with peer(broker.url) as one:
        events = [{"topic": "t", "payload": n} for n in range(20)]
        await one.ask("PUBLISH", topic="t", events=events)
        await one.subscribe("t", "g", ack="each", max_inflight=20)
        found = [await one.hear("MESSAGE") for _ in range(20)]
        os.kill(broker.pid, signal.SIGTERM)
        await asyncio.sleep(0.1)  # the broker is stopping now
        for message in found:
            await one.ack(message)
        assert await broker.end() == 0
    async with connect(f"file:{tmp_path / 'bus'}") as bus:
        (group,) = [one for one in await bus.groups() if one.group == "g"]
        assert group.floor == 20


async def test_restarts_of_a_broker_count_as_no_try(launch: Launch, tmp_path: Path) -> None:
    async with connect(f"file:{tmp_path / 'bus'}") as bus:
        await bus.publish_many("t", list(range(5)))
    for _ in range(4):
        broker = await launch(tmp_path / "bus")
        async with peer(broker.url) as one:
            await one.subscribe("t", "g", ack="each", policy={**QUICK, "ack_timeout_s": 30.0})
            found = [await one.hear("MESSAGE") for _ in range(5)]
            assert {m["attempt"] for m in found} == {1}
            ending = asyncio.ensure_future(broker.end())
            await one.socket.wait_closed()
            await ending
    async with connect(f"file:{tmp_path / 'bus'}") as bus:
        assert [one async for one in bus.dead_letters("t").letters()] == []


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_acks_that_a_killed_client_had_sent_are_taken_in(run: Any) -> None:
    """The broker writes to it first, before it reads the acks."""

    async def scene() -> None:
        options = BrokerOptions(url="memory:", port=0, metrics_s=0)
        async with Broker(options) as broker, connect(broker.url) as bus:
            for n in range(20):
                await bus.publish("t", n)
            async with bus.subscribe("t", group="g") as stream:
                assert isinstance(bus, RemoteBus)
                assert isinstance(stream, RemoteSubscription)
                await anext(stream.batches(20, wait_s=5.0))
                (session,) = broker.hub.sessions
                assert isinstance(session, Session)
                wire = bus.link._transport.underlying_transport.get_extra_info("socket")
                frame = {"topic": "t", "partition": 0, "group": "g", "offset": 1}
                acks = {"type": "ACK", **frame, "offsets": list(range(2, 21))}
                bus.link.send(msgspec.json.encode(acks))
                bus.link.flush()
                # What the kernel does for a process that is killed with frames unread.
                wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                bus.link._transport.underlying_transport.abort()
                await asyncio.sleep(0)
                for _ in range(3):
                    session.put(b'{"type":"OK"}')
                    session.flush()
                async with asyncio.timeout(5):
                    while session in broker.hub.sessions:
                        await asyncio.sleep(0.01)
            assert await floor(broker) == 20

    run(scene())
