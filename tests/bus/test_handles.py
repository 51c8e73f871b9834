"""Leases by handle, on a store in memory and a clock that a test moves."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from msgspec import structs

from trunkline.bus.handles import HandleState, LeaseHandle, Taker, ack, extend, nack, term
from trunkline.errors import InvalidOption
from trunkline.event import Event
from trunkline.group import Group
from trunkline.names import GroupKey
from trunkline.options import GroupOptions
from trunkline.store import Store
from trunkline.store.memory import MemoryStore
from trunkline.testing import ManualClock

KEY = GroupKey("t", 0, "g")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def store(clock: ManualClock) -> AsyncIterator[Store]:
    store = MemoryStore(clock=clock)
    yield store
    await store.close()


def taker(store: Store, lease_s: float = 60.0) -> Taker:
    return Taker(store, "t", "g", lease_s=lease_s, draw=lambda: 0.0)


async def publish(store: Store, *payloads: int) -> None:
    await store.append("t", [Event(topic="t", payload=n) for n in payloads])


async def test_a_lease_lasts_as_long_as_it_was_asked_for(store: Store, clock: ManualClock) -> None:
    await publish(store, 1)
    [held] = await taker(store, lease_s=500.0).take(1)

    clock.advance(499)
    assert await taker(store).take(1) == []  # the group's own ack timeout is 30 s
    clock.advance(2)
    assert await taker(store).take(1) == []  # a lease that ran out is a failure: it backs off
    clock.advance(1)
    [again] = await taker(store).take(1)

    assert (held.attempt, again.attempt) == (1, 2)
    assert await ack(store, held.handle) is HandleState.TAKEN
    assert await ack(store, again.handle) is HandleState.HELD


async def test_an_extended_lease_counts_from_now(store: Store, clock: ManualClock) -> None:
    await publish(store, 1)
    [held] = await taker(store).take(1)
    clock.advance(50)

    assert await extend(store, held.handle, 100.0) is HandleState.HELD
    clock.advance(99)

    assert await taker(store).take(1) == []
    assert await ack(store, held.handle) is HandleState.HELD
    assert await extend(store, held.handle) is HandleState.SETTLED


async def test_an_ack_after_the_lease_counts_while_nobody_has_the_record(
    store: Store, clock: ManualClock
) -> None:
    await publish(store, 1)
    await store.change(KEY, lambda group: group.define(GroupOptions(backoff_base_s=50.0), 0))
    [held] = await Taker(store, "t", "g", lease_s=1.0, draw=lambda: 0.99).take(1)
    clock.advance(2)
    assert await Taker(store, "t", "g", draw=lambda: 0.99).take(1) == []  # waits for its backoff

    assert (await nack(store, held.handle)).standing is HandleState.FREE
    assert await ack(store, held.handle) is HandleState.FREE
    assert await ack(store, held.handle) is HandleState.SETTLED


async def test_a_lease_that_ran_out_is_lost_though_no_member_has_looked_since(
    store: Store, clock: ManualClock
) -> None:
    await publish(store, 1)
    [held] = await taker(store, lease_s=1.0).take(1)
    clock.advance(2)

    assert await extend(store, held.handle) is HandleState.FREE
    assert (await nack(store, held.handle)).standing is HandleState.FREE
    assert await term(store, held.handle) is HandleState.FREE
    assert await ack(store, held.handle) is HandleState.FREE
    assert await ack(store, held.handle) is HandleState.SETTLED


async def test_a_nack_comes_again_after_its_delay(store: Store, clock: ManualClock) -> None:
    await publish(store, 1)
    [held] = await taker(store).take(1)

    assert await nack(store, held.handle, 30.0) == (HandleState.HELD, False, 30.0)
    assert await taker(store).take(1) == []
    clock.advance(31)
    [again] = await taker(store).take(1)

    assert (again.attempt, await extend(store, held.handle)) == (2, HandleState.TAKEN)


async def test_what_is_given_back_was_no_try(store: Store) -> None:
    await publish(store, 1, 2, 3)
    mine = taker(store)
    held = await mine.take(3)

    await mine.give_back(held[1:])
    again = await taker(store).take(9)

    assert [one.attempt for one in again] == [1, 1]
    assert [one.record.event.payload for one in again] == [2, 3]


async def test_a_moved_group_knows_no_handle_of_before(store: Store) -> None:
    await publish(store, 1)
    [held] = await taker(store).take(1)

    def seek(group: Group) -> None:
        group.seek(0)

    await store.change(KEY, seek)

    assert await ack(store, held.handle) is HandleState.GONE
    assert (await nack(store, held.handle)).standing is HandleState.GONE
    assert len(await taker(store).take(1)) == 1


async def test_a_handle_that_was_never_given_settles_nothing(store: Store) -> None:
    await publish(store, 1, 2)
    [held] = await taker(store).take(1)
    made_up = [
        structs.replace(held.handle, offset=2),
        structs.replace(held.handle, offset=2, attempt=0),
        structs.replace(held.handle, offset=10**30),
    ]

    assert [await ack(store, handle) for handle in made_up] == [HandleState.GONE] * 3
    await ack(store, held.handle)
    [following] = await taker(store).take(5)

    assert following.record.offset == 2


async def test_an_ack_of_before_a_redrive_settles_nothing(store: Store) -> None:
    await publish(store, 1)
    [held] = await taker(store).take(1)
    await ack(store, held.handle)
    await store.change(KEY, lambda group: group.redrive([1]))

    assert await ack(store, held.handle) is HandleState.GONE
    assert len(await taker(store).take(5)) == 1


def test_a_handle_is_read_as_it_was_written() -> None:
    handle = LeaseHandle(1, "orders.eu", 3, "billing", 7, 2, 99, "handle-0a1b")

    assert LeaseHandle.parse(str(handle)) == handle
    for wrong in ("", "x", str(handle)[:-3], "é" * 8):
        with pytest.raises(InvalidOption):
            LeaseHandle.parse(wrong)
    with pytest.raises(InvalidOption):  # the lease of a process is no handle
        LeaseHandle.parse(str(LeaseHandle(1, "t", 0, "g", 7, 2, 99, "0a1b2c3d4e5f")))


def test_a_lease_without_a_length_is_refused(store: Store) -> None:
    with pytest.raises(InvalidOption):
        Taker(store, "t", "g", lease_s=0.0)
