"""What the bus on NATS does beyond the suites: bounds, groups, bad input."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

import trunkline
from trunkline.bus.nats import NatsBus
from trunkline.bus.nats.server import Servers
from trunkline.errors import Conflict, InvalidEvent, InvalidOption, NotFound, UnsupportedFormat
from trunkline.event import Event
from trunkline.options import GroupOptions


@pytest.fixture
async def bus(url: str) -> AsyncIterator[NatsBus]:
    async with NatsBus(url) as bus:
        yield bus


async def take(stream: Any, count: int) -> list[Any]:
    async with asyncio.timeout(20):
        return [await anext(stream) for _ in range(count)]


def test_connect_opens_it_by_its_url(url: str) -> None:
    assert isinstance(trunkline.connect(url), NatsBus)


async def test_a_group_parks_a_bounded_number_of_delayed_records(url: str) -> None:
    async with NatsBus(url, delayed_max=2) as bus:
        for number in (1, 2):
            await bus.publish("orders", number, delay_s=1.0)
        await bus.publish("orders", "now")
        async with bus.subscribe("orders", group="billing") as stream:
            got = [d.event.payload for d in await take(stream, 3)]
    assert sorted(map(str, got)) == ["1", "2", "now"]


async def test_a_delayed_record_has_all_of_its_tries(bus: NatsBus) -> None:
    policy = GroupOptions(max_retries=2, backoff_base_s=0.0)
    await bus.publish("orders", 1, delay_s=0.6)
    async with bus.subscribe("orders", group="billing", policy=policy) as stream:
        tries = []
        for _ in range(3):
            (delivery,) = await take(stream, 1)
            tries.append(delivery.attempt)
            await delivery.nack()
        async with asyncio.timeout(20):
            while not (found := [one async for one in bus.dead_letters("orders").letters()]):
                await asyncio.sleep(0.02)
    assert (tries, found[0].attempts) == ([1, 2, 3], 3)


async def test_a_delayed_record_that_another_member_saw_early_is_not_given_up(
    bus: NatsBus, url: str
) -> None:
    """Each member sees some records before they are due; any of them gets them then."""
    policy = GroupOptions(max_retries=0, ordering="none")
    await bus.publish_many("orders", list(range(20)), delay_s=1.0)
    async with (
        NatsBus(url) as other,
        bus.subscribe("orders", group="billing", policy=policy) as mine,
        other.subscribe("orders", group="billing", policy=policy) as theirs,
    ):
        got: list[Any] = []

        async def consume(stream: Any) -> None:
            async for delivery in stream:
                got.append(delivery.attempt)
                await delivery.ack()

        tasks = [asyncio.ensure_future(consume(stream)) for stream in (mine, theirs)]
        async with asyncio.timeout(20):
            while len(got) < 20:
                await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert got == [1] * 20
    assert [one async for one in bus.dead_letters("orders").letters()] == []


async def test_a_seek_moves_a_group_and_its_members(bus: NatsBus) -> None:
    await bus.publish_many("orders", [1, 2, 3])
    async with bus.subscribe("orders", group="billing") as stream:
        for delivery in await take(stream, 3):
            await delivery.ack()
        await bus.drain(10)
        (info,) = await bus.seek("orders", "billing", 2)
        assert (info.floor, info.lag) == (1, 2)
        assert [d.event.payload for d in await take(stream, 2)] == [2, 3]


async def test_a_paused_group_gets_nothing(bus: NatsBus) -> None:
    async with bus.subscribe("orders", group="billing") as stream:
        assert [one.paused for one in await bus.pause("orders", "billing")] == [True]
        await bus.publish("orders", 1)
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        assert [one.paused for one in await bus.resume("orders", "billing")] == [False]
        delivery = await asyncio.wait_for(waiting, 20)
        assert delivery.event.payload == 1


async def test_an_edited_policy_holds_for_members_that_are_there(bus: NatsBus, url: str) -> None:
    policy = GroupOptions(max_retries=5, backoff_base_s=0.0)
    await bus.publish("orders", 1)
    async with bus.subscribe("orders", group="billing", policy=policy) as stream:
        async with NatsBus(url) as other:
            (info,) = await other.edit("orders", "billing", max_retries=0)
            assert info.policy.max_retries == 0
        async with asyncio.timeout(10):
            while bus._members["orders", "billing"].policy.max_retries:
                await asyncio.sleep(0.01)
        (delivery,) = await take(stream, 1)
        await delivery.nack()
        async with asyncio.timeout(10):
            while not [letter async for letter in bus.dead_letters("orders").letters()]:
                await asyncio.sleep(0.05)


async def test_groups_say_where_they_stand(bus: NatsBus) -> None:
    await bus.define("orders", partitions=2)
    await bus.publish_many("orders", [Event(topic="orders", key=f"k{n}") for n in range(10)])
    async with bus.subscribe("orders", group="billing"):
        pass
    found = await bus.groups("orders")
    assert [(one.partition, one.group) for one in found] == [(0, "billing"), (1, "billing")]
    assert sum(one.lag for one in found) == 10 == await bus.lag("orders", "billing")
    with pytest.raises(NotFound):
        await bus.lag("orders", "nobody")
    with pytest.raises(NotFound):
        await bus.seek("nothing", "billing", 1)


async def test_records_are_read_past_any_group(bus: NatsBus) -> None:
    for start in range(0, 1200, 600):
        await bus.publish_many("orders", list(range(start, start + 600)))
    assert await bus.bounds("orders") == (1, 1201)
    records = await bus.read("orders", 2, 1100)
    assert [record.offset for record in records] == list(range(2, 1102))
    assert [record.event.payload for record in records] == list(range(1, 1101))


async def test_a_replica_that_lags_behind_hides_no_record(bus: NatsBus) -> None:
    """A follower answers for a stream whose newest records it does not have yet: played by this
    test, while the server itself answers no direct gets.
    """
    await bus.publish_many("orders", [1, 2, 3])
    stream, asked = bus.link.place.stream("orders", 0), 0
    config = msgspec.json.decode(await bus.link.api(f"STREAM.INFO.{stream}"))["config"]
    await bus.link.api(f"STREAM.UPDATE.{stream}", {**config, "allow_direct": False})

    async def answer(message: Any) -> None:
        nonlocal asked
        asked += 1
        if asked == 3:
            await lagging.unsubscribe()
            await bus.link.api(f"STREAM.UPDATE.{stream}", {**config, "allow_direct": True})
        await bus.link.nc.publish(message.reply, b"", headers={"Status": "404"})

    lagging = await bus.link.nc.subscribe(f"$JS.API.DIRECT.GET.{stream}", cb=answer)
    await bus.link.flush()
    assert [record.event.payload for record in await bus.read("orders", 1, 10)] == [1, 2, 3]
    assert asked == 3
    assert await bus.read("orders", 4, 10) == []


async def test_a_replica_that_lost_a_damaged_message_hides_no_record(bus: NatsBus) -> None:
    """A follower that lost a damaged message answers without it: played by this test."""
    await bus.publish_many("orders", [1, 2, 3])
    stream, asked = bus.link.place.stream("orders", 0), 0
    found = [await bus.link.api(f"STREAM.MSG.GET.{stream}", {"seq": at}) for at in (1, 3)]
    kept = [msgspec.json.decode(one)["message"] for one in found]
    config = msgspec.json.decode(await bus.link.api(f"STREAM.INFO.{stream}"))["config"]
    await bus.link.api(f"STREAM.UPDATE.{stream}", {**config, "allow_direct": False})

    async def answer(message: Any) -> None:
        nonlocal asked
        asked += 1
        for one in kept:
            if one["seq"] >= msgspec.json.decode(message.data)["seq"]:
                headers = {"Nats-Sequence": str(one["seq"]), "Nats-Stream": stream}
                data = base64.b64decode(one["data"])
                await bus.link.nc.publish(message.reply, data, headers=headers)
        if asked == 3:
            await damaged.unsubscribe()
            await bus.link.api(f"STREAM.UPDATE.{stream}", {**config, "allow_direct": True})
        await bus.link.nc.publish(message.reply, b"", headers={"Status": "204"})

    damaged = await bus.link.nc.subscribe(f"$JS.API.DIRECT.GET.{stream}", cb=answer)
    await bus.link.flush()
    assert [record.event.payload for record in await bus.read("orders", 1, 10)] == [1, 2, 3]
    assert asked == 3


async def test_an_event_that_was_published_before_is_kept_once(bus: NatsBus) -> None:
    events = [Event(topic="orders", payload=n) for n in range(3)]
    await bus.publish_many("orders", events[:2])
    receipts = await bus.publish_again("orders", events)
    assert [receipt.offset for receipt in receipts] == [1, 2, 3]
    assert await bus.bounds("orders") == (1, 4)


async def test_a_stream_that_is_not_ours_is_left_alone(bus: NatsBus) -> None:
    name = bus.link.place.stream("orders", 0)
    body = {"name": name, "subjects": ["their.subject"], "storage": "file"}
    await bus.link.api(f"STREAM.CREATE.{name}", body)
    before = await bus.link.api(f"STREAM.INFO.{name}")
    with pytest.raises(Conflict, match="not one of Trunkline's"):
        await bus.publish("orders", 1)
    assert before[:400] == (await bus.link.api(f"STREAM.INFO.{name}"))[:400]
    assert await bus.topics() == {}


async def test_a_subject_that_another_stream_takes_is_told(bus: NatsBus) -> None:
    name = "theirs-" + bus.link.place.bus
    body = {"name": name, "subjects": [bus.link.place.subject("orders", 0)], "storage": "file"}
    await bus.link.api(f"STREAM.CREATE.{name}", body)
    with pytest.raises(Conflict, match="another stream"):
        await bus.publish("orders", 1)


async def streams(bus: NatsBus) -> set[str]:
    """The streams on the server that belong to this bus."""
    found = msgspec.json.decode(await bus.link.api("STREAM.NAMES"))
    return {name for name in found["streams"] or () if name.startswith(bus.link.place.bus + "~")}


@pytest.mark.parametrize("theirs", ["name", "subject"])
async def test_no_partition_is_made_where_one_is_not_ours(bus: NatsBus, theirs: str) -> None:
    place = bus.link.place
    name = place.stream("orders", 2) if theirs == "name" else "theirs-" + place.bus
    subject = "their.subject." + place.bus if theirs == "name" else place.subject("orders", 2)
    await bus.link.api(f"STREAM.CREATE.{name}", {"name": name, "subjects": [subject]})
    before = await streams(bus)
    with pytest.raises(Conflict):
        await bus.define("orders", partitions=4)
    assert await streams(bus) == before
    assert await bus.topics() == {}


async def test_a_stream_of_a_later_version_is_left_alone(bus: NatsBus) -> None:
    name = bus.link.place.stream("orders", 0)
    subjects = [bus.link.place.subject("orders", 0)]
    body = {"name": name, "subjects": subjects, "metadata": {"trunkline": "99"}}
    await bus.link.api(f"STREAM.CREATE.{name}", body)
    with pytest.raises(UnsupportedFormat, match="99"):
        await bus.publish("orders", 1)
    found = msgspec.json.decode(await bus.link.api(f"STREAM.INFO.{name}"))
    assert found["config"]["metadata"]["trunkline"] == "99"


async def test_a_process_that_only_looks_makes_nothing(url: str) -> None:
    async with NatsBus(url) as bus:
        assert await bus.topics() == {}
        assert await bus.groups() == []
        assert await streams(bus) == set()


async def test_a_topic_that_two_make_at_once_has_the_options_of_its_document(
    bus: NatsBus, url: str
) -> None:
    """Whoever comes second brings the streams to what the document says: nobody narrows them."""
    async with NatsBus(url) as other:
        for number in range(8):
            topic = f"orders.{number}"
            await asyncio.gather(
                bus.define(topic, dedup_window_s=600, partitions=2), other.publish(topic, 1)
            )
            options = (await bus.catalog.load())[topic]
            for partition in range(options.partitions):
                name = bus.link.place.stream(topic, partition)
                found = msgspec.json.decode(await bus.link.api(f"STREAM.INFO.{name}"))
                wanted = options.dedup_window_s or 120
                assert found["config"]["duplicate_window"] == wanted * 1_000_000_000
            assert options.dedup_window_s == 600


async def test_a_letter_of_a_topic_made_anew_is_redriven(bus: NatsBus) -> None:
    """It has the offset of a letter that was redriven just before, and is another one."""
    policy = GroupOptions(max_retries=0)
    for number in (1, 2):
        await bus.publish("orders", number)
        async with bus.subscribe("orders", group="billing", policy=policy) as stream:
            await (await take(stream, 1))[0].term("broken")
            async with asyncio.timeout(20):
                while not [one async for one in bus.dead_letters("orders").letters()]:
                    await asyncio.sleep(0.02)
            assert [one.refused async for one in bus.dead_letters("orders").redrive()] == [""]
            (again,) = await take(stream, 1)
            assert again.event.payload == number
            await again.ack()
            await bus.drain(10)
        await bus.remove("orders")
        await bus.remove("orders.DLQ")


@pytest.mark.parametrize(
    "options",
    [
        {"partitions": 65},
        {"compact": True},
        {"segment_records": 10},
        {"dedup_window_s": 1.0},
        {"retention_records": 10},
    ],
    ids=lambda options: next(iter(options)),
)
async def test_topic_options_that_nats_cannot_keep_are_refused(
    bus: NatsBus, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidOption):
        await bus.define("orders", **options)
    assert await bus.topics() == {}


async def test_retention_is_that_of_the_stream(bus: NatsBus) -> None:
    await bus.define("orders", retention_records=10, retain_unsettled=False)
    await bus.publish_many("orders", list(range(25)))
    assert await bus.bounds("orders") == (16, 26)


async def test_an_id_with_strange_letters_is_kept_once_too(bus: NatsBus) -> None:
    event = Event(topic="orders", id="ä \r\n\tx", payload=1)
    first, second = await bus.publish(event), await bus.publish(event)
    assert (first.duplicate, second.duplicate, second.offset) == (False, True, 1)


async def test_a_repeat_beside_new_events_in_a_batch_is_told(bus: NatsBus) -> None:
    await bus.define("orders", dedup_window_s=60)
    await bus.publish("orders", 1, idem_key="a")
    batch = [Event(topic="orders", idem_key=key, payload=key) for key in ("b", "a", "b")]
    receipts = await bus.publish_many("orders", batch)
    assert [(one.offset, one.duplicate) for one in receipts] == [(2, False), (1, True), (2, True)]


async def test_an_event_that_the_server_cannot_take_is_refused(
    bus: NatsBus, server: Servers
) -> None:
    large = trunkline.options.Limits(record_bytes=8_000_000)
    async with NatsBus(f"{server.url}/{bus.link.place.bus}", limits=large) as wide:
        with pytest.raises(InvalidEvent, match="at most"):
            await wide.publish("orders", "x" * 4_000_000)
        assert (await wide.publish("orders", 1)).offset == 1


async def test_the_other_member_takes_over_a_key_when_the_first_leaves(
    bus: NatsBus, url: str
) -> None:
    async with NatsBus(url) as other:
        first = await bus.subscribe("orders", group="billing").__aenter__()
        async with other.subscribe("orders", group="billing") as second:
            await bus.publish("orders", 1, key="a")
            (held,) = await take(first, 1)
            await bus.publish("orders", 2, key="a")
            waiting = asyncio.ensure_future(anext(second))
            await asyncio.sleep(0.3)
            assert not waiting.done(), "one member at a time has a partition"
            await held.ack()
            await first.close()
            delivery = await asyncio.wait_for(waiting, 20)
            assert delivery.event.payload == 2


async def test_members_follow_another_ordering(bus: NatsBus, url: str) -> None:
    async with (
        NatsBus(url) as other,
        bus.subscribe("orders", group="billing", max_inflight=3) as mine,
        other.subscribe("orders", group="billing", max_inflight=3) as theirs,
    ):
        await bus.edit("orders", "billing", ordering="none")
        async with asyncio.timeout(10):
            while other._members["orders", "billing"].policy.ordering != "none":
                await asyncio.sleep(0.01)
        await bus.publish_many("orders", list(range(6)))
        both = await take(mine, 3) + await take(theirs, 3)
        assert sorted(delivery.event.payload for delivery in both) == list(range(6))


async def test_a_schedule_keeps_a_bounded_number_of_firings(
    bus: NatsBus, caplog: pytest.LogCaptureFixture
) -> None:
    fired = asyncio.Event()

    @bus.every("1s", name="tick")
    async def tick() -> None:
        fired.set()

    await bus.start()
    async with asyncio.timeout(20):
        await fired.wait()
    kept = {
        name: options.retention_records
        for name, options in (await bus.topics()).items()
        if not name.startswith("system.heartbeat")
    }
    assert list(kept.values()) == [10_000], kept
    assert not caplog.records
