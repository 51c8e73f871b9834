"""What every ``Bus`` must do about groups, as tests: list them, move them, pause them, and change
their policy. Mix ``GroupContract`` in beside ``BusContract``.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta

import pytest

from trunkline.bus import Bus
from trunkline.errors import Conflict, InvalidName, InvalidOption, NotFound
from trunkline.testing.bus_fixtures import AnyClock, BusFixtures, payloads


class GroupContract(BusFixtures):
    async def _settle(self, bus: Bus, count: int, group: str = "billing") -> None:
        """Let a group settle its first records and leave."""
        async with bus.subscribe("orders", group=group, policy=self.policy()) as stream:
            for delivery in await self.now(stream, count):
                await delivery.ack()

    async def test_groups_tell_where_they_stand(self, bus: Bus) -> None:
        await bus.publish_many("orders", [1, 2, 3])
        await self._settle(bus, 2)
        await bus.publish("others", 1)

        (one,) = await bus.groups("orders", "billing")
        assert (one.topic, one.partition, one.group) == ("orders", 0, "billing")
        assert (one.lag, one.leases, one.paused) == (1, 0, False)
        assert one.policy == self.policy()
        assert await bus.lag("orders", "billing") == 1
        assert [found.group for found in await bus.groups("orders")] == ["billing"]
        assert await bus.groups("others") == []

    async def test_a_group_that_is_not_there_has_no_lag_and_cannot_be_changed(
        self, bus: Bus
    ) -> None:
        await bus.publish("orders", 1)
        assert await bus.lag("orders", "billing") == 0
        for change in (
            bus.seek("orders", "billing", "earliest"),
            bus.pause("orders", "billing"),
            bus.resume("orders", "billing"),
            bus.edit("orders", "billing", max_retries=1),
        ):
            with pytest.raises(NotFound):
                await change

    async def test_seek_moves_a_group(self, bus: Bus) -> None:
        receipts = await bus.publish_many("orders", [1, 2, 3])
        await self._settle(bus, 3)
        for to, expected in (
            ("earliest", [1, 2, 3]),
            (receipts[1].offset, [2, 3]),
        ):
            (one,) = await bus.seek("orders", "billing", to)
            assert one.lag == len(expected)
            async with bus.subscribe("orders", group="billing") as stream:
                found = await self.now(stream, len(expected))
                for delivery in found:
                    await delivery.ack()
            assert payloads(found) == expected
        await bus.seek("orders", "billing", "earliest")
        assert (await bus.seek("orders", "billing", "latest"))[0].lag == 0

    async def test_seek_moves_a_group_to_a_time(self, bus: Bus, clock: AnyClock) -> None:
        self.need("replay")
        await bus.publish("orders", "before")
        await clock.run(self.unit_s)
        middle = clock.now()
        await clock.run(self.unit_s)
        await bus.publish("orders", "after")
        await self._settle(bus, 2)
        assert (await bus.seek("orders", "billing", middle))[0].lag == 1
        later = clock.now() + timedelta(seconds=self.unit_s)
        assert (await bus.seek("orders", "billing", later))[0].lag == 0

    async def test_a_paused_group_gets_nothing(self, bus: Bus, clock: AnyClock) -> None:
        await bus.publish("orders", 1)
        async with bus.subscribe("orders", group="billing", policy=self.policy()) as stream:
            (first,) = await self.now(stream)
            await first.ack()
            (one,) = await bus.pause("orders", "billing")
            assert one.paused
            await bus.publish("orders", 2)
            await self.check_quiet(stream, clock)
            (one,) = await bus.resume("orders", "billing")
            assert not one.paused
            (second,) = await self.now(stream)
            assert second.event.payload == 2

    async def test_an_edited_policy_counts_for_members_at_work(self, bus: Bus) -> None:
        self.need("dead_letters")
        await bus.publish("orders", 1)
        policy = self.policy(max_retries=5)
        async with bus.subscribe("orders", group="billing", policy=policy) as stream:
            (first,) = await self.now(stream)
            (one,) = await bus.edit("orders", "billing", max_retries=0)
            assert (one.policy.max_retries, one.policy.ack_timeout_s) == (0, policy.ack_timeout_s)
            await first.nack()
            async with asyncio.timeout(20):
                while not [letter async for letter in bus.dead_letters("orders").letters()]:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

    async def test_a_wrong_change_is_refused(self, bus: Bus) -> None:
        await bus.publish("orders", 1)
        await self._settle(bus, 1)
        with pytest.raises(InvalidOption):
            await bus.edit("orders", "billing")
        with pytest.raises(InvalidOption):
            await bus.edit("orders", "billing", max_retries=-1)
        with pytest.raises(InvalidOption):
            await bus.seek("orders", "billing", "tomorrow")
        with pytest.raises(InvalidName):
            await bus.pause("orders", "a b")
        (one,) = await bus.groups("orders", "billing")
        assert one.policy == self.policy()

    async def test_a_policy_that_differs_at_start_is_a_conflict(self, bus: Bus) -> None:
        await bus.publish("orders", 1)
        await self._settle(bus, 1)
        other = self.policy(max_retries=9)
        with pytest.raises(Conflict, match="max_retries 5 -> 9"):
            await bus.subscribe("orders", group="billing", policy=other).__aenter__()
        with pytest.raises(InvalidOption, match="on_conflict"):
            bus.subscribe("orders", group="billing", on_conflict="maybe")  # type: ignore[arg-type]

    async def test_a_policy_that_differs_at_start_is_kept_or_updated(
        self, bus: Bus, caplog: pytest.LogCaptureFixture
    ) -> None:
        await bus.define("orders", partitions=2 if self.features.partitions else 1)
        await bus.publish("orders", 1)
        await self._settle(bus, 1)
        other = self.policy(max_retries=9)
        for on_conflict, retries in (("keep", 5), ("update", 9)):
            caplog.clear()
            with caplog.at_level(logging.WARNING):
                async with bus.subscribe(
                    "orders",
                    group="billing",
                    policy=other,
                    on_conflict="keep" if on_conflict == "keep" else "update",
                ):
                    found = await bus.groups("orders", "billing")
            assert {one.policy.max_retries for one in found} == {retries}
            assert "max_retries 5 -> 9" in caplog.text
        async with bus.subscribe("orders", group="billing", policy=other):
            pass  # it has this policy now

    async def test_a_forgotten_group_begins_anew(self, bus: Bus) -> None:
        await bus.publish("orders", 1)
        await self._settle(bus, 1)
        await bus.forget("orders", "billing")
        assert await bus.groups("orders") == []
        async with bus.subscribe("orders", group="billing") as stream:
            assert payloads(await self.now(stream)) == [1]
