"""What every ``Bus`` must do, as tests. A bus is done when it passes both suites.

All that the author of a bus writes, in a test file of a project with pytest-asyncio in its
``auto`` mode::

    from trunkline.features import Features
    from trunkline.testing import BusContract, HandlerContract

    class TestMyBus(BusContract, HandlerContract):
        features = Features(priority=False)

        @pytest.fixture
        def connect(self, tmp_path, clock):
            def connect(**options):  # to the same place each time
                return MyBus(tmp_path, clock=clock, **options)
            return connect

``Features`` says what the bus promises; a test of anything else is skipped. A bus over a store that
is far away calls ``clock.wait_for(store)`` in ``connect``. A bus that cannot be given a clock
overrides ``clock`` with ``PassingClock()`` and sets ``unit_s``, the suites' measure of time, to as
little as it can tell apart.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from trunkline.bus import Bus
from trunkline.errors import (
    Closed,
    Conflict,
    Invalid,
    InvalidEvent,
    InvalidFilter,
    InvalidName,
    InvalidOption,
)
from trunkline.event import Event
from trunkline.options import TtlPolicy
from trunkline.testing.bus_fixtures import PATIENCE_S, AnyClock, BusFixtures, Connect, payloads

BAD_INPUT: dict[str, tuple[str | Event, Any, dict[str, Any]]] = {
    "path": ("a/b", 1, {}),
    "reserved": ("a__b", 1, {}),
    "pattern": ("a.*", 1, {}),
    "object": ("orders", object(), {}),
    "infinity": ("orders", float("inf"), {}),
    "large": ("orders", "x" * 2_000_000, {}),
    "unknown field": ("orders", 1, {"colour": "red"}),
    "priority": ("orders", 1, {"priority": "urgent"}),
    "ttl": ("orders", 1, {"ttl_s": -1}),
    "key": ("orders", 1, {"key": 7}),
    "delay": ("orders", 1, {"delay_s": "soon"}),
    "headers": ("orders", 1, {"headers": {"a": 1}}),
    "whole": (Event(topic="orders"), 1, {}),
}


class BusContract(BusFixtures):
    """Publishing, and deliveries as a stream."""

    # -- publishing ----------------------------------------------------------------------------

    async def test_a_receipt_says_where_the_event_went(self, bus: Bus) -> None:
        first = await bus.publish("orders", {"id": 1}, key="c42")
        second = await bus.publish(Event(id="mine", topic="orders", payload={"id": 2}))

        assert (first.topic, first.partition) == ("orders", 0)
        assert (first.duplicate, first.durability) == (False, self.features.durability)
        assert (second.offset > first.offset >= 1, second.id) == (True, "mine")
        if self.features.consecutive:
            assert (first.offset, second.offset) == (1, 2)

    async def test_what_is_published_is_delivered_as_it_was(self, bus: Bus) -> None:
        await bus.publish(
            "orders",
            {"id": 1, "list": [1, None]},
            key="c42",
            type="Order",
            actor="shop",
            subject="s",
            space="shared:home",
            headers={"a": "b"},
            cause="e0",
            idem_key="i",
            trace="t",
            band="AMBER",
        )
        async with bus.subscribe("orders", group="billing") as stream:
            (delivery,) = await self.now(stream)

        event = delivery.event
        assert event.payload == {"id": 1, "list": [1, None]}
        assert (event.key, event.type, event.actor, event.subject) == ("c42", "Order", "shop", "s")
        assert (event.space, event.headers, event.cause) == ("shared:home", {"a": "b"}, "e0")
        assert (event.idem_key, event.trace, event.band) == ("i", "t", "AMBER")
        assert (delivery.topic, delivery.partition, delivery.offset) == ("orders", 0, 1)
        assert (delivery.group, delivery.attempt) == ("billing", 1)

    async def test_many_are_published_as_one_batch(self, bus: Bus) -> None:
        receipts = await bus.publish_many("orders", [1, 2])
        receipts += await bus.publish_many("orders", [Event(topic="orders", payload=3)])
        assert [receipt.offset for receipt in receipts] == [1, 2, 3]
        assert await bus.publish_many("orders", []) == []
        async with bus.subscribe("orders", group="billing") as stream:
            assert payloads(await self.now(stream, 3)) == [1, 2, 3]

    async def test_deliveries_are_read_and_acked_by_the_batch(self, bus: Bus) -> None:
        await bus.publish_many("orders", list(range(12)))
        read: list[int] = []
        async with (
            bus.subscribe("orders", group="billing") as stream,
            asyncio.timeout(PATIENCE_S),
        ):
            async for batch in stream.batches(5, wait_s=0.2):
                assert 1 <= len(batch) <= 5
                read += [event.payload for event in batch.events]
                assert await batch.ack() == len(batch)
                if len(read) >= 12:
                    break
        assert sorted(read) == list(range(12))
        assert await bus.lag("orders", "billing") == 0

    async def test_a_batch_with_one_bad_event_leaves_nothing(
        self, bus: Bus, clock: AnyClock
    ) -> None:
        with pytest.raises(InvalidEvent):
            await bus.publish_many("orders", [1, 2, float("nan")])
        with pytest.raises(InvalidEvent):
            await bus.publish_many("orders", [Event(topic="orders"), Event(topic="refunds")])
        async with bus.subscribe("orders", group="billing") as stream:
            await self.check_quiet(stream, clock)

    @pytest.mark.parametrize("case", BAD_INPUT)
    async def test_bad_input_is_refused_and_nothing_is_written(
        self, bus: Bus, clock: AnyClock, case: str
    ) -> None:
        topic, payload, fields = BAD_INPUT[case]
        with pytest.raises(Invalid):
            await bus.publish(topic, payload, **fields)
        async with bus.subscribe("orders", group="billing") as stream:
            await self.check_quiet(stream, clock)

    async def test_a_repeat_is_told_and_not_delivered(self, bus: Bus, clock: AnyClock) -> None:
        self.need("dedup")
        await bus.define("orders", dedup_window_s=60)
        first = await bus.publish("orders", 1, idem_key="a")
        second = await bus.publish("orders", 2, idem_key="a")
        more = await bus.publish_many("orders", [3, 4], idem_key="a")

        assert [one.duplicate for one in (first, second, *more)] == [False, True, True, True]
        assert {(one.offset, one.id) for one in (second, *more)} == {(first.offset, first.id)}
        async with bus.subscribe("orders", group="billing") as stream:
            assert payloads(await self.now(stream)) == [1]
            await self.check_quiet(stream, clock)

    async def test_define_keeps_what_it_does_not_name(self, bus: Bus) -> None:
        self.need("partitions")
        await bus.define("orders", partitions=3)
        await bus.define("orders", ttl_policy="dlq")
        receipts = await bus.publish_many("orders", list(range(30)))
        assert {receipt.partition for receipt in receipts} == {0, 1, 2}

    async def test_a_batch_that_is_too_large_is_refused_whole(
        self, bus: Bus, clock: AnyClock
    ) -> None:
        if self.features.batch_max is None:
            pytest.skip("a batch may be of any size")
        with pytest.raises(Invalid):
            await bus.publish_many("orders", list(range(self.features.batch_max + 1)))
        async with bus.subscribe("orders", group="billing") as stream:
            await self.check_quiet(stream, clock)

    async def test_what_is_not_promised_is_refused(self, bus: Bus) -> None:
        asked: dict[str, dict[str, Any]] = {
            "priority": {"priority": "high"},
            "delay": {"delay_s": 1.0},
            "ttl": {"ttl_s": 1.0},
        }
        for feature, fields in asked.items():
            if not getattr(self.features, feature):
                with pytest.raises(Invalid):
                    await bus.publish("orders", 1, **fields)
        for ordering in {"key", "partition", "none"} - set(self.features.ordering):
            policy = self.policy(ordering=ordering)
            with pytest.raises(Invalid):
                async with bus.subscribe("orders", group=f"g-{ordering}", policy=policy):
                    pass
        assert (await bus.publish("orders", 1)).offset >= 1

    # -- groups and members --------------------------------------------------------------------

    async def test_each_group_gets_everything(self, bus: Bus) -> None:
        await bus.publish_many("orders", [1, 2, 3])
        async with (
            bus.subscribe("orders", group="billing") as billing,
            bus.subscribe("orders", group="audit") as audit,
        ):
            assert payloads(await self.now(billing, 3)) == [1, 2, 3]
            assert payloads(await self.now(audit, 3)) == [1, 2, 3]

    async def test_members_of_a_group_share(self, bus: Bus, clock: AnyClock) -> None:
        async with (
            bus.subscribe("orders", group="billing", max_inflight=5) as one,
            bus.subscribe("orders", group="billing", max_inflight=5) as two,
        ):
            await bus.publish_many("orders", list(range(10)))
            mine, yours = await self.now(one, 5), await self.now(two, 5)
            await self.check_quiet(one, clock)
        assert sorted(payloads(mine + yours)) == list(range(10))

    async def test_an_idle_member_is_visible(self, bus: Bus) -> None:
        await bus.publish("orders", 1)
        assert await bus.members() == []
        async with bus.subscribe("orders", group="billing") as stream:
            (idle,) = await bus.members("orders", "billing")
            assert (idle.topic, idle.group) == ("orders", "billing")
            assert idle.pid > 0
            assert idle.host
            assert idle.since > 0
            assert idle.last_delivery is None
            assert (await bus.groups("orders", "billing"))[0].members == 1
            (delivery,) = await self.now(stream, 1)
            (busy,) = await bus.members("orders")
            assert busy.in_flight >= 1
            assert busy.last_delivery is not None
            await delivery.ack()
            assert await bus.members("others") == []
            assert await bus.members(group="others") == []
        assert await bus.members() == []

    async def test_every_partition_is_delivered(self, bus: Bus) -> None:
        self.need("partitions")
        await bus.define("orders", partitions=4)
        sent = [Event(topic="orders", key=f"k{n}", payload=n) for n in range(20)]
        await bus.publish_many("orders", sent)
        async with bus.subscribe("orders", group="billing") as stream:
            got = await self.now(stream, 20)
        assert sorted(payloads(got)) == list(range(20))
        assert {delivery.partition for delivery in got} == {0, 1, 2, 3}

    async def test_partitions_that_are_added_are_delivered_too(self, bus: Bus) -> None:
        self.need("partitions")
        async with bus.subscribe("orders", group="billing") as stream:
            await bus.define("orders", partitions=3)
            await bus.publish_many("orders", list(range(9)))
            assert sorted(payloads(await self.now(stream, 9))) == list(range(9))

    async def test_what_is_acked_never_comes_again(self, bus: Bus, clock: AnyClock) -> None:
        await bus.publish_many("orders", [1, 2, 3])
        async with bus.subscribe("orders", group="billing") as stream:
            one, _, three = await self.now(stream, 3)
            assert (await one.ack(), await three.ack()) == (True, True)
        async with bus.subscribe("orders", group="billing") as stream:
            assert payloads(await self.now(stream)) == [2]
            await self.check_quiet(stream, clock)

    async def test_a_subscriber_that_leaves_gives_back_what_it_has(self, bus: Bus) -> None:
        await bus.publish_many("orders", [1, 2, 3])
        async with bus.subscribe("orders", group="billing", policy=self.policy()) as stream:
            (held,) = await self.now(stream)

        async with bus.subscribe("orders", group="billing") as stream:
            again = await self.now(stream, 3)
        tries = {delivery.event.payload: delivery.attempt for delivery in again}
        assert tries == {1: 2, 2: 1, 3: 1}  # what nobody had seen was not a try
        assert await held.ack() is False, "it is no longer this subscriber's"

    async def test_a_subscriber_that_crashes_loses_nothing(self, bus: Bus) -> None:
        await bus.publish_many("orders", [1, 2])

        async def crash() -> None:
            async with bus.subscribe("orders", group="billing", policy=self.policy()) as stream:
                async for delivery in stream:
                    raise RuntimeError(delivery.event.payload)

        with pytest.raises(RuntimeError, match="1"):
            await crash()
        async with bus.subscribe("orders", group="billing") as stream:
            assert sorted(payloads(await self.now(stream, 2))) == [1, 2]

    async def test_another_connection_is_another_member(self, bus: Bus, connect: Connect) -> None:
        self.need("shared")
        other = connect()
        try:
            policy = None
            if not self.features.shared_keys:  # one connection at a time has a partition then
                policy = self.policy(ordering="none")
            await bus.publish_many("orders", list(range(6)))
            async with (
                bus.subscribe("orders", group="billing", policy=policy, max_inflight=3) as mine,
                other.subscribe("orders", group="billing", max_inflight=3) as theirs,
            ):
                both = await self.now(mine, 3) + await self.now(theirs, 3)
                assert sorted(payloads(both)) == list(range(6))
                for delivery in both:
                    await delivery.ack()
                await other.publish("orders", "more")
                await self.check_settled(mine, theirs)
        finally:
            await other.close()

    async def check_settled(self, *streams: Any) -> None:
        """One of the streams gets the one record that is left."""
        waiting = [asyncio.ensure_future(anext(stream)) for stream in streams]
        done, late = await asyncio.wait(waiting, timeout=10, return_when="FIRST_COMPLETED")
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        assert [task.result().event.payload for task in done] == ["more"]

    async def test_a_group_goes_on_where_it_was(
        self, bus: Bus, connect: Connect, clock: AnyClock
    ) -> None:
        self.need("persistent")
        await bus.publish_many("orders", [1, 2, 3])
        async with bus.subscribe("orders", group="billing") as stream:
            for delivery in await self.now(stream, 2):
                await delivery.ack()
        await bus.close()

        again = connect()
        try:
            async with again.subscribe("orders", group="billing") as stream:
                assert payloads(await self.now(stream)) == [3]
                await self.check_quiet(stream, clock)
        finally:
            await again.close()

    # -- the verbs -----------------------------------------------------------------------------

    @pytest.mark.parametrize("first", ["ack", "nack", "term"])
    @pytest.mark.parametrize("then", ["ack", "nack", "term"])
    async def test_the_first_verb_wins(
        self, bus: Bus, clock: AnyClock, first: str, then: str
    ) -> None:
        await bus.publish("orders", 1)
        async with bus.subscribe("orders", group="billing", policy=self.policy()) as stream:
            (delivery,) = await self.now(stream)
            assert await getattr(delivery, first)() is True
            assert await getattr(delivery, then)() is False
            await delivery.in_progress()
            if first == "nack":
                assert (await self.now(stream))[0].attempt == 2
            else:
                await self.check_quiet(stream, clock)

    async def test_a_nack_comes_again_after_its_delay(self, bus: Bus, clock: AnyClock) -> None:
        await bus.publish("orders", 1)
        async with bus.subscribe("orders", group="billing", policy=self.policy()) as stream:
            (delivery,) = await self.now(stream)
            before = clock.monotonic()
            await delivery.nack(delay_s=2 * self.unit_s)
            again = await self.later(stream, clock, 4 * self.unit_s)
        assert again.attempt == 2
        assert clock.monotonic() - before >= 1.99 * self.unit_s

    async def test_the_delay_between_tries_grows_up_to_a_bound(
        self, bus: Bus, clock: AnyClock
    ) -> None:
        unit = self.unit_s
        policy = self.policy(backoff_base_s=unit, backoff_mult=2.0, backoff_max_s=3 * unit)
        await bus.publish("orders", 1)
        async with bus.subscribe("orders", group="billing", policy=policy) as stream:
            (delivery,) = await self.now(stream)
            for bound in (1, 2, 3, 3, 3):
                await delivery.nack()
                delivery = await self.later(stream, clock, (bound + 0.5) * unit)
        assert delivery.attempt == 6

    async def test_what_is_not_settled_in_time_comes_again(self, bus: Bus, clock: AnyClock) -> None:
        policy = self.policy(ack_timeout_s=3 * self.unit_s)
        await bus.publish("orders", 1)
        async with bus.subscribe("orders", group="billing", policy=policy) as stream:
            await self.now(stream)
            before = clock.monotonic()
            again = await self.later(stream, clock, 6 * self.unit_s)
        assert again.attempt == 2
        assert clock.monotonic() - before >= 2.9 * self.unit_s

    async def test_a_delivery_that_timed_out_no_longer_fills_the_window(
        self, bus: Bus, clock: AnyClock
    ) -> None:
        policy = self.policy(ack_timeout_s=self.unit_s)
        await bus.publish("orders", 1)
        async with bus.subscribe(
            "orders", group="billing", policy=policy, max_inflight=1
        ) as stream:
            await self.now(stream)
            assert (await self.later(stream, clock, 4 * self.unit_s)).attempt == 2

    async def test_in_progress_begins_the_timeout_anew(self, bus: Bus, clock: AnyClock) -> None:
        policy = self.policy(ack_timeout_s=3 * self.unit_s)
        await bus.publish("orders", 1)
        async with bus.subscribe("orders", group="billing", policy=policy) as stream:
            (delivery,) = await self.now(stream)
            for _ in range(4):
                await clock.run(2 * self.unit_s)
                await delivery.in_progress()
                await self.check_quiet(stream, clock)
            assert (await self.later(stream, clock, 6 * self.unit_s)).attempt == 2

    # -- order, priority, time -----------------------------------------------------------------

    async def test_the_records_of_a_key_wait_for_the_one_that_failed(
        self, bus: Bus, clock: AnyClock
    ) -> None:
        sent = [("a", 1), ("a", 2), ("b", 3), (None, 4), ("a", 5)]
        for key, payload in sent:
            await bus.publish("orders", payload, key=key)
        async with bus.subscribe("orders", group="billing", policy=self.policy()) as stream:
            got = {d.event.payload: d for d in await self.now(stream, 3)}
            assert set(got) == {1, 3, 4}
            await got[1].nack(delay_s=self.unit_s)
            await self.check_quiet(stream, clock)

            again = await self.later(stream, clock, 3 * self.unit_s)
            assert (again.event.payload, again.attempt) == (1, 2)
            await self.check_quiet(stream, clock)
            await again.ack()
            (two,) = await self.now(stream)
            await two.ack()
            assert payloads([two, *await self.now(stream)]) == [2, 5]

    async def test_in_strict_order_everything_waits_for_the_one_that_failed(
        self, bus: Bus, clock: AnyClock
    ) -> None:
        if "partition" not in self.features.ordering:
            pytest.skip("strict order is not promised")
        await bus.publish_many("orders", [1, 2, 3])
        policy = self.policy(ordering="partition")
        seen = []
        async with bus.subscribe("orders", group="billing", policy=policy) as stream:
            (one,) = await self.now(stream)
            await one.nack(delay_s=self.unit_s)
            await self.check_quiet(stream, clock)
            delivery = await self.later(stream, clock, 3 * self.unit_s)
            while True:
                seen.append((delivery.event.payload, delivery.attempt))
                await delivery.ack()
                if len(seen) == 3:
                    break
                (delivery,) = await self.now(stream)
        assert seen == [(1, 2), (2, 1), (3, 1)]

    async def test_without_order_nothing_waits(self, bus: Bus) -> None:
        if "none" not in self.features.ordering:
            pytest.skip("deliveries without order are not promised")
        await bus.publish_many("orders", [1, 2, 3], key="a")
        policy = self.policy(ordering="none")
        async with bus.subscribe("orders", group="billing", policy=policy) as stream:
            assert payloads(await self.now(stream, 3)) == [1, 2, 3]

    async def test_what_matters_more_comes_first(self, bus: Bus) -> None:
        self.need("priority")
        for priority in ("low", "normal", "critical", "high", "critical"):
            await bus.publish("orders", priority, priority=priority)
        got = []
        async with bus.subscribe("orders", group="billing", max_inflight=1) as stream:
            for _ in range(5):
                (delivery,) = await self.now(stream)
                got.append((delivery.event.payload, delivery.offset))
                await delivery.ack()
        assert got == [("critical", 3), ("critical", 5), ("high", 4), ("normal", 2), ("low", 1)]

    async def test_what_matters_more_overtakes_what_came_before_it(
        self, bus: Bus, clock: AnyClock
    ) -> None:
        self.need("priority")
        await bus.publish_many("orders", list(range(20)))
        async with bus.subscribe("orders", group="billing", max_inflight=1) as stream:
            (first,) = await self.now(stream)
            await bus.publish("orders", "critical", priority="critical")
            await clock.settle()  # the pump of a remote store hears of it
            await first.ack()
            assert payloads([first, *await self.now(stream)]) == [0, "critical"]

    async def test_what_waited_long_enough_comes_before_what_matters_more(
        self, bus: Bus, clock: AnyClock
    ) -> None:
        self.need("priority")
        policy = self.policy(aging_s=self.unit_s)
        async with bus.subscribe(
            "orders", group="billing", policy=policy, max_inflight=1
        ) as stream:
            await bus.publish("orders", "first")
            (first,) = await self.now(stream)
            await bus.publish("orders", "low", priority="low")
            await clock.run(5 * self.unit_s)
            await bus.publish("orders", "critical", priority="critical")
            await clock.settle()
            await first.ack()
            (next_one,) = await self.now(stream)
        assert next_one.event.payload == "low"

    async def test_a_delayed_event_comes_when_it_is_due(self, bus: Bus, clock: AnyClock) -> None:
        self.need("delay")
        before = clock.now()
        await bus.publish("orders", "later", delay_s=3 * self.unit_s)
        await bus.publish("orders", "now")
        async with bus.subscribe("orders", group="billing") as stream:
            assert payloads(await self.now(stream)) == ["now"]
            await self.check_quiet(stream, clock)
            delivery = await self.later(stream, clock, 6 * self.unit_s)
        assert (delivery.event.payload, delivery.attempt) == ("later", 1)
        assert clock.now() - before >= timedelta(seconds=2.9 * self.unit_s)

    @pytest.mark.parametrize("kind", ["drop", "dlq", "deliver"])
    async def test_an_expired_event_meets_its_topics_policy(
        self, bus: Bus, clock: AnyClock, kind: TtlPolicy
    ) -> None:
        self.need("ttl", "dead_letters")
        await bus.define("orders", ttl_policy=kind)
        await bus.publish("orders", "old", ttl_s=self.unit_s)
        await bus.publish("orders", "fresh", ttl_s=1000 * self.unit_s)
        await clock.run(self.unit_s)
        async with bus.subscribe("orders", group="billing", policy=self.policy()) as stream:
            if kind == "deliver":
                assert payloads(await self.now(stream, 2)) == ["old", "fresh"]
            else:
                assert payloads(await self.now(stream)) == ["fresh"]
            await self.check_quiet(stream, clock)
        letters = [letter async for letter in bus.dead_letters("orders").letters()]
        found = [(letter.event.payload, letter.reason) for letter in letters]
        assert found == ([("old", "expired")] if kind == "dlq" else [])

    # -- where a group begins, and what it sees ------------------------------------------------

    async def test_a_group_begins_where_it_is_told_to(self, bus: Bus, clock: AnyClock) -> None:
        await bus.publish_many("orders", [1, 2])
        await clock.run(10 * self.unit_s)
        middle = clock.now()
        await bus.publish_many("orders", [3, 4])
        starts: dict[str, tuple[Any, list[int]]] = {
            "a": ("earliest", [1, 2, 3, 4, 5]),
            "b": ("latest", [5]),
        }
        if self.features.replay:
            starts |= {"c": (2, [2, 3, 4, 5]), "d": (middle, [3, 4, 5]), "e": (99, [5])}
        streams = {}
        for group, (start, _) in starts.items():
            streams[group] = await bus.subscribe("orders", group=group, start=start).__aenter__()
        await bus.publish("orders", 5)
        for group, (_, wanted) in starts.items():
            assert payloads(await self.now(streams[group], len(wanted))) == wanted, group
            await self.check_quiet(streams[group], clock)
            await streams[group].__aexit__(None, None, None)

    async def test_a_group_that_exists_keeps_its_place(self, bus: Bus, clock: AnyClock) -> None:
        await bus.publish_many("orders", [1, 2])
        async with bus.subscribe("orders", group="billing", start="latest"):
            pass
        await bus.publish("orders", 3)
        async with bus.subscribe("orders", group="billing", start="earliest") as stream:
            assert payloads(await self.now(stream)) == [3]
            await self.check_quiet(stream, clock)

    async def test_a_pattern_takes_in_topics_that_come_later(
        self, bus: Bus, clock: AnyClock
    ) -> None:
        self.need("patterns")
        await bus.publish("orders.eu", 1)
        await bus.publish("refunds.eu", "no")
        async with (
            bus.subscribe("orders.*", group="billing") as one,
            bus.subscribe("orders.>", group="audit", start="latest") as all_,
        ):
            await bus.publish("orders.us", 2)
            await bus.publish("orders.us.ca", 3)
            assert sorted(payloads(await self.now(one, 2))) == [1, 2]
            # A topic that did not exist is all new, also to a group that begins with the latest.
            assert sorted(payloads(await self.now(all_, 2))) == [2, 3]
            await self.check_quiet(one, clock)
            await self.check_quiet(all_, clock)

    async def test_only_what_passes_the_filter_is_delivered(
        self, bus: Bus, clock: AnyClock
    ) -> None:
        await bus.publish_many("orders", [{"n": n} for n in range(6)])
        wanted: dict[str, Any] = {
            "text": "payload.n >= 4",
            "code": lambda event: event.payload["n"] < 2,
        }
        for group, where in wanted.items():
            async with bus.subscribe("orders", group=group, where=where) as stream:
                got = await self.now(stream, 2)
                assert [d.event.payload["n"] for d in got] == (
                    [4, 5] if group == "text" else [0, 1]
                )
                for delivery in got:
                    await delivery.ack()
                await self.check_quiet(stream, clock)
            async with bus.subscribe("orders", group=group) as stream:
                await self.check_quiet(stream, clock)  # the group is done with the rest

    # -- limits and conflicts ------------------------------------------------------------------

    async def test_no_more_is_in_flight_than_asked_for(self, bus: Bus, clock: AnyClock) -> None:
        await bus.publish_many("orders", list(range(50)))
        async with (
            bus.subscribe("orders", group="billing", max_inflight=3) as slow,
            bus.subscribe("orders", group="audit") as quick,
        ):
            held = await self.now(slow, 3)
            await self.check_quiet(slow, clock)
            assert len(await self.now(quick, 50)) == 50, "a slow consumer holds up nobody else"

            await held[1].ack()
            assert payloads(await self.now(slow)) == [3]
            await self.check_quiet(slow, clock)

    async def test_a_wide_window_is_filled_without_any_ack(self, bus: Bus) -> None:
        for _ in range(3):  # in parts: a bus may bound the size of a batch
            await bus.publish_many("orders", list(range(1000)))
        async with bus.subscribe("orders", group="billing", max_inflight=2500) as stream:
            assert len(await self.now(stream, 2500)) == 2500

    async def test_another_policy_for_a_group_is_a_conflict(self, bus: Bus) -> None:
        policy = self.policy(max_retries=1)
        async with bus.subscribe("orders", group="billing", policy=policy):
            pass
        with pytest.raises(Conflict):
            async with bus.subscribe("orders", group="billing", policy=self.policy(max_retries=2)):
                pass
        async with bus.subscribe("orders", group="billing", policy=policy):
            pass
        async with bus.subscribe("orders", group="billing") as stream:
            await bus.publish("orders", 1)
            assert payloads(await self.now(stream)) == [1]

    async def test_a_subscription_that_is_wrong_is_refused(self, bus: Bus) -> None:
        for topic, group in (("a/b", "g"), ("a.>.b", "g"), ("orders", "g/h"), ("orders", "_g")):
            with pytest.raises(InvalidName):
                bus.subscribe(topic, group=group)
        for options in ({"start": "middle"}, {"start": 1.5}, {"max_inflight": 0}):
            with pytest.raises(InvalidOption):
                bus.subscribe("orders", group="billing", **options)
        for options in ({"where": "payload.n >>> 4"}, {"where": 4}):
            with pytest.raises(InvalidFilter):
                bus.subscribe("orders", group="billing", **options)

    # -- the end -------------------------------------------------------------------------------

    async def test_a_stream_ends_with_its_bus(self, bus: Bus) -> None:
        subscription = bus.subscribe("orders", group="billing")
        async with subscription as stream:
            waiting = asyncio.ensure_future(anext(stream, "the end"))
            await asyncio.sleep(0)
            await bus.close()
            assert await asyncio.wait_for(waiting, 10) == "the end"

    async def test_closing_twice_is_closing_once(self, bus: Bus) -> None:
        await bus.publish("orders", 1)
        await bus.close()
        await bus.close()
        with pytest.raises(Closed):
            await bus.publish("orders", 2)
        with pytest.raises(Closed):
            await bus.subscribe("orders", group="billing").__aenter__()
