"""What every ``Store`` must do, as tests. A store is done when it passes.

All that the author of a store writes, in a test file of a project with pytest-asyncio in its
``auto`` mode::

    from trunkline.testing import StoreContract

    class TestMyStore(StoreContract):
        @pytest.fixture
        def make(self, tmp_path, clock):
            def make(**options):  # opens the same place each time
                return MyStore(tmp_path, clock=clock, **options)
            return make

``MyStore.features`` says what the store promises; a test of anything else is skipped. Override
``kill`` to show that the leases of a member that dies without a word are freed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest

from trunkline.errors import (
    Closed,
    Conflict,
    InvalidEvent,
    InvalidName,
    InvalidOption,
    NotFound,
    OutOfRange,
)
from trunkline.event import Event, Receipt
from trunkline.group import Group
from trunkline.names import GroupKey
from trunkline.options import GroupOptions, TopicOptions
from trunkline.store import Features, Store
from trunkline.testing.clock import EPOCH, ManualClock

Make = Callable[..., Store]
Reopen = Callable[[Store], Awaitable[Store]]
Kill = Callable[[Store], Awaitable[None]]

KEY = GroupKey("orders", 0, "billing")
HOSTILE = ["", ".", "..", ".hidden", "a/b", "../up", "a__b", "a..b"]
HOSTILE += ["a b", "a\n", "a\0b", "é", "x" * 201]


class BodyFailed(Exception):
    """What the body of a transaction raises."""


def events(count: int, topic: str = "orders", **fields: Any) -> list[Event]:
    """``count`` events whose payloads are 1, 2, 3, ..."""
    return [Event(topic=topic, payload=n, ts=EPOCH, **fields) for n in range(1, count + 1)]


def offsets(receipts: Sequence[Receipt]) -> list[int]:
    return [receipt.offset for receipt in receipts]


async def payloads(store: Store, topic: str = "orders", partition: int = 0) -> list[Any]:
    first, end = await store.bounds(topic, partition)
    records = await store.read(topic, partition, first, max(1, end - first))
    return [record.event.payload for record in records]


def create(group: Group) -> None:
    group.define(GroupOptions(), 0)


def lease(store: Store, count: int, now: float = 0.0) -> Callable[[Group], list[int]]:
    """A step that leases the first ``count`` offsets."""

    def step(group: Group) -> list[int]:
        for offset in range(group.read_to, count + 1):
            group.offer(offset, now=now)
        taken = group.take(store.member, now=now, wall=0.0, limit=count)
        return [one.offset for one in taken.leases]

    return step


class StoreContract:
    """Subclass it, provide ``make``. ``clock``, ``store``, ``reopen`` and ``features`` may be
    overridden too.
    """

    @pytest.fixture
    def clock(self) -> ManualClock:
        return ManualClock()

    @pytest.fixture
    async def store(self, make: Make) -> AsyncIterator[Store]:
        store = make()
        yield store
        await store.close()

    @pytest.fixture
    def features(self, store: Store) -> Features:
        return store.features

    @pytest.fixture
    async def reopen(self, make: Make, features: Features) -> AsyncIterator[Reopen]:
        """Close a store and open the same place again; skips if nothing survives that."""
        if not features.persistent:
            pytest.skip("not persistent")
        opened: list[Store] = []

        async def reopen(store: Store) -> Store:
            await store.close()
            opened.append(make())
            return opened[-1]

        yield reopen
        for store in opened:
            await store.close()

    @pytest.fixture
    async def other(self, make: Make, features: Features) -> AsyncIterator[Store]:
        """The same place, open a second time; skips if that cannot be."""
        if not features.shared:
            pytest.skip("not shared")
        store = make()
        yield store
        await store.close()

    @pytest.fixture
    def kill(self) -> Kill:
        """Let a store end as the death of its process would: no word, no commit."""
        pytest.skip("the suite is not told how a member of this store dies")

    # -- appending and reading -----------------------------------------------------------------

    async def test_a_batch_that_is_too_large_is_refused_whole(
        self, store: Store, features: Features
    ) -> None:
        too_large: list[list[Event]] = []
        if features.batch_max is not None:
            too_large.append(events(features.batch_max + 1))
        if features.batch_bytes is not None:
            size = store.limits.record_bytes // 2
            count = features.batch_bytes // size + 2
            too_large.append([Event(topic="orders", payload="x" * size) for _ in range(count)])
        if not too_large:
            pytest.skip("a batch may be of any size")
        for batch in too_large:
            with pytest.raises(InvalidEvent):
                await store.append("orders", batch)
        assert offsets(await store.append("orders", events(1))) == [1]

    async def test_offsets_are_consecutive_from_one(self, store: Store) -> None:
        first = await store.append("orders", events(2))
        second = await store.append("orders", events(1))
        elsewhere = await store.append("refunds", events(1, "refunds"))

        assert offsets([*first, *second]) == [1, 2, 3]
        assert [(r.topic, r.partition, r.duplicate) for r in second] == [("orders", 0, False)]
        assert offsets(elsewhere) == [1]

    async def test_each_partition_counts_for_itself_and_a_key_stays_in_one(
        self, store: Store
    ) -> None:
        await store.define("orders", TopicOptions(partitions=4))
        sent = [Event(topic="orders", key=f"k{n % 10}", payload=n) for n in range(100)]

        receipts = await store.append("orders", sent)

        places: dict[int, list[int]] = {}
        homes: dict[str | None, set[int]] = {}
        for event, receipt in zip(sent, receipts, strict=True):
            places.setdefault(receipt.partition, []).append(receipt.offset)
            homes.setdefault(event.key, set()).add(receipt.partition)
        assert len(places) > 1
        assert all(found == list(range(1, len(found) + 1)) for found in places.values())
        assert all(len(home) == 1 for home in homes.values())
        for receipt, event in zip(receipts, sent, strict=True):
            found = await store.read("orders", receipt.partition, receipt.offset, 1)
            assert found[0].event.payload == event.payload

    async def test_events_without_a_key_are_spread(self, store: Store) -> None:
        await store.define("orders", TopicOptions(partitions=3))
        receipts = await store.append("orders", events(9))
        assert sorted(receipt.partition for receipt in receipts) == [0, 0, 0, 1, 1, 1, 2, 2, 2]

    async def test_concurrent_appends_never_share_or_skip_an_offset(self, store: Store) -> None:
        batches = await asyncio.gather(*(store.append("orders", events(3)) for _ in range(50)))

        everything = sorted(offset for batch in batches for offset in offsets(batch))
        assert everything == list(range(1, 151))
        for batch in batches:  # a batch is never torn apart
            assert offsets(batch) == list(range(batch[0].offset, batch[0].offset + 3))

    async def test_a_batch_with_one_bad_event_leaves_nothing(self, store: Store) -> None:
        await store.append("orders", events(1))
        bad = [*events(2), Event(topic="orders", payload=float("nan"))]

        with pytest.raises(InvalidEvent):
            await store.append("orders", bad)

        assert await store.bounds("orders", 0) == (1, 2)
        assert offsets(await store.append("orders", events(1))) == [2]

    async def test_the_receipt_says_what_it_is_worth(
        self, store: Store, features: Features
    ) -> None:
        (receipt,) = await store.append("orders", events(1))
        assert receipt.durability == features.durability

    async def test_a_read_is_half_open_and_bounded_by_its_limit(self, store: Store) -> None:
        await store.append("orders", events(10))
        assert [r.offset for r in await store.read("orders", 0, 4, 3)] == [4, 5, 6]
        assert [r.offset for r in await store.read("orders", 0, 9, 100)] == [9, 10]
        assert [r.event.payload for r in await store.read("orders", 0, 1, 1)] == [1]

    async def test_beyond_the_end_there_is_nothing_yet(self, store: Store) -> None:
        assert await store.read("orders", 0, 1, 10) == []
        await store.append("orders", events(2))
        assert await store.read("orders", 0, 3, 10) == []

    async def test_what_was_trimmed_is_out_of_range(self, store: Store) -> None:
        await store.append("orders", events(10))

        assert await store.trim("orders", 0, 7) == (7, 11)

        assert await store.bounds("orders", 0) == (7, 11)
        assert await payloads(store) == [7, 8, 9, 10]
        with pytest.raises(OutOfRange) as caught:
            await store.read("orders", 0, 6, 10)
        assert (caught.value.first, caught.value.next) == (7, 11)

    async def test_trimming_everything_keeps_the_count(self, store: Store) -> None:
        await store.append("orders", events(3))

        assert await store.trim("orders", 0, 1000) == (4, 4)
        assert await store.trim("orders", 0, 2) == (4, 4)  # there is no way back

        assert offsets(await store.append("orders", events(1))) == [4]
        assert [r.offset for r in await store.read("orders", 0, 4, 10)] == [4]

    async def test_bounds_of_an_unknown_topic_are_those_of_an_empty_one(self, store: Store) -> None:
        assert await store.bounds("orders", 0) == (1, 1)
        assert await store.topics() == {}

    async def test_seek_finds_the_first_record_at_or_after_a_time(self, store: Store) -> None:
        times = [EPOCH + timedelta(seconds=s) for s in (10, 20, 20, 30)]
        await store.append("orders", [Event(topic="orders", ts=ts) for ts in times])

        wanted = (0, 10, 11, 20, 25, 30, 31)
        found = [await store.seek("orders", 0, EPOCH + timedelta(seconds=s)) for s in wanted]

        assert found == [1, 1, 2, 2, 4, 4, 5]

    async def test_seek_copes_with_times_out_of_order(self, store: Store) -> None:
        times = [EPOCH + timedelta(seconds=s) for s in (30, 10, 20)]
        await store.append("orders", [Event(topic="orders", ts=ts) for ts in times])
        assert await store.seek("orders", 0, EPOCH + timedelta(seconds=15)) == 1

    async def test_every_field_comes_back(self, store: Store) -> None:
        sent: Event = Event(
            id="ev-1",
            ts=EPOCH + timedelta(microseconds=123456),
            topic="orders",
            type="Order",
            space="shared:home",
            actor="a",
            subject="s",
            key="ключ",
            idem_key='quote" \\ and \n',
            trace="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            ttl_s=1.5,
            priority="high",
            not_before=EPOCH + timedelta(hours=1),
            band="RED",
            caps=("WRITE", "RECALL"),
            cause="ev-0",
            headers={"payload": ',"payload":', "crc": "x", "": ""},
            payload={"payload": [1, 2.5, True, None, "\u2028", {"meta": {}}], "crc": "00000000"},
        )
        unset = {name for name in Event.__struct_fields__ if not getattr(sent, name)}
        assert not unset, "a new field belongs in this test"

        await store.append("orders", [sent])

        (record,) = await store.read("orders", 0, 1, 1)
        assert record.event == sent

    @pytest.mark.parametrize(
        "value", [None, True, 0, -1, 2**53, 1.5, 1e300, "", "text", [], {}, [[[]]], {"a": None}]
    )
    async def test_a_payload_is_any_json_value(self, store: Store, value: Any) -> None:
        await store.append("orders", [Event(topic="orders", payload=value)])
        (found,) = await payloads(store)
        assert found == value
        assert type(found) is type(value)

    async def test_a_reader_cannot_change_what_another_reads(self, store: Store) -> None:
        mine = {"list": [1]}
        await store.append("orders", [Event(topic="orders", payload=mine, headers={"a": "b"})])
        mine["list"].append(2)

        (first,) = await store.read("orders", 0, 1, 1)
        first.event.payload["list"].append(3)
        first.event.headers["a"] = "c"

        (second,) = await store.read("orders", 0, 1, 1)
        assert second.event.payload == {"list": [1]}
        assert second.event.headers == {"a": "b"}

    async def test_an_append_is_announced(self, store: Store) -> None:
        heard: list[str | None] = []
        store.bell.listen(heard.append, "orders")

        await store.append("orders", events(1))
        await asyncio.sleep(0)
        assert heard

        store.bell.ignore(heard.append)
        heard.clear()
        await store.append("refunds", events(1, "refunds"))
        assert heard == []

    # -- limits and names ----------------------------------------------------------------------

    async def test_a_record_over_the_limit_is_refused_before_anything_is_written(
        self, make: Make
    ) -> None:
        store = make(limits={"record_bytes": 2000})
        try:
            with pytest.raises(InvalidEvent) as caught:
                await store.append("orders", [Event(topic="orders", payload="x" * 2000)])
            assert caught.value.size > 2000
            assert await store.topics() == {}

            await store.append("orders", [Event(topic="orders", payload="x" * 1500)])
            assert await store.bounds("orders", 0) == (1, 2)
        finally:
            await store.close()

    async def test_a_dead_letter_may_be_a_little_larger(self, make: Make) -> None:
        store = make(limits={"record_bytes": 2000})
        try:
            letter = Event(
                topic="orders.DLQ", payload="x" * 1500, headers={"dlq-error": "e" * 1000}
            )
            assert offsets(await store.append("orders.DLQ", [letter])) == [1]
        finally:
            await store.close()

    async def test_nesting_over_the_limit_is_refused(self, make: Make) -> None:
        deep: Any = 1
        for _ in range(6):
            deep = [deep]
        store = make(limits={"depth": 5})
        try:
            with pytest.raises(InvalidEvent):
                await store.append("orders", [Event(topic="orders", payload=deep)])
            await store.append("orders", [Event(topic="orders", payload=deep[0])])
            assert await payloads(store) == [deep[0]]
        finally:
            await store.close()

    @pytest.mark.parametrize("name", HOSTILE, ids=ascii)
    async def test_a_hostile_name_is_refused_before_anything_is_written(
        self, store: Store, name: str
    ) -> None:
        with pytest.raises(InvalidName):
            await store.append(name, events(1))
        with pytest.raises(InvalidName):
            await store.read(name, 0, 1, 1)
        with pytest.raises(InvalidName):
            await store.define(name, TopicOptions())
        with pytest.raises(InvalidName):
            await store.change(GroupKey(name, 0, "billing"), create)
        with pytest.raises(InvalidName):
            await store.change(GroupKey("orders", 0, name), create)

        assert (await store.topics(), await store.groups()) == ({}, [])

    # -- publishing once -----------------------------------------------------------------------

    async def test_without_a_window_a_repeated_key_is_another_record(self, store: Store) -> None:
        await store.define("orders", TopicOptions(dedup_window_s=0))
        for _ in range(2):
            await store.append("orders", events(1, idem_key="a"))
        assert await store.bounds("orders", 0) == (1, 3)

    async def test_a_key_within_the_window_is_the_first_record_again(
        self, store: Store, clock: ManualClock
    ) -> None:
        await store.define("orders", TopicOptions(dedup_window_s=60))
        await store.append("orders", events(1))
        (first,) = await store.append("orders", events(1, idem_key="a"))
        clock.advance(59)
        (second,) = await store.append("orders", events(1, idem_key="a"))

        assert (first.offset, first.duplicate) == (2, False)
        assert (second.offset, second.duplicate, second.id) == (2, True, first.id)
        assert await store.bounds("orders", 0) == (1, 3)

        clock.advance(1)
        (third,) = await store.append("orders", events(1, idem_key="a"))
        assert (third.offset, third.duplicate) == (3, False)

    async def test_a_key_twice_in_one_batch_is_one_record(self, store: Store) -> None:
        await store.define("orders", TopicOptions(dedup_window_s=60))
        keys = ["a", None, "a", "b", "a", None]
        sent = [Event(topic="orders", idem_key=key, payload=n) for n, key in enumerate(keys)]

        receipts = await store.append("orders", sent)

        found = [(r.offset, r.duplicate) for r in receipts]
        assert found == [(1, False), (2, False), (1, True), (3, False), (1, True), (4, False)]
        assert [r.id for r in receipts] == [sent[n].id for n in (0, 1, 0, 3, 0, 5)]
        assert await payloads(store) == [0, 1, 3, 5]

    async def test_repeats_from_several_publishers_are_one_record(self, store: Store) -> None:
        await store.define("orders", TopicOptions(dedup_window_s=60))
        batches = await asyncio.gather(
            *(store.append("orders", events(1, idem_key="a")) for _ in range(20))
        )
        receipts = [receipt for batch in batches for receipt in batch]
        assert {receipt.offset for receipt in receipts} == {1}
        assert sum(not receipt.duplicate for receipt in receipts) == 1

    async def test_no_more_keys_are_remembered_than_allowed(self, store: Store) -> None:
        await store.define("orders", TopicOptions(dedup_window_s=60, dedup_keys=2))
        for key in ("a", "b", "c"):
            await store.append("orders", events(1, idem_key=key))

        (newest,) = await store.append("orders", events(1, idem_key="c"))
        (oldest,) = await store.append("orders", events(1, idem_key="a"))

        assert (newest.duplicate, oldest.duplicate) == (True, False)

    async def test_keys_are_remembered_across_a_restart(self, store: Store, reopen: Reopen) -> None:
        await store.define("orders", TopicOptions(dedup_window_s=60))
        (first,) = await store.append("orders", events(1, idem_key="a"))
        again = await reopen(store)

        (receipt,) = await again.append("orders", events(1, idem_key="a"))
        assert (receipt.offset, receipt.duplicate, receipt.id) == (1, True, first.id)

    # -- topics --------------------------------------------------------------------------------

    async def test_a_topic_is_made_by_its_first_event_or_by_definition(self, store: Store) -> None:
        await store.append("orders", events(1))
        await store.define("refunds", TopicOptions(partitions=2))
        assert await store.topics() == {
            "orders": TopicOptions(),
            "refunds": TopicOptions(partitions=2),
        }

    async def test_partitions_are_added_but_never_taken_away(self, store: Store) -> None:
        await store.define("orders", TopicOptions(partitions=2))
        with pytest.raises(Conflict):
            await store.define("orders", TopicOptions(partitions=1))
        await store.define("orders", TopicOptions(partitions=3, ttl_policy="dlq"))
        assert (await store.topics())["orders"] == TopicOptions(partitions=3, ttl_policy="dlq")

    async def test_an_edit_keeps_what_it_does_not_name(self, store: Store) -> None:
        await store.define("orders", TopicOptions(partitions=3, retention_records=7))
        edited = await store.edit("orders", {"ttl_policy": "dlq"})
        expected = TopicOptions(partitions=3, retention_records=7, ttl_policy="dlq")
        assert edited == (await store.topics())["orders"] == expected
        with pytest.raises(InvalidOption):
            await store.edit("orders", {"no_such_option": 1})
        assert await store.edit("new", {"partitions": 2}) == TopicOptions(partitions=2)

    async def test_an_idem_key_counts_in_a_topic_that_was_never_defined(
        self, store: Store, clock: ManualClock
    ) -> None:
        (first,) = await store.append("orders", events(1, idem_key="a"))
        (again,) = await store.append("orders", events(1, idem_key="a"))
        assert (again.duplicate, again.offset, again.id) == (True, 1, first.id)
        await store.append("orders", events(3))
        clock.advance(TopicOptions().dedup_window_s + 1)
        (later,) = await store.append("orders", events(1, idem_key="a"))
        assert (later.duplicate, later.offset) == (False, 5)
        await store.define("orders", TopicOptions(dedup_window_s=0))
        (kept,) = await store.append("orders", events(1, idem_key="a"))
        assert (kept.duplicate, kept.offset) == (False, 6)

    async def test_removing_a_topic_takes_its_records_and_groups(self, store: Store) -> None:
        await store.define("orders", TopicOptions(partitions=2))
        await store.append("orders", events(4))
        await store.append("orders.eu", events(1, "orders.eu"))
        await store.change(KEY, create)
        await store.change(KEY._replace(topic="orders.eu"), create)

        await store.define("orders", None)

        assert list(await store.topics()) == ["orders.eu"]
        assert await store.groups() == [KEY._replace(topic="orders.eu")]
        assert await store.bounds("orders", 0) == (1, 1)
        assert await payloads(store, "orders.eu") == [1]
        assert offsets(await store.append("orders", events(1))) == [1]

    async def test_what_is_not_there_cannot_be_removed(self, store: Store) -> None:
        with pytest.raises(NotFound):
            await store.define("orders", None)
        with pytest.raises(NotFound):
            await store.remove_group(KEY)

    # -- groups --------------------------------------------------------------------------------

    async def test_a_change_sees_the_one_before_and_gives_its_result(self, store: Store) -> None:
        await store.append("orders", events(3))
        await store.change(KEY, create)

        assert await store.change(KEY, lease(store, 2)) == [1, 2]
        assert await store.change(KEY, lambda group: group.settle([1])) == [1]
        assert await store.change(KEY, lambda group: group.settle([1])) == []
        assert await store.change(KEY, lambda group: (group.floor, set(group.leases))) == (1, {2})

    async def test_changes_of_a_group_run_one_at_a_time(self, store: Store) -> None:
        await store.append("orders", events(100))
        await store.change(KEY, create)

        def take_one(group: Group) -> int:
            for offset in range(group.read_to, 101):
                group.offer(offset, now=0.0)
            (one,) = group.take(store.member, now=0.0, wall=0.0, limit=1).leases
            return one.offset

        taken = await asyncio.gather(*(store.change(KEY, take_one) for _ in range(100)))

        assert sorted(taken) == list(range(1, 101))

    async def test_a_transaction_is_committed_when_its_block_ends(self, store: Store) -> None:
        await store.append("orders", events(3))
        async with store.group(KEY) as group:
            create(group)
            group.settle([2])
        async with store.group(KEY) as group:
            assert (group.created, group.floor, list(group.settled)) == (True, 0, [(2, 2)])
            group.settle([1])
            assert group.floor == 2

        assert await store.change(KEY, lambda group: group.floor) == 2

    async def test_a_transaction_that_fails_leaves_the_group_as_it_was(self, store: Store) -> None:
        await store.append("orders", events(5))
        await store.change(KEY, create)
        await store.change(KEY, lease(store, 2))
        await store.change(KEY, lambda group: group.settle([1]))

        def look(group: Group) -> tuple[Any, ...]:
            leases = [(one.offset, one.attempt, one.by) for one in group.leases.values()]
            return group.floor, list(group.settled), leases, dict(group.attempts), group.paused

        before = await store.change(KEY, look)

        async def fail() -> None:
            async with store.group(KEY) as group:
                group.settle([2, 4])
                group.pause(True)
                group.seek(0)
                raise BodyFailed

        with pytest.raises(BodyFailed):
            await fail()

        assert await store.change(KEY, look) == before
        assert await store.change(KEY, lambda group: group.settle([2])) == [2]

    async def test_a_group_whose_first_transaction_fails_does_not_exist(self, store: Store) -> None:
        async def fail() -> None:
            async with store.group(KEY) as group:
                create(group)
                raise BodyFailed

        with pytest.raises(BodyFailed):
            await fail()

        assert await store.groups() == []
        assert await store.change(KEY, lambda group: group.created) is False

    async def test_a_group_is_listed_once_it_is_created(self, store: Store) -> None:
        assert await store.change(KEY, lambda group: group.created) is False
        assert await store.groups() == []
        other = GroupKey("orders", 0, "audit")
        await store.change(KEY, create)
        await store.change(other, create)
        assert await store.groups() == [other, KEY]

        await store.remove_group(other)
        assert await store.groups() == [KEY]
        assert await store.change(other, lambda group: (group.created, group.floor)) == (False, 0)

    async def test_another_policy_is_a_conflict(self, store: Store) -> None:
        await store.change(KEY, create)
        with pytest.raises(Conflict):
            await store.change(KEY, lambda group: group.define(GroupOptions(max_retries=1), 0))
        assert await store.change(KEY, lambda group: group.options) == GroupOptions()

    async def test_a_group_is_as_it_was_after_a_restart(self, store: Store, reopen: Reopen) -> None:
        policy = GroupOptions(max_retries=7, ack_timeout_s=60.0, ordering="none")
        await store.append("orders", events(9))
        await store.change(KEY, lambda group: group.define(policy, 1))
        await store.change(KEY, lambda group: group.settle([2, 5, 6, 9]))
        await store.change(KEY, lambda group: group.redrive([5]))
        await store.change(KEY, lambda group: group.pause(True))

        again = await reopen(store)

        def look(group: Group) -> tuple[Any, ...]:
            return group.options, group.floor, list(group.settled), group.again, group.paused

        assert await again.change(KEY, look) == (policy, 2, [(5, 6), (9, 9)], {5}, True)
        assert await again.groups() == [KEY]

    async def test_records_and_topics_are_there_after_a_restart(
        self, store: Store, reopen: Reopen
    ) -> None:
        await store.define("orders", TopicOptions(ttl_policy="dlq"))
        await store.append("orders", events(5))
        await store.trim("orders", 0, 3)

        again = await reopen(store)

        assert await again.topics() == {"orders": TopicOptions(ttl_policy="dlq")}
        assert await payloads(again) == [3, 4, 5]
        assert offsets(await again.append("orders", events(1))) == [6]

    async def test_attempts_count_across_a_restart(self, store: Store, reopen: Reopen) -> None:
        await store.append("orders", events(1))
        await store.change(KEY, create)
        await store.change(KEY, lease(store, 1))

        again = await reopen(store)

        def next_attempt(group: Group) -> int:
            group.offer(1, now=0.0)
            (one,) = group.take(again.member, now=1.0, wall=0.0, limit=1).leases
            return one.attempt

        assert await again.change(KEY, next_attempt) == 2

    # -- several openings of one place ---------------------------------------------------------

    async def test_what_one_writes_another_sees(self, store: Store, other: Store) -> None:
        await store.append("orders", events(2))
        assert await other.bounds("orders", 0) == (1, 3)
        assert offsets(await other.append("orders", events(1))) == [3]
        assert [r.offset for r in await store.read("orders", 0, 1, 10)] == [1, 2, 3]

        await store.change(KEY, create)
        await store.change(KEY, lambda group: group.settle([1]))
        assert await other.change(KEY, lambda group: group.floor) == 1
        assert store.member != other.member

    async def test_two_writers_never_share_or_skip_an_offset(
        self, store: Store, other: Store
    ) -> None:
        both = (store, other)
        jobs = (one.append("orders", events(3)) for _ in range(30) for one in both)
        batches = await asyncio.gather(*jobs)
        everything = sorted(offset for batch in batches for offset in offsets(batch))
        assert everything == list(range(1, 181))

    async def test_members_share_and_never_hold_the_same(self, store: Store, other: Store) -> None:
        await store.append("orders", events(4))
        await store.change(KEY, create)
        mine = await store.change(KEY, lease(store, 2))
        theirs = await other.change(KEY, lease(other, 4))
        assert (mine, theirs) == ([1, 2], [3, 4])

    async def test_what_a_member_held_is_free_once_it_is_gone(
        self, store: Store, other: Store
    ) -> None:
        await store.append("orders", events(1))
        await store.change(KEY, create)
        await other.change(KEY, lease(other, 1))
        await other.close()

        assert await store.change(KEY, lambda group: dict(group.leases)) == {}
        assert await store.change(KEY, lease(store, 1)) == [1]

    async def test_what_a_member_held_is_free_once_it_was_killed(
        self, store: Store, other: Store, kill: Kill, features: Features, clock: ManualClock
    ) -> None:
        await store.append("orders", events(1))
        await store.change(KEY, create)
        await other.change(KEY, lease(other, 1))
        await kill(other)

        patience_s = 10 + 2 * features.member_timeout_s
        async with asyncio.timeout(patience_s):
            while await store.change(KEY, lambda group: dict(group.leases)):
                await clock.run(0.01)
                await asyncio.sleep(0.01)
        assert await store.change(KEY, lease(store, 1)) == [1]

    async def test_members_have_one_clock(self, store: Store, other: Store) -> None:
        assert store.clock.boot == other.clock.boot
        assert abs(store.clock.monotonic() - other.clock.monotonic()) < 1
        assert abs(store.clock.now() - other.clock.now()) < timedelta(seconds=1)

    async def test_a_store_that_watches_rings_for_what_another_does(
        self, store: Store, other: Store
    ) -> None:
        await store.append("orders", events(1))
        await store.change(KEY, create)
        rung = asyncio.Event()
        store.bell.listen(lambda _: rung.set(), "orders", KEY)
        store.watch()
        await asyncio.sleep(0.05)
        for act in (
            lambda: other.append("orders", events(1)),
            lambda: other.change(KEY, lambda group: group.settle([1])),
            lambda: other.define("refunds", TopicOptions()),
        ):
            rung.clear()
            await act()
            async with asyncio.timeout(10):
                assert await rung.wait()

    async def test_a_store_is_idle_when_its_calls_are_done(self, store: Store) -> None:
        await store.append("orders", events(1))
        async with asyncio.timeout(10):
            while not await store.idle():  # noqa: ASYNC110 -- a remote store tells no other way
                await asyncio.sleep(0)
        assert await store.idle()

    # -- the end -------------------------------------------------------------------------------

    async def test_closing_twice_is_closing_once(self, store: Store) -> None:
        await store.append("orders", events(1))
        await store.close()
        await store.close()
        with pytest.raises(Closed):
            await asyncio.wait_for(store.append("orders", events(1)), 5)

    async def test_a_closed_store_says_so(self, store: Store) -> None:
        await store.append("orders", events(1))
        await store.change(KEY, create)
        await store.close()
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: store.append("orders", events(1)),
            lambda: store.read("orders", 0, 1, 1),
            lambda: store.bounds("orders", 0),
            lambda: store.seek("orders", 0, EPOCH),
            lambda: store.trim("orders", 0, 1),
            lambda: store.change(KEY, lambda group: group.floor),
            lambda: store.remove_group(KEY),
            lambda: store.groups(),
            lambda: store.topics(),
            lambda: store.define("orders", TopicOptions()),
        ]
        for call in calls:
            with pytest.raises(Closed):
                await asyncio.wait_for(call(), 5)
