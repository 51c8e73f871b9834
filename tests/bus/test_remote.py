"""The client meets both suites, against a real broker on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from trunkline.broker import dlq_pages as letters
from trunkline.broker.server import Broker
from trunkline.broker.session import Session
from trunkline.bus.link import Link
from trunkline.bus.local import LocalBus
from trunkline.bus.remote import RemoteBus
from trunkline.bus.remote_subscription import RemoteSubscription
from trunkline.errors import Conflict, Denied, InvalidEvent, InvalidOption, NotFound, OutOfRange
from trunkline.features import Features
from trunkline.names import GroupKey
from trunkline.options import BrokerOptions, GroupOptions
from trunkline.store import open_store
from trunkline.testing import BusContract, GroupContract, HandlerContract
from trunkline.testing.clock import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def settings() -> dict[str, Any]:
    return {}


@pytest.fixture
async def broker(clock: Any, settings: dict[str, Any]) -> AsyncIterator[Broker]:
    bus = LocalBus(open_store("memory:", clock=clock), clock=clock)
    async with Broker(BrokerOptions(port=0, metrics_s=0, **settings), bus=bus) as broker:
        yield broker
    await bus.close()


async def until(look: Callable[[], Awaitable[Any]], wanted: Any) -> None:
    async with asyncio.timeout(10):
        while await look() != wanted:
            await asyncio.sleep(0.01)


async def read_until_some_lie_unread(stream: RemoteSubscription) -> None:
    """A quick reader finds more than it asked for."""
    for _ in range(100):
        await (await asyncio.wait_for(anext(stream), 10)).ack()
        if len(stream.inbox.unread()) > 5:
            return
    raise AssertionError("nothing came ahead")


def count_calls(monkeypatch: pytest.MonkeyPatch, link: Link) -> list[str]:
    """From here on the name of each operation that a client calls."""
    calls: list[str] = []
    call = link.call

    async def counted(op: str, **args: Any) -> Any:
        calls.append(op)
        return await call(op, **args)

    monkeypatch.setattr(link, "call", counted)
    return calls


async def give_up_three(bus: RemoteBus) -> None:
    await bus.publish_many("t", [1, 2, 3])
    async with bus.subscribe("t", group="g") as deliveries:
        for _ in range(3):
            await (await anext(deliveries)).term("no")
        await until(lambda: bus.bounds("t.DLQ"), (1, 4))


class TestRemoteBus(BusContract, GroupContract, HandlerContract):
    covers = (RemoteBus,)
    features = Features(durability="none")  # the broker keeps its bus in memory

    @pytest.fixture
    def connect(self, broker: Broker, clock: Any) -> Any:
        def connect(**options: Any) -> RemoteBus:
            return RemoteBus(broker.url, clock=clock, **options)

        return connect


class TestTheWire:
    @pytest.mark.parametrize("settings", [{"pending_bytes": 200_000}])
    async def test_a_partition_that_is_not_there_is_told_and_not_empty(
        self, broker: Broker
    ) -> None:
        async with RemoteBus(broker.url) as bus:
            await bus.define("t", partitions=2)
            assert (await bus.read("t", partition=1), await bus.bounds("t", 1)) == ([], (1, 1))
            for read in (bus.read("t", partition=2), bus.read("t", 1, partition=2000)):
                with pytest.raises(OutOfRange, match="there is no partition"):
                    await read
            with pytest.raises(InvalidOption, match="partition is a whole"):
                await bus.bounds("t", -1)

    async def test_more_is_read_than_may_wait_to_be_sent(self, broker: Broker) -> None:
        async with RemoteBus(broker.url) as bus:
            for _ in range(3):
                await bus.publish_many("t", ["x" * 3000] * 500)
            assert [len(await bus.read("t", limit=n)) for n in (1200, 5000)] == [1200, 1500]
            await broker.hub.bus.store.trim("t", 0, 1001)
            assert await bus.bounds("t") == (1001, 1501)
            assert len(await bus.read("t")) == 500
            async with bus.subscribe("t", group="g"):
                assert await bus.link.call("lag", groups=[["t", "g"]]) == 500
            assert broker.hub.counts.evicted == 0

    async def test_what_others_closed_meanwhile_is_told_and_the_rest_redriven(
        self, broker: Broker
    ) -> None:
        async with RemoteBus(broker.url) as bus:
            await give_up_three(bus)
            said = []
            async for one in bus.dead_letters("t").redrive(rate=1e6):
                said.append((one.letter.offset, one.refused))
                if len(said) == 1:
                    here = broker.hub.bus.dead_letters("t")
                    assert [letter.offset async for letter in here.drop(offsets={2})] == [2]
            assert said == [(1, ""), (2, "redriven or dropped meanwhile"), (3, "")]

    async def test_what_others_closed_meanwhile_is_not_told_as_dropped(
        self, broker: Broker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(letters, "_PAGE_BYTES", 1)
        async with RemoteBus(broker.url) as bus:
            await give_up_three(bus)
            dropped = []
            async for letter in bus.dead_letters("t").drop():
                dropped.append(letter.offset)
                if len(dropped) == 1:
                    here = broker.hub.bus.dead_letters("t")
                    assert [one.refused async for one in here.redrive(offsets={2})] == [""]
            assert dropped == [1, 3]

    async def test_dead_letters_come_in_pages_and_are_redriven_by_the_page(
        self, broker: Broker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with RemoteBus(broker.url, frame_bytes=6 * 1024 * 1024) as bus:
            await bus.publish_many("t", range(3))
            for _ in range(9):
                await bus.publish("t", "x" * 1_000_000)
            async with bus.subscribe("t", group="g") as stream:
                for _ in range(12):
                    await (await anext(stream)).term("no good")
            desk = bus.dead_letters("t")
            await until(lambda: bus.bounds("t.DLQ"), (1, 13))
            async with asyncio.timeout(20):
                letters = [letter async for letter in desk.letters()]
            assert [letter.offset for letter in letters] == list(range(1, 13))
            assert (await desk.letter(12)).offset == 12
            calls = count_calls(monkeypatch, bus.link)
            done = [one async for one in desk.redrive(offsets=set(range(1, 12)))]
            assert [(one.letter.offset, one.refused) for one in done] == [
                (n, "") for n in range(1, 12)
            ]
            assert calls.count("redrive") < 4
            with pytest.raises(NotFound, match="no open letter 11 of t"):
                [_ async for _ in desk.drop(offsets={11, 12})]
            assert await bus.link.call("redrive", topic="t", offsets=[11]) == [], "said again"
            assert [letter.offset async for letter in desk.drop()] == [12]
            assert [letter async for letter in desk.letters()] == []

    async def test_a_batch_that_is_too_large_is_refused_before_it_is_sent(
        self, broker: Broker
    ) -> None:
        async with RemoteBus(broker.url, send_bytes=10_000) as bus:
            with pytest.raises(InvalidEvent, match="in one frame"):
                await bus.publish_many("t", ["x" * 1000] * 20)
            assert (await bus.publish("t", 1)).offset == 1

    @pytest.mark.parametrize("settings", [{"frame_bytes": 5_000}])
    async def test_a_frame_the_broker_does_not_take_fails_and_is_not_sent_for_ever(
        self, broker: Broker
    ) -> None:
        async with RemoteBus(broker.url, backoff_base_s=0.01) as bus:
            small = [asyncio.ensure_future(bus.publish("t", n)) for n in range(5)]
            with pytest.raises(InvalidEvent, match="too many"):
                await bus.publish("t", "x" * 9_000)
            receipts = await asyncio.gather(*small)
        assert sorted(receipt.offset for receipt in receipts) == [1, 2, 3, 4, 5]

    @pytest.mark.parametrize("settings", [{"frame_bytes": 40_000}])
    async def test_one_that_is_not_too_large_alone_does_not_fail_for_its_company(
        self, broker: Broker
    ) -> None:
        async with RemoteBus(broker.url, backoff_base_s=0.01) as bus:
            await bus.publish("t", 0)
            small = [bus.publish("t", "x" * 400) for _ in range(20)]
            large = bus.publish("t", "y" * 39_000), bus.publish_many("t", ["z" * 19_000] * 2)
            said = await asyncio.gather(
                *small,
                *large,
                bus.publish("t", "w" * 40_000),
                *(bus.publish("t", "x" * 400) for _ in range(20)),
                return_exceptions=True,
            )
        assert [n for n, one in enumerate(said) if isinstance(one, InvalidEvent)] == [22]

    @pytest.mark.parametrize("settings", [{"frame_bytes": 5_000}])
    async def test_none_fails_for_what_is_too_large_together(self, broker: Broker) -> None:
        async with RemoteBus(broker.url, backoff_base_s=0.01) as bus:
            many = [bus.publish("t", "x" * 1000) for _ in range(40)]
            receipts = await asyncio.wait_for(asyncio.gather(*many), 20)
        assert [receipt.offset for receipt in receipts] == list(range(1, 41))

    async def test_publishes_wait_while_the_buffer_is_full(self, broker: Broker) -> None:
        async with RemoteBus(broker.url, buffer=3) as bus:
            receipts = await asyncio.gather(*(bus.publish("t", n) for n in range(20)))
        assert sorted(receipt.offset for receipt in receipts) == list(range(1, 21))

    async def test_publishes_that_were_given_up_while_the_broker_was_away_leave_the_buffer(
        self, broker: Broker
    ) -> None:
        async with RemoteBus(broker.url, buffer=3, backoff_base_s=0.01) as bus:
            await bus.publish("t", 1)
            bus.link._transport.underlying_transport.abort()
            while bus.link.is_up:
                await asyncio.sleep(0)
            waiting = [asyncio.ensure_future(bus.publish("t", n)) for n in range(3)]
            await asyncio.sleep(0)
            for one in waiting:
                one.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            assert (await asyncio.wait_for(bus.publish("t", 2), 10)).offset == 2

    async def test_a_lost_connection_comes_back_with_its_subscriptions(
        self, broker: Broker
    ) -> None:
        async with (
            RemoteBus(broker.url, backoff_base_s=0.01) as bus,
            bus.subscribe("t", group="g") as stream,
        ):
            await bus.publish("t", 1)
            first = await anext(stream)
            bus.link._transport.underlying_transport.abort()
            again = await asyncio.wait_for(anext(stream), 10)
            assert (again.offset, again.attempt) == (1, 2)
            assert await first.ack() is False, "it was given to others"
            assert await again.ack() is True
            await bus.publish("t", 2)
            assert (await anext(stream)).event.payload == 2

    @pytest.mark.parametrize("settings", [{"rate_frames_s": 5}])
    async def test_more_subscriptions_come_back_than_the_broker_takes_at_once(
        self, broker: Broker, clock: ManualClock
    ) -> None:
        async with (
            RemoteBus(broker.url, backoff_base_s=0.01) as bus,
            contextlib.AsyncExitStack() as stack,
        ):
            streams = []
            for n in range(7):
                clock.advance(1)
                streams.append(bus.subscribe(f"t{n}", group="g"))
                await stack.enter_async_context(streams[-1])
            bus.link._transport.underlying_transport.abort()
            for n in range(7):
                await broker.hub.bus.publish(f"t{n}", n)
            arriving = asyncio.gather(*(anext(stream) for stream in streams))
            async with asyncio.timeout(20):
                while not arriving.done():
                    clock.advance(1)
                    await asyncio.sleep(0.1)
            found = [delivery.event.payload for delivery in await arriving]
        assert found == list(range(7))

    @pytest.mark.parametrize("settings", [{"rate_frames_s": 5}])
    async def test_what_is_sent_again_too_fast_is_put_off_and_not_refused(
        self, broker: Broker, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It may have been kept the first time, whose answer was lost."""
        async with RemoteBus(broker.url, backoff_base_s=0.01) as bus:
            await bus.link.connected.wait()
            monkeypatch.setattr(bus.link, "_draw", lambda: 0.0)
            with monkeypatch.context() as deaf:
                deaf.setattr(bus.link, "heard", lambda data: None)
                fired = [bus.fire("t", number) for number in range(5)]
                await until(lambda: broker.hub.bus.bounds("t"), (1, 6))
                bus.link._transport.underlying_transport.abort()
                while bus.link.is_up:
                    await asyncio.sleep(0)
            fired += [bus.fire("t", number) for number in range(5, 9)]
            async with asyncio.timeout(20):
                while not all(one.done() for one in fired):
                    clock.advance(0.2)
                    await asyncio.sleep(0.05)
            offsets = [(await one).offset for one in fired]
        assert (offsets[:5], sorted(offsets)) == ([1, 2, 3, 4, 5], list(range(1, 10)))

    async def test_what_a_closing_broker_refuses_is_said_to_the_next(self, broker: Broker) -> None:
        """Its sessions may hear frames after it began to close and before they end."""
        async with (
            RemoteBus(broker.url, backoff_base_s=0.01) as bus,
            bus.subscribe("t", group="g") as stream,
        ):
            broker.hub.is_open = False
            publishing = [bus.fire("t", number) for number in range(3)]
            async with asyncio.timeout(10):
                while bus.link.is_up:
                    await asyncio.sleep(0.01)
            broker.hub.is_open = True
            async with asyncio.timeout(10):
                assert [(await one).offset for one in publishing] == [1, 2, 3]
                assert [(await anext(stream)).event.payload for _ in range(3)] == [0, 1, 2]

    async def test_one_that_is_refused_does_not_harm_those_it_travels_with(
        self, broker: Broker
    ) -> None:
        async with RemoteBus(broker.url) as bus:
            await broker.hub.registry.add("t", {"type": "integer"})
            wanted = [("t", 1), ("t", "two"), ("u", "three"), ("t", 4)]
            said = await asyncio.gather(
                *(bus.publish(topic, payload) for topic, payload in wanted), return_exceptions=True
            )
        assert [getattr(one, "offset", type(one)) for one in said] == [1, InvalidEvent, 1, 2]

    async def test_a_subscription_that_is_no_longer_allowed_is_told(self, broker: Broker) -> None:
        async with (
            RemoteBus(broker.url) as bus,
            bus.subscribe("t", group="g", where="payload.n > 1") as stream,
        ):
            for session in list(broker.hub.sessions):
                assert isinstance(session, Session)
                for subscriber in list(session._subscribers.values()):
                    session.ended(subscriber, Denied("access denied"))
            with pytest.raises(Denied):
                await asyncio.wait_for(anext(stream), 10)

    async def test_what_lies_unread_from_before_a_seek_is_not_delivered(
        self, broker: Broker
    ) -> None:
        bus = broker.hub.bus
        async with RemoteBus(broker.url) as client:
            await client.publish_many("t", list(range(3000)))
            async with client.subscribe("t", group="g", start="earliest") as stream:
                await read_until_some_lie_unread(stream)
                await bus.store.update(GroupKey("t", 0, "g"), lambda group: group.seek(2900))
                bus.store.bell.ring(None)
                await client.health()  # what the broker had to say before has come
                seen = [(await asyncio.wait_for(anext(stream), 10)).offset for _ in range(100)]
                assert seen == list(range(2901, 3001)), "there is room for as many as before"

    async def test_what_is_in_hand_of_a_removed_topic_settles_nothing_in_the_next(
        self, broker: Broker
    ) -> None:
        bus = broker.hub.bus
        async with RemoteBus(broker.url) as client:
            await client.publish_many("t", ["old"] * 3000)
            async with client.subscribe("t", group="g", start="earliest") as stream:
                await read_until_some_lie_unread(stream)
                last = await anext(stream)
                await bus.store.define("t", None)
                await client.publish_many("t", ["new"] * 3000)
                while (new := await asyncio.wait_for(anext(stream), 10)).offset != last.offset:
                    await new.ack()
                assert new.event.payload == "new"
                await last.term("too late: there is another record at its offset")
                await new.ack()
                await asyncio.wait_for(anext(stream), 10)
            assert [letter async for letter in bus.dead_letters("t").letters()] == []

    async def test_health_says_whether_there_is_a_connection(self, broker: Broker) -> None:
        bus = RemoteBus(broker.url)
        assert await bus.health() == {"ok": False, "connected": False}
        async with bus:
            await bus.publish("t", 1)
            health = await bus.health()
            assert (health["ok"], health["connected"]) == (True, True)
            assert [record.event.payload for record in await bus.read("t")] == [1]
            assert list(await bus.topics()) == ["t"]

    async def test_health_tells_of_a_handler_here_that_could_not_begin(
        self, broker: Broker
    ) -> None:
        async with RemoteBus(broker.url) as bus:
            async with bus.subscribe("t", group="g"):
                pass
            bus.on("t", group="g", policy=GroupOptions(max_retries=1))(print)
            with pytest.raises(Conflict):
                await bus.drain(10)
            health = await bus.health()
            assert (health["ok"], health["connected"]) == (False, True)
            assert "group g on t" in health["failed"][0]
            with pytest.raises(Conflict):
                await bus.stop()


def test_an_audit_is_the_brokers() -> None:
    with pytest.raises(InvalidOption, match="trunkline serve --audit"):
        RemoteBus("ws://127.0.0.1:1", audit=1.0)
