"""The pump: what happens between a group and its subscribers, and in which order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from trunkline.bus.connect import connect
from trunkline.bus.local import LocalBus
from trunkline.delivery.wakes import Turns
from trunkline.errors import Conflict, Corrupt, InvalidFilter, StorageFull
from trunkline.event import Event, Receipt, Record
from trunkline.folder import Folder
from trunkline.group import Group
from trunkline.names import GroupKey
from trunkline.options import GroupOptions
from trunkline.store.file import FileStore
from trunkline.store.memory import MemoryStore
from trunkline.testing import ManualClock

T = TypeVar("T")
KEY = GroupKey("orders", 0, "billing")
AT_ONCE = GroupOptions(backoff_base_s=0.0)


class Scripted(MemoryStore):
    """A real store that notes the order of things, and fails when told to."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock=clock)
        self.notes: list[str] = []
        self.updates = 0
        self.reads: list[tuple[int, int]] = []
        self.fail_appends: list[Exception] = []
        self.fail_updates: list[Exception] = []

    async def append(self, topic: str, events: Sequence[Event]) -> list[Receipt]:
        if topic.endswith(".DLQ"):
            await asyncio.sleep(0)
            if self.fail_appends:
                raise self.fail_appends.pop(0)
            self.notes.append(f"wrote {len(events)}")
        return await super().append(topic, events)

    async def read(self, topic: str, partition: int, start: int, limit: int) -> list[Record]:
        self.reads.append((start, limit))
        return await super().read(topic, partition, start, limit)

    def _floor(self, key: GroupKey) -> int:
        return self._groups[key].group.floor if key in self._groups else 0

    def group(self, key: GroupKey) -> AbstractAsyncContextManager[Group]:
        self.updates += 1
        if self.fail_updates:
            raise self.fail_updates.pop(0)
        return Noted(self, key, super().group(key))


class Noted:
    """A transaction; the store notes when the floor moved."""

    def __init__(
        self, store: Scripted, key: GroupKey, inner: AbstractAsyncContextManager[Group]
    ) -> None:
        self._store, self._key, self._inner = store, key, inner
        self._before = store._floor(key)

    async def __aenter__(self) -> Group:
        return await self._inner.__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        await self._inner.__aexit__(*error)
        if self._store._floor(self._key) > self._before:
            self._store.notes.append(f"floor {self._store._floor(self._key)}")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> Scripted:
    return Scripted(clock)


@pytest.fixture
async def bus(store: Scripted, clock: ManualClock) -> AsyncIterator[LocalBus]:
    async with LocalBus(store, clock=clock, draw=lambda: 1.0) as bus:
        yield bus


async def soon(stream: Any) -> Any:
    return await asyncio.wait_for(anext(stream), 10)


async def test_a_dead_letter_is_durable_before_its_record_is_settled(
    bus: LocalBus, store: Scripted, clock: ManualClock
) -> None:
    await bus.publish("orders", 1)
    async with bus.subscribe("orders", group="billing") as stream:
        await (await soon(stream)).term("no")
        await clock.run()
        assert store.notes == ["wrote 1", "floor 1"]


async def test_a_dead_letter_that_cannot_be_written_keeps_its_record(
    bus: LocalBus, store: Scripted, clock: ManualClock
) -> None:
    store.fail_appends = [StorageFull(), StorageFull()]
    await bus.publish("orders", 1)
    async with bus.subscribe("orders", group="billing") as stream:
        await (await soon(stream)).term("no")
        await clock.run()
        assert store.notes == []

        await clock.run(0.5)
        assert store.notes == ["wrote 1", "floor 1"]
    letters = [letter async for letter in bus.dead_letters("orders").letters()]
    assert [letter.origin for letter in letters] == [1]


async def test_a_letter_under_way_is_finished_when_its_subscriber_leaves(
    bus: LocalBus, store: Scripted
) -> None:
    await bus.publish_many("orders", [1, 2])
    async with bus.subscribe("orders", group="billing") as stream:
        for _ in range(2):
            await (await soon(stream)).term("no")
    assert [note for note in store.notes if note.startswith("floor")][-1] == "floor 2"
    assert store.notes[0].startswith("wrote")
    assert (await store.bounds("orders.DLQ", 0)).next == 3


async def test_a_damaged_log_is_told_to_the_subscriber(bus: LocalBus, store: Scripted) -> None:
    async with bus.subscribe("orders", group="billing") as stream:
        store.fail_updates = [Corrupt("damaged", path="x", position=7)]
        await bus.publish("orders", 1)
        with pytest.raises(Corrupt) as caught:
            await soon(stream)
    assert caught.value.position == 7
    async with bus.subscribe("orders", group="billing") as stream:
        assert (await soon(stream)).event.payload == 1, "the next subscriber has a new pump"


async def test_a_filter_that_fails_is_told_to_the_subscriber(bus: LocalBus) -> None:
    await bus.publish("orders", {"n": 1})
    async with bus.subscribe(
        "orders", group="billing", where=lambda event: event.payload["missing"]
    ) as stream:
        with pytest.raises(Exception, match="KeyError"):
            await soon(stream)


async def test_a_record_on_which_the_filter_failed_is_delivered_under_another_filter(
    bus: LocalBus,
) -> None:
    await bus.publish_many("orders", [0, 1], key="c42")
    async with bus.subscribe(
        "orders", group="billing", where=lambda event: 1 / event.payload > 0
    ) as stream:
        with pytest.raises(InvalidFilter):
            await soon(stream)
    await bus.store.change(KEY, lambda group: group.edit(GroupOptions()))
    async with bus.subscribe("orders", group="billing") as stream:
        delivery = await soon(stream)
        assert (delivery.event.payload, delivery.attempt) == (0, 1)


async def test_the_delay_is_drawn_from_what_the_policy_allows(
    bus: LocalBus, clock: ManualClock
) -> None:
    policy = GroupOptions(backoff_base_s=1.0, backoff_mult=3.0, backoff_max_s=5.0)
    await bus.publish("orders", 1)
    async with bus.subscribe("orders", group="billing", policy=policy) as stream:
        delivery = await soon(stream)
        for bound in (1.0, 3.0, 5.0, 5.0, 5.0):
            await delivery.nack()
            await clock.run(bound - 0.01)
            waiting = asyncio.ensure_future(anext(stream))
            await clock.settle()
            assert not waiting.done(), bound
            await clock.run(0.02)
            delivery = await asyncio.wait_for(waiting, 10)
    assert delivery.attempt == 6


async def test_a_timeout_backs_off_like_a_failure(bus: LocalBus, clock: ManualClock) -> None:
    policy = GroupOptions(ack_timeout_s=10.0, backoff_base_s=4.0)
    await bus.publish("orders", 1)
    async with bus.subscribe("orders", group="billing", policy=policy) as stream:
        first = await soon(stream)
        await clock.run(13.9)
        waiting = asyncio.ensure_future(anext(stream))
        await clock.settle()
        assert not waiting.done()
        await clock.run(0.2)
        second = await asyncio.wait_for(waiting, 10)
    assert (first.attempt, second.attempt) == (1, 2)


async def test_a_consumer_that_never_answers_leads_to_a_dead_letter(
    bus: LocalBus, clock: ManualClock
) -> None:
    policy = GroupOptions(ack_timeout_s=1.0, backoff_base_s=0.0, max_retries=2)
    await bus.publish("orders", 1)
    async with bus.subscribe("orders", group="billing", policy=policy, max_inflight=1) as stream:
        attempts = []
        for _ in range(3):
            attempts.append((await soon(stream)).attempt)
            await clock.run(1.0)
        await clock.run(5.0)
        (letter,) = [letter async for letter in bus.dead_letters("orders").letters()]
    assert attempts == [1, 2, 3]
    assert (letter.attempts, letter.error) == (3, "not settled within the ack timeout")


async def test_an_ack_that_comes_late_still_counts(bus: LocalBus, clock: ManualClock) -> None:
    policy = GroupOptions(ack_timeout_s=1.0, backoff_base_s=60.0)
    await bus.publish("orders", 1)
    async with bus.subscribe("orders", group="billing", policy=policy) as stream:
        late = await soon(stream)
        await clock.run(5.0)
        await late.ack()
        await clock.run(200.0)
        assert await bus.store.update(KEY, lambda group: group.floor) == 1


async def test_what_retention_took_is_passed_over(bus: LocalBus, clock: ManualClock) -> None:
    await bus.publish_many("orders", [1, 2, 3, 4])
    async with bus.subscribe("orders", group="billing", max_inflight=1) as stream:
        one = await soon(stream)
        await bus.store.trim("orders", 0, 4)
        await one.ack()
        got: list[Any] = []
        while not got or got[-1] != 4:
            delivery = await soon(stream)
            got.append(delivery.event.payload)
            await delivery.ack()
    assert await bus.store.update(KEY, lambda group: group.floor) == 4


async def test_a_group_that_was_behind_begins_where_the_log_does(bus: LocalBus) -> None:
    async with bus.subscribe("orders", group="billing"):
        pass
    await bus.publish_many("orders", [1, 2, 3])
    await bus.store.trim("orders", 0, 3)
    async with bus.subscribe("orders", group="billing") as stream:
        delivery = await soon(stream)
        assert (delivery.offset, delivery.event.payload) == (3, 3)
        await delivery.ack()
    assert await bus.store.update(KEY, lambda group: (group.floor, len(group.settled))) == (3, 0)


async def test_a_paused_group_waits_without_turning_in_circles(
    bus: LocalBus, store: Scripted, clock: ManualClock
) -> None:
    rounds = 0
    update = store.update

    async def counting(key: GroupKey, step: Any) -> Any:
        nonlocal rounds
        rounds += 1
        return await update(key, step)

    await bus.publish("orders", 1)
    async with bus.subscribe("orders", group="billing", policy=AT_ONCE) as stream:
        delivery = await soon(stream)
        await store.update(KEY, lambda group: group.pause(True))
        await delivery.nack(delay_s=1.0)
        await clock.run(5.0)
        store.update = counting  # type: ignore[method-assign]
        for _ in range(200):
            await asyncio.sleep(0)
        assert rounds < 5
        await store.update(KEY, lambda group: group.pause(False))
        store.bell.ring("orders")
        assert (await soon(stream)).attempt == 2


async def test_a_member_with_another_filter_is_refused(bus: LocalBus) -> None:
    """Two filters in one group would settle records that one of them wants."""
    await bus.publish_many("orders", list(range(10)))
    async with bus.subscribe("orders", group="billing", where="payload > 4") as stream:
        with pytest.raises(Conflict, match="where payload > 4 -> payload > 7"):
            async with bus.subscribe("orders", group="billing", where="payload > 7"):
                pass
        async with bus.subscribe("orders", group="billing") as adopts:
            assert (await soon(adopts)).event.payload == 5
        found = [await soon(stream) for _ in range(5)]
        assert sorted(one.event.payload for one in found) == [5, 6, 7, 8, 9]


async def test_refused_records_are_settled_when_they_are_read(bus: LocalBus) -> None:
    await bus.publish_many("orders", list(range(10)))
    async with bus.subscribe("orders", group="billing", where="payload = 9") as stream:
        delivery = await soon(stream)
        assert (delivery.event.payload, delivery.attempt) == (9, 1)
        found = await bus.store.change(KEY, lambda group: (group.floor, list(group.leases)))
        assert found == (9, [10])


async def test_an_edited_filter_counts_for_records_that_are_not_settled(bus: LocalBus) -> None:
    await bus.publish_many("orders", ["a", "b", "c", "a"])
    policy = GroupOptions(where="payload <> 'c'", ordering="partition")
    async with bus.subscribe("orders", group="billing", policy=policy) as stream:
        first = await soon(stream)
        edited = msgspec.structs.replace(policy, where="payload <> 'b'")
        await bus.store.change(KEY, lambda group: group.edit(edited))
        await first.ack()
        assert (await soon(stream)).offset == 4, "the third was refused before the edit"


async def test_the_window_is_bounded_by_lookahead(bus: LocalBus, clock: ManualClock) -> None:
    policy = GroupOptions(lookahead=10)
    await bus.publish_many("orders", list(range(100)))
    async with bus.subscribe("orders", group="billing", policy=policy, max_inflight=5) as stream:
        await soon(stream)
        await clock.run()
        assert await bus.store.update(KEY, lambda group: len(group.schedule.items)) <= 10
        assert await bus.store.update(KEY, lambda group: group.read_to) <= 11


async def test_what_was_purged_while_it_was_delayed_is_in_nobodys_way(bus: LocalBus) -> None:
    policy = GroupOptions(lookahead=4)
    async with bus.subscribe("orders", group="billing", policy=policy) as stream:
        await bus.publish_many("orders", [1, 2, 3], delay_s=3600.0)
        await bus.publish("orders", "held")
        held = await soon(stream)
        await bus.store.trim("orders", 0, 5)
        await bus.publish("orders", "new")
        assert (await soon(stream)).event.payload == "new"
        await held.ack()
    assert await bus.store.update(KEY, lambda group: (group.floor, group.scheduled)) == (4, 0)


async def test_observers_are_told_what_becomes_of_records(clock: ManualClock) -> None:
    settled: list[tuple[str, int]] = []
    dead: list[tuple[int, str, str]] = []

    class Observer:
        def on_settled(self, key: GroupKey, offset: int, outcome: str) -> None:
            settled.append((key.group, offset))

        def on_dead_letter(self, key: GroupKey, record: Record, reason: str, error: str) -> None:
            dead.append((record.offset, reason, error))

    store, middleware = MemoryStore(clock=clock), [Observer()]
    async with LocalBus(store, clock=clock, middleware=middleware) as bus:
        await bus.publish_many("orders", [1, 2])
        async with bus.subscribe("orders", group="billing") as stream:
            await (await soon(stream)).ack()
            await (await soon(stream)).term("no")
            await clock.run()
    assert sorted(settled) == [("billing", 1), ("billing", 2)]
    assert dead == [(2, "rejected", "no")]


async def test_what_is_given_back_together_is_read_together(bus: LocalBus, store: Scripted) -> None:
    await bus.publish_many("orders", list(range(1, 21)))
    async with bus.subscribe("orders", group="billing") as stream:
        for _ in range(20):
            await (await soon(stream)).ack()
    store.reads.clear()
    await store.update(KEY, lambda group: group.redrive([3, *range(5, 15)]))
    async with bus.subscribe("orders", group="billing") as stream:
        again = [await soon(stream) for _ in range(11)]
        assert [delivery.offset for delivery in again] == [3, *range(5, 15)]
    assert {(3, 1), (5, 10)} <= set(store.reads)
    assert not any(5 < start < 15 for start, _ in store.reads)


async def test_a_clock_that_was_set_back_and_forth_delays_nothing_for_long(
    bus: LocalBus, clock: ManualClock
) -> None:
    await bus.publish("orders", 1, delay_s=5)
    async with bus.subscribe("orders", group="billing") as stream:
        await clock.run()
        clock.jump(-3600)
        await bus.publish("orders", 2)  # so that it is looked at while the clock is wrong
        await (await soon(stream)).ack()
        await clock.run(1)
        clock.jump(3600)
        await clock.run(15)

        assert (await soon(stream)).event.payload == 1


async def test_whatever_ends_a_pump_is_told_to_the_subscriber(clock: ManualClock) -> None:
    class Observer:
        def on_settled(self, *_: object) -> None:
            raise ZeroDivisionError("an observer's fault")

    async with LocalBus(MemoryStore(clock), clock=clock, middleware=[Observer()]) as bus:
        await bus.publish_many("t", [1, 2])
        async with bus.subscribe("t", group="g", max_inflight=1) as stream:
            await (await anext(stream)).ack()
            with pytest.raises(ZeroDivisionError):
                await asyncio.wait_for(anext(stream), 10)


async def test_what_others_settled_is_not_kept(bus: LocalBus, store: Scripted) -> None:
    async with bus.subscribe("orders", group="billing", max_inflight=1) as stream:
        for last in range(1000, 8001, 1000):
            await bus.publish_many("orders", [0] * 1000)
            delivery = await soon(stream)
            await store.update(KEY, partial(Group.settle, offsets=range(1, last + 1)))
            await delivery.ack()
        (pump,) = bus._pumps._pumps.values()
        assert len(pump._prefetch.records) <= 3000


async def test_many_groups_read_no_more_than_may_be_kept(bus: LocalBus, store: Scripted) -> None:
    await bus.publish_many("orders", ["x" * 20_000] * 400)
    async with contextlib.AsyncExitStack() as stack:
        for number in range(30):
            store.reads.clear()
            stream = bus.subscribe("orders", group=f"g{number}", start="earliest", max_inflight=4)
            await stack.enter_async_context(stream)
            assert (await soon(stream)).offset == 1
        await asyncio.sleep(0)
        assert sum(limit for _, limit in store.reads) < 100


@pytest.mark.parametrize("ahead", [{}, {"delay_s": 60.0}, {"ttl_s": 30.0}])
async def test_records_too_heavy_to_be_kept_arrive_all_the_same(
    bus: LocalBus, clock: ManualClock, ahead: dict[str, Any]
) -> None:
    await bus.publish_many("orders", ["x" * 300_000] * 3, **ahead)
    await bus.publish_many("orders", ["y" * 300_000] * 6)
    clock.advance(40)
    async with contextlib.AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(
                bus.subscribe("orders", group=f"g{number}", start="earliest", max_inflight=2)
            )
            for number in range(12)
        ]
        for stream in streams:
            for _ in range(6):
                delivery = await soon(stream)
                await delivery.ack()
        clock.advance(20)
        for stream in streams:
            for _ in range(0 if "ttl_s" in ahead else 3):
                await (await soon(stream)).ack()
    floors = [
        await bus.store.update(KEY._replace(group=f"g{number}"), lambda group: group.floor)
        for number in range(12)
    ]
    assert floors == [9] * 12


async def test_tasks_that_have_long_to_go_take_turns() -> None:
    turns = Turns()
    at_work: list[int] = []

    async def work(number: int) -> None:
        for _ in range(3):
            await turns.wait()
            at_work.append(number)
            await asyncio.sleep(0)

    tasks = [asyncio.ensure_future(work(number)) for number in range(8)]
    await asyncio.sleep(0)
    tasks[5].cancel()
    most = 0
    while not all(task.done() for task in tasks):
        before = len(at_work)
        await asyncio.sleep(0)
        most = max(most, len(at_work) - before)
    assert most == 1
    assert at_work == [0, 1, 2, 3, 4, 6, 7] * 3, "each has its turn before anyone has another"


async def test_what_comes_before_damage_is_delivered_before_it_is_told(tmp_path: Path) -> None:
    async with connect(f"file:{tmp_path}") as bus:
        for number in range(60):
            await bus.publish("orders", number)
    segment = tmp_path / "wal" / "orders.00000001.jsonl"
    lines = segment.read_bytes().splitlines(keepends=True)
    lines[40] = lines[40].replace(b'"payload":40', b'"payload":41')
    segment.write_bytes(b"".join(lines))
    seen: list[int] = []
    async with (
        connect(f"file:{tmp_path}") as bus,
        bus.subscribe("orders", group="billing", max_inflight=3) as stream,
    ):
        with contextlib.suppress(Corrupt):
            while True:
                delivery = await soon(stream)
                seen.append(delivery.event.payload)
                await delivery.ack()
    assert seen == list(range(40))


async def test_an_expired_record_is_no_letter_of_a_group_that_did_not_want_it(
    bus: LocalBus, clock: ManualClock
) -> None:
    await bus.define("orders", ttl_policy="dlq")
    await bus.publish_many("orders", ["us", "eu"], ttl_s=1.0)
    clock.advance(2)
    await bus.publish("orders", "eu", key="fresh")
    async with bus.subscribe("orders", group="billing", where="payload = 'eu'") as stream:
        delivery = await soon(stream)
        assert delivery.event.key == "fresh"
        await delivery.ack()
    letters = [letter async for letter in bus.dead_letters("orders").letters()]
    assert [(letter.origin, letter.reason) for letter in letters] == [(2, "expired")]


async def test_what_expired_is_delivered_when_it_is_redriven(
    bus: LocalBus, clock: ManualClock
) -> None:
    await bus.define("orders", ttl_policy="dlq")
    await bus.publish("orders", "late", ttl_s=1.0)
    clock.advance(2)
    async with bus.subscribe("orders", group="billing") as stream:
        dead = bus.dead_letters("orders")
        first = asyncio.ensure_future(soon(stream))
        await clock.settle()
        assert [letter.reason async for letter in dead.letters()] == ["expired"]
        assert [one.refused async for one in dead.redrive()] == [""]
        assert (await first).event.payload == "late"


async def test_a_letter_stays_until_its_record_can_be_given_back(
    bus: LocalBus, clock: ManualClock
) -> None:
    await bus.publish("orders", 1)
    async with bus.subscribe("orders", group="billing") as stream:
        await (await soon(stream)).term("no")
        dead = bus.dead_letters("orders")
        while not [letter async for letter in dead.letters()]:
            await asyncio.sleep(0)
        (early,) = [one.refused async for one in dead.redrive()]
        await clock.settle()
        again = [one.refused async for one in dead.redrive()] if early else [""]
        assert again == [""]
        assert (await soon(stream)).event.payload == 1


async def test_a_reader_that_does_not_ack_gets_each_record_that_is_there() -> None:
    """Heavy records that came while nobody had room: a reader that does not ack gets each."""
    async with (
        connect("memory:") as bus,
        bus.subscribe("orders", group="a") as stream,
        bus.subscribe("orders", group="b"),
        bus.subscribe("orders", group="c"),
    ):
        first = asyncio.ensure_future(soon(stream))
        for n in range(8):
            await bus.publish("orders", {"n": n, "text": "x" * 900_000})
            await asyncio.sleep(0.02)
        held = [await first, *[await soon(stream) for _ in range(7)]]
        assert [delivery.event.payload["n"] for delivery in held] == list(range(8))


async def test_a_window_of_what_is_delayed_lets_the_rest_through() -> None:
    """A window that is nearly full of what is not due yet, and a record while nobody had room."""
    policy = GroupOptions(lookahead=8)
    async with (
        connect("memory:") as bus,
        bus.subscribe("orders", group="a", policy=policy) as stream,
    ):
        waiting = asyncio.ensure_future(soon(stream))
        for _ in range(6):
            await bus.publish("orders", "later", delay_s=60)
        await bus.publish("orders", 1)
        held = [await waiting]
        await asyncio.sleep(0.05)
        await bus.publish("orders", 2)
        await asyncio.sleep(0.05)
        held.append(await soon(stream))
        assert [delivery.event.payload for delivery in held] == [1, 2]


@pytest.mark.parametrize("lookahead", [1, 64])
async def test_a_window_that_empties_at_once_is_filled_again(bus: LocalBus, lookahead: int) -> None:
    policy = GroupOptions(lookahead=lookahead)
    await bus.publish_many("orders", list(range(lookahead)))
    async with bus.subscribe("orders", group="a", policy=policy, max_inflight=100) as stream:
        for _ in range(3):
            held = [await soon(stream) for _ in range(lookahead)]
            await bus.publish_many("orders", list(range(lookahead)))
            for delivery in held:
                await delivery.ack()
        assert (await soon(stream)).offset == 3 * lookahead + 1


@pytest.mark.parametrize("paused", [True, False])
async def test_what_was_redriven_turns_nobody_in_circles(
    bus: LocalBus, store: Scripted, clock: ManualClock, paused: bool
) -> None:
    """Neither while its group is paused nor while the window is full, with more in the log."""
    policy = GroupOptions(lookahead=4)
    await bus.publish_many("orders", list(range(20)))
    async with bus.subscribe("orders", group="billing", policy=policy, max_inflight=50) as stream:
        await (await soon(stream)).ack()
        await clock.settle()
        held = [] if paused else [await soon(stream) for _ in range(3)]
        await store.update(KEY, lambda group: group.pause(paused))
        await store.update(KEY, lambda group: group.redrive([1]))
        store.bell.ring(None)
        waiting = asyncio.ensure_future(anext(stream))
        await clock.settle()
        before = store.updates
        for _ in range(200):
            await asyncio.sleep(0)
        assert store.updates - before < 5
        waiting.cancel()
        del held


async def test_a_window_that_was_lost_is_read_again(tmp_path: Path, clock: ManualClock) -> None:
    """A journal that another process begins anew is read anew, and the window goes with the old."""
    store = FileStore(str(tmp_path), clock=clock)
    store.bell.remind = lambda turn, turns: None  # type: ignore[method-assign]
    async with LocalBus(store, clock=clock) as bus:
        await bus.publish_many("orders", [1, 2, 3])
        async with bus.subscribe("orders", group="billing", max_inflight=1) as stream:
            first = await soon(stream)
            await clock.settle()
            other = Folder(str(tmp_path), clock=clock)
            other.step(KEY, lambda group: None)
            other._groups._file(KEY).renew(1)
            other.close()
            await first.ack()
            assert (await asyncio.wait_for(anext(stream), 1)).event.payload == 2
