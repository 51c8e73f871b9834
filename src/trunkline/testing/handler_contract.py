"""What every bus must do with handlers, middleware and dead letters, as tests.

Used together with ``BusContract``; see there.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from trunkline.bus import Bus, Delivery
from trunkline.delivery.deadletters import Letter
from trunkline.errors import (
    Conflict,
    FatalError,
    InvalidFilter,
    InvalidOption,
    NotFound,
    Reject,
    Retry,
)
from trunkline.event import Event, Receipt
from trunkline.testing.bus_fixtures import AnyClock, BusFixtures, Connect, payloads


class Recorder:
    """Middleware that writes down what passes through it."""

    def __init__(self, name: str, seen: list[str]) -> None:
        self._name = name
        self._seen = seen

    async def publish(
        self, events: list[Event], call_next: Callable[[list[Event]], Awaitable[list[Receipt]]]
    ) -> list[Receipt]:
        self._seen.append(f"{self._name} sends {len(events)}")
        receipts = await call_next(events)
        self._seen.append(f"{self._name} sent {receipts[0].offset}")
        return receipts

    async def handle(
        self, delivery: Delivery, call_next: Callable[[Delivery], Awaitable[Any]]
    ) -> Any:
        self._seen.append(f"{self._name} begins")
        result = await call_next(delivery)
        self._seen.append(f"{self._name} ends with {result}")
        return result


class HandlerContract(BusFixtures):
    """Handlers, middleware, the end of a bus, and dead letters."""

    async def letters(self, bus: Bus, **options: Any) -> list[Letter]:
        return [letter async for letter in bus.dead_letters("orders").letters(**options)]

    async def bury(self, bus: Bus, *numbers: Any, group: str = "billing") -> None:
        """Publish events and let a group reject them all."""
        await bus.publish_many("orders", list(numbers))
        async with bus.subscribe("orders", group=group, policy=self.policy()) as stream:
            for delivery in await self.now(stream, len(numbers)):
                await delivery.term("no good")

    # -- handlers ------------------------------------------------------------------------------

    async def test_a_handler_that_returns_has_acked(self, bus: Bus, clock: AnyClock) -> None:
        seen: list[Any] = []

        @bus.on("orders", group="billing")
        async def bill(event: Event) -> None:
            seen.append(event.payload)

        @bus.on("orders", group="audit")
        async def audit(event: Event, delivery: Delivery) -> None:
            seen.append((event.payload, delivery.group, delivery.attempt))

        await bus.publish("orders", 1)
        assert await bus.drain(30) is True
        assert sorted(seen, key=str) == [(1, "audit", 1), 1]
        await bus.stop()
        async with bus.subscribe("orders", group="billing") as stream:
            await self.check_quiet(stream, clock)

    async def test_a_plain_function_may_block(self, bus: Bus) -> None:
        here = threading.get_ident()
        seen: list[bool] = []
        both = threading.Barrier(2, timeout=10)

        @bus.on("orders", group="billing", workers=2)
        def bill(_: Event) -> None:
            both.wait()
            seen.append(threading.get_ident() == here)

        await bus.publish_many("orders", [1, 2])
        await bus.drain(30)
        assert seen == [False, False]

    async def test_a_handler_that_takes_long_keeps_its_delivery(
        self, bus: Bus, clock: AnyClock
    ) -> None:
        tries: list[int] = []
        done = asyncio.Event()
        policy = self.policy(ack_timeout_s=4 * self.unit_s, max_retries=1)

        @bus.on("orders", group="billing", workers=2, policy=policy)
        async def bill(_: Event, delivery: Delivery) -> None:
            tries.append(delivery.attempt)
            await done.wait()

        await bus.publish("orders", 1)
        await self.until(lambda: bool(tries))
        for _ in range(40):
            await clock.run(self.unit_s / 4)
        done.set()
        assert await bus.drain(30) is True
        assert tries == [1]
        assert await self.letters(bus) == []

    async def test_what_a_plain_function_gives_to_await_is_awaited(self, bus: Bus) -> None:
        seen: list[Any] = []

        async def bill(event: Event) -> None:
            seen.append(event.payload)

        bus.on("orders", group="billing")(lambda event: bill(event))
        await bus.publish("orders", 1)
        await bus.drain(30)
        assert seen == [1]

    async def test_as_many_run_at_once_as_there_are_workers(self, bus: Bus) -> None:
        busy, most, go = 0, 0, asyncio.Event()

        @bus.on("orders", group="billing", workers=3)
        async def bill(_: Event) -> None:
            nonlocal busy, most
            busy += 1
            most = max(most, busy)
            await go.wait()
            busy -= 1

        await bus.publish_many("orders", list(range(10)))
        await self.until(lambda: busy == 3)
        go.set()
        await bus.drain(30)
        assert (most, busy) == (3, 0)

    async def test_a_failure_is_tried_again_and_then_a_dead_letter(self, bus: Bus) -> None:
        tries: list[tuple[Any, int]] = []

        @bus.on("orders", group="billing", policy=self.policy(max_retries=2))
        async def bill(event: Event, delivery: Delivery) -> None:
            tries.append((event.payload, delivery.attempt))
            if event.payload == "bad" or delivery.attempt == 1:
                raise ValueError("the till is closed")

        await bus.publish_many("orders", ["bad", "once"])
        await bus.drain(30)

        assert sorted(tries) == [("bad", 1), ("bad", 2), ("bad", 3), ("once", 1), ("once", 2)]
        if self.features.dead_letters:
            (letter,) = await self.letters(bus)
            assert (letter.topic, letter.partition, letter.origin) == ("orders", 0, 1)
            assert (letter.group, letter.attempts, letter.reason) == ("billing", 3, "retries")
            assert letter.error == "ValueError: the till is closed"
            assert letter.event.payload == "bad"

    async def test_a_handler_asks_for_a_retry_at_a_time(self, bus: Bus, clock: AnyClock) -> None:
        times: list[float] = []

        @bus.on("orders", group="billing", policy=self.policy())
        async def bill(_: Event) -> None:
            times.append(clock.monotonic())
            if len(times) == 1:
                raise Retry(delay_s=2 * self.unit_s)

        await bus.publish("orders", 1)
        await self.until(lambda: len(times) == 1)
        for _ in range(80):
            await clock.run(self.unit_s / 20)
        await self.until(lambda: len(times) == 2)
        assert times[1] - times[0] >= 1.99 * self.unit_s

    @pytest.mark.parametrize("signal", [Reject("broken"), FatalError("broken")], ids=repr)
    async def test_a_handler_rejects_for_good(self, bus: Bus, signal: Exception) -> None:
        self.need("dead_letters")
        tries = []

        @bus.on("orders", group="billing", policy=self.policy())
        async def bill(event: Event) -> None:
            tries.append(event.payload)
            raise signal

        await bus.publish("orders", 1)
        await bus.drain(30)
        assert tries == [1]
        (letter,) = await self.letters(bus)
        assert (letter.reason, letter.error, letter.attempts) == ("rejected", "broken", 1)

    async def test_a_handler_that_settles_by_itself_is_left_alone(self, bus: Bus) -> None:
        attempts = []

        @bus.on("orders", group="billing", policy=self.policy())
        async def bill(_: Event, delivery: Delivery) -> None:
            attempts.append(delivery.attempt)
            if delivery.attempt == 1:
                await delivery.nack()

        await bus.publish("orders", 1)
        await bus.drain(30)
        assert attempts == [1, 2]

    async def test_handlers_of_a_key_never_run_at_the_same_time(self, bus: Bus) -> None:
        busy: set[str | None] = set()
        overlaps: list[int] = []
        order: dict[str | None, list[int]] = {"a": [], "b": [], "c": []}
        failed = set()

        @bus.on("orders", group="billing", workers=8, policy=self.policy())
        async def bill(event: Event) -> None:
            if event.key in busy:  # raised in here, it would only be tried again
                overlaps.append(event.payload)
            busy.add(event.key)
            await asyncio.sleep(0)
            busy.discard(event.key)
            if event.payload % 5 == 0 and event.payload not in failed:
                failed.add(event.payload)
                raise ValueError("for once")
            order[event.key].append(event.payload)

        sent = [Event(topic="orders", key="abc"[n % 3], payload=n) for n in range(60)]
        await bus.publish_many("orders", sent)
        assert await bus.drain(30)
        assert not overlaps, "two of a key at once"
        for rest, key in enumerate("abc"):
            assert order[key] == list(range(rest, 60, 3))

    async def test_a_handler_that_is_wrong_is_told(self, bus: Bus) -> None:
        with pytest.raises(InvalidOption):
            bus.on("orders", group="billing", workers=0)
        async with bus.subscribe("orders", group="billing", policy=self.policy(max_retries=1)):
            pass

        @bus.on("orders", group="billing", policy=self.policy(max_retries=2))
        async def bill(_: Event) -> None:
            raise AssertionError("never called")

        with pytest.raises(Conflict):
            await bus.drain(10)
        with pytest.raises(Conflict):
            await bus.stop()

    # -- middleware ----------------------------------------------------------------------------

    async def test_middleware_surrounds_publishing_and_handling(self, bus: Bus) -> None:
        seen: list[str] = []
        bus.use(Recorder("outer", seen), Recorder("inner", seen))
        await bus.publish_many("orders", [1, 2])
        assert seen == ["outer sends 2", "inner sends 2", "inner sent 1", "outer sent 1"]
        seen.clear()

        @bus.on("orders", group="billing")
        async def bill(_: Event) -> str:
            return "done"

        await bus.drain(30)
        one = ["outer begins", "inner begins", "inner ends with done", "outer ends with done"]
        assert seen == one * 2

    async def test_middleware_may_change_or_refuse_what_is_published(self, bus: Bus) -> None:
        class Stamp:
            async def publish(self, events: list[Event], call_next: Any) -> Any:
                if any(event.payload == "secret" for event in events):
                    raise InvalidOption("not this")
                return await call_next(
                    [Event(topic=e.topic, payload=e.payload, actor="stamp") for e in events]
                )

        bus.use(Stamp())
        with pytest.raises(InvalidOption):
            await bus.publish("orders", "secret")
        await bus.publish("orders", "open")
        async with bus.subscribe("orders", group="billing") as stream:
            (delivery,) = await self.now(stream)
        assert (delivery.event.payload, delivery.event.actor) == ("open", "stamp")

    async def test_what_middleware_raises_decides_like_the_handlers_own(self, bus: Bus) -> None:
        handled: list[int] = []

        class Guard:
            async def handle(self, delivery: Delivery, call_next: Any) -> Any:
                if delivery.attempt < 3:
                    raise Retry
                return await call_next(delivery)

        bus.use(Guard())

        @bus.on("orders", group="billing", policy=self.policy())
        async def bill(_: Event, delivery: Delivery) -> None:
            handled.append(delivery.attempt)

        await bus.publish("orders", 1)
        await bus.drain(30)
        assert handled == [3]

    # -- stop, drain, close --------------------------------------------------------------------

    async def test_stop_lets_a_handler_finish(self, bus: Bus, clock: AnyClock) -> None:
        begun, go, done = asyncio.Event(), asyncio.Event(), []

        @bus.on("orders", group="billing", policy=self.policy())
        async def bill(event: Event) -> None:
            begun.set()
            await go.wait()
            done.append(event.payload)

        await bus.publish_many("orders", [1, 2, 3])
        await begun.wait()
        stopping = asyncio.ensure_future(bus.stop(10))
        await clock.settle()
        go.set()
        await stopping

        assert done == [1], "what was not begun is left to others"
        async with bus.subscribe("orders", group="billing") as stream:
            rest = await self.now(stream, 2)
            assert [(d.event.payload, d.attempt) for d in rest] == [(2, 1), (3, 1)]
            await self.check_quiet(stream, clock)

    @pytest.mark.parametrize("timeout_s", [0, 0.01])
    async def test_stop_ends_a_handler_that_takes_too_long(
        self, bus: Bus, timeout_s: float
    ) -> None:
        begun = asyncio.Event()

        @bus.on("orders", group="billing", policy=self.policy())
        async def bill(_: Event) -> None:
            begun.set()
            await asyncio.Event().wait()

        await bus.publish("orders", 1)
        await begun.wait()
        await asyncio.wait_for(bus.stop(timeout_s), 10)
        async with bus.subscribe("orders", group="billing") as stream:
            assert (await self.now(stream))[0].attempt == 2

    async def test_a_handler_that_stops_its_bus_does_not_wait_for_ever(self, bus: Bus) -> None:
        ended = asyncio.Event()

        @bus.on("orders", group="billing", policy=self.policy())
        async def bill(_: Event) -> None:
            try:
                await bus.stop(0.01)
            finally:
                ended.set()

        await bus.publish("orders", 1)
        async with asyncio.timeout(10):
            await ended.wait()
            await bus.stop()
        async with bus.subscribe("orders", group="billing") as stream:
            assert (await self.now(stream))[0].attempt == 2

    async def test_a_bus_that_was_stopped_starts_again(self, bus: Bus) -> None:
        seen: list[Any] = []

        @bus.on("orders", group="billing")
        async def bill(event: Event) -> None:
            seen.append(event.payload)

        await bus.publish("orders", 1)
        await bus.drain(30)
        await bus.stop()
        await bus.publish("orders", 2)
        assert seen == [1]
        await bus.start()
        await bus.drain(30)
        assert seen == [1, 2]

    async def test_drain_says_when_it_took_too_long(self, bus: Bus) -> None:
        """Also where nobody moves the clock, as in a test that waits for a retry."""
        go = asyncio.Event()

        @bus.on("orders", group="billing")
        async def bill(_: Event) -> None:
            await go.wait()

        await bus.publish("orders", 1)
        async with asyncio.timeout(10):
            assert await bus.drain(0.05) is False
        go.set()
        assert await bus.drain(30) is True

    async def test_close_ends_handlers_and_keeps_what_they_settled(self, bus: Bus) -> None:
        seen: list[Any] = []
        enough = asyncio.Event()

        @bus.on("orders", group="billing")
        async def bill(event: Event) -> None:
            seen.append(event.payload)
            enough.set()

        await bus.publish("orders", 1)
        await enough.wait()
        await bus.close()
        assert seen == [1]

    # -- dead letters --------------------------------------------------------------------------

    async def test_a_dead_letter_says_where_it_came_from(self, bus: Bus) -> None:
        self.need("dead_letters")
        await bus.publish("orders", {"id": 1}, key="k", headers={"mine": "kept"})
        async with bus.subscribe("orders", group="billing", policy=self.policy()) as stream:
            (delivery,) = await self.now(stream)
            await delivery.term("no such customer")

        (letter,) = await self.letters(bus)
        assert (letter.topic, letter.partition, letter.origin) == ("orders", 0, 1)
        assert (letter.group, letter.attempts, letter.open) == ("billing", 1, True)
        assert (letter.reason, letter.error) == ("rejected", "no such customer")
        headers = letter.event.headers
        assert headers["mine"] == "kept"
        assert headers["dlq-id"] == delivery.event.id == letter.event.cause
        assert letter.event.key == "k"
        async with bus.subscribe("orders.DLQ", group="watch") as stream:
            assert payloads(await self.now(stream)) == [{"id": 1}]

    async def test_a_pattern_does_not_take_in_dead_letters(self, bus: Bus, clock: AnyClock) -> None:
        self.need("dead_letters", "patterns")
        await self.bury(bus, 1)
        async with bus.subscribe(">", group="watch") as stream:
            assert [d.topic for d in await self.now(stream)] == ["orders"]
            await self.check_quiet(stream, clock)

    async def test_a_redriven_record_goes_to_its_group_alone(
        self, bus: Bus, clock: AnyClock
    ) -> None:
        self.need("dead_letters")
        await self.bury(bus, 1, 2)
        async with (
            bus.subscribe("orders", group="billing") as billing,
            bus.subscribe("orders", group="audit") as audit,
        ):
            for delivery in await self.now(audit, 2):
                await delivery.ack()
            desk = bus.dead_letters("orders")
            done = [one async for one in desk.redrive(where=lambda event: event.payload == 2)]
            assert [(one.letter.origin, one.refused) for one in done] == [(2, "")]

            (again,) = await self.now(billing)
            assert (again.event.payload, again.attempt, again.offset) == (2, 1, 2)
            await again.ack()
            await self.check_quiet(billing, clock)
            await self.check_quiet(audit, clock)
        assert [letter.origin for letter in await self.letters(bus)] == [1]
        assert [x.open for x in await self.letters(bus, closed=True)] == [True, False]

    async def test_a_record_redriven_through_another_connection_is_delivered(
        self, bus: Bus, connect: Connect, clock: AnyClock
    ) -> None:
        self.need("dead_letters", "shared")
        await self.bury(bus, 1)
        other = connect()
        try:
            async with bus.subscribe("orders", group="billing") as stream:
                await self.check_quiet(stream, clock)
                done = [one.refused async for one in other.dead_letters("orders").redrive()]
                assert done == [""]
                assert payloads(await self.now(stream)) == [1]
        finally:
            await other.close()

    async def test_a_dry_run_changes_nothing(self, bus: Bus, clock: AnyClock) -> None:
        self.need("dead_letters")
        await self.bury(bus, 1)
        desk = bus.dead_letters("orders")
        assert len([one async for one in desk.redrive(dry_run=True)]) == 1
        assert len([one async for one in desk.drop(dry_run=True)]) == 1
        assert len(await self.letters(bus)) == 1
        async with bus.subscribe("orders", group="billing") as stream:
            await self.check_quiet(stream, clock)

    async def test_a_record_that_keeps_failing_is_not_redriven_for_ever(self, bus: Bus) -> None:
        self.need("dead_letters")
        await self.bury(bus, 1)
        for count in range(2):
            refused = [
                one.refused async for one in bus.dead_letters("orders").redrive(max_redrives=2)
            ]
            assert refused == [""], count
            async with bus.subscribe("orders", group="billing") as stream:
                (delivery,) = await self.now(stream)
                await delivery.term("again")
        (last,) = [one async for one in bus.dead_letters("orders").redrive(max_redrives=2)]
        assert last.refused == "redriven 2 times already"
        assert [letter.redrives for letter in await self.letters(bus)] == [2]

    async def test_letters_are_chosen_by_a_filter(self, bus: Bus) -> None:
        self.need("dead_letters")
        await self.bury(bus, {"n": 1}, {"n": 2}, {"n": 3})
        desk = bus.dead_letters("orders")
        assert [one.letter.origin async for one in desk.redrive(where="payload.n > 2")] == [3]
        assert [one.origin async for one in desk.drop(where=lambda e: e.payload["n"] == 2)] == [2]
        for wrong in (7, "payload.n >"):
            with pytest.raises(InvalidFilter):
                await anext(desk.drop(where=wrong))  # type: ignore[arg-type]
        assert [letter.origin for letter in await self.letters(bus)] == [1]

    async def test_a_dropped_letter_is_closed(self, bus: Bus, clock: AnyClock) -> None:
        self.need("dead_letters")
        await self.bury(bus, 1, 2)
        desk = bus.dead_letters("orders")
        assert [letter.origin async for letter in desk.drop(offsets={1})] == [1]
        assert [letter.origin for letter in await self.letters(bus)] == [2]
        assert (await desk.letter(1)).open is False
        with pytest.raises(NotFound):
            await desk.letter(3)
        async with bus.subscribe("orders", group="billing") as stream:
            await self.check_quiet(stream, clock)

    async def test_redriving_keeps_to_its_rate(self, bus: Bus, clock: AnyClock) -> None:
        self.need("dead_letters")
        await self.bury(bus, 1, 2, 3)

        async def redrive() -> list[float]:
            desk = bus.dead_letters("orders")
            return [clock.monotonic() async for _ in desk.redrive(rate=1 / self.unit_s)]

        job = asyncio.ensure_future(redrive())
        while not job.done():
            await clock.run(self.unit_s / 4)
        times = await job
        assert times[2] - times[0] >= 1.99 * self.unit_s

    async def test_letters_are_listed_by_group(self, bus: Bus) -> None:
        self.need("dead_letters")
        await self.bury(bus, 1)
        async with bus.subscribe("orders", group="audit", policy=self.policy()) as stream:
            (delivery,) = await self.now(stream)
            await delivery.term("not for us")
        assert [x.group for x in await self.letters(bus)] == ["billing", "audit"]
        assert [x.group for x in await self.letters(bus, group="audit")] == ["audit"]
        assert await self.letters(bus, group="nobody") == []
