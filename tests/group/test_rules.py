"""The rules of delivery under any interleaving: two processes with two consumers each share one
journal. Sets say what must be; planted mistakes must be found.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kit.mutants import Mutant
from trunkline.group import Group, Lease, Saved, load
from trunkline.group.changes import AnyOp
from trunkline.group.ledger import Ledger
from trunkline.group.schedule import Lane, Schedule, Standing
from trunkline.options import GroupOptions

RECORDS = 12
RUN = 3
MEMBERS = ("ann", "bob")
_ops = msgspec.json.Decoder(list[AnyOp])
_saved = msgspec.json.Decoder(Saved)


class Held(NamedTuple):
    lease: Lease
    by: str
    consumer: int
    alone: bool  # begun before: nothing else of its lane is leased beside it


class Model(RuleBasedStateMachine):
    @initialize(
        ordering=st.sampled_from(["key", "key", "partition", "none"]),
        retries=st.integers(0, 2),
        in_order=st.booleans(),
        keys=st.lists(st.sampled_from([None, "a", "b"]), min_size=RECORDS, max_size=RECORDS),
        delays=st.lists(st.sampled_from([0, 0, 0, 5]), min_size=RECORDS, max_size=RECORDS),
    )
    def begin(
        self, ordering: Any, retries: int, in_order: bool, keys: list[Any], delays: list[int]
    ) -> None:
        self.now = 100.0
        self.ordering, self.retries = ordering, retries
        self.in_order = {1: False, 2: in_order}  # by the number of the consumer
        self.keys = [None, *keys]
        self.due = [0.0, *(100.0 + delay if delay else 0.0 for delay in delays)]
        self.journal: list[AnyOp] = []
        self.groups = {by: Group() for by in MEMBERS}
        self.settled: set[int] = set()
        self.late = {offset for offset in range(1, RECORDS + 1) if self.due[offset]}
        self.held: dict[int, Held] = {}
        self.tries: dict[int, int] = {}
        self.suspects: set[int] = set()
        self.stale: list[Lease] = []  # of consumers that were too slow
        options = GroupOptions(ordering=ordering, max_retries=retries, ack_timeout_s=10.0)
        self.step("ann", lambda group: group.define(options, 0))

    def step(self, by: str, body: Any, *, lost: bool = False) -> Any:
        """A transaction: committed to the journal and so to the other member, or a lost race."""
        group = self.groups[by]
        result = body(group)
        changes = _ops.decode(msgspec.json.encode(group.ops))
        if lost:
            before = Ledger()
            for change in self.journal:
                before.apply(change)
            group.roll_back(before)
            return None
        group.ops = []
        self.journal += changes
        for other in MEMBERS:
            if other != by:
                for change in changes:
                    self.groups[other].apply(change)
        return result

    def lane(self, offset: int) -> str | None:
        lanes: dict[str, str | None] = {"key": self.keys[offset], "partition": "", "none": None}
        return lanes[self.ordering]

    # -- steps -----------------------------------------------------------------------------------

    @rule(by=st.sampled_from(MEMBERS), count=st.integers(1, 5))
    def read(self, by: str, count: int) -> None:
        group = self.groups[by]
        start = group.read_to
        for offset in [*group.wanted(), *range(start, min(start + count, RECORDS + 1))]:
            due = self.due[offset]
            group.offer(offset, self.keys[offset], 2, due, 1e9, now=self.now, wall=self.now)

    @rule(
        by=st.sampled_from(MEMBERS),
        consumer=st.sampled_from((1, 2)),
        limit=st.integers(1, 6),
        suspects=st.sampled_from((None, None, 0, 1)),
        lost=st.sampled_from((False, False, False, True)),
    )
    def take(self, by: str, consumer: int, limit: int, suspects: int | None, lost: bool) -> None:
        in_order = self.in_order[consumer]

        def body(group: Group) -> Any:
            return group.take(
                by,
                now=self.now,
                wall=self.now,
                limit=limit,
                consumer=consumer,
                run=RUN,
                in_order=in_order,
                suspects=suspects,
            )

        taken = self.step(by, body, lost=lost)
        if taken is None:
            return
        leased = [*taken.leases, *taken.dead]
        assert len(leased) <= limit
        fresh = [x.offset for x in taken.leases if x.attempt == 1 and x.offset not in self.late]
        assert not in_order or fresh == sorted(fresh), "by offset"
        if suspects is not None and not in_order:
            assert sum(x.offset in self.suspects for x in leased) <= suspects
        for lease in taken.leases:
            self.tries[lease.offset] = self.tries.get(lease.offset, 0) + 1
            assert lease.attempt == self.tries[lease.offset] <= self.retries + 1
        for lease in leased:
            offset = lease.offset
            assert offset not in self.held, "two hold it"
            assert offset not in self.settled
            assert self.due[offset] <= self.now
            begun = lease.attempt > 1 or lease in taken.dead
            self.held[offset] = Held(lease, by, consumer, begun and not in_order)
        for lease in leased:
            self.check_order(self.held[lease.offset])
        for lease in taken.dead:
            assert self.tries[lease.offset] > self.retries
            self.settle(by, [lease.offset])

    def check_order(self, mine: Held) -> None:
        offset = mine.lease.offset
        if self.lane(offset) is None:
            return
        lane = [o for o in range(1, RECORDS + 1) if self.lane(o) == self.lane(offset)]
        beside = [self.held[o] for o in lane if o in self.held]
        for other in beside:
            assert (other.by, other.consumer) == (mine.by, mine.consumer), "a lane has one holder"
        if not self.in_order[mine.consumer]:
            assert len(beside) <= (RUN if self.retries else 1), "a run is bounded"
            assert len(beside) == 1 or not any(x.alone for x in beside), "begun before: alone"
        for other_offset in lane:
            is_before = other_offset < offset and other_offset not in self.settled | self.late
            if is_before and other_offset not in self.held:
                assert self.is_begun(offset), f"{offset} passed {other_offset}"

    def is_begun(self, offset: int) -> bool:
        mine = self.held[offset]
        return mine.lease.attempt > 1 or mine.alone

    def settle(self, by: str, offsets: list[int]) -> None:
        fresh = self.step(by, lambda g: g.settle(offsets))
        assert sorted(fresh) == sorted(set(offsets) - self.settled)
        self.note_settled(offsets)

    def note_settled(self, offsets: list[int]) -> None:
        for offset in offsets:
            self.settled.add(offset)
            self.late.discard(offset)
            self.suspects.discard(offset)
            self.tries.pop(offset, None)
            if offset in self.held:
                self.stale.append(self.held.pop(offset).lease)

    def uncount(self, offset: int) -> None:
        self.tries[offset] -= 1
        if not self.tries[offset]:
            del self.tries[offset]

    def draw_held(self, data: st.DataObject) -> Held | None:
        return data.draw(st.sampled_from([*self.held.values()])) if self.held else None

    @rule(data=st.data(), lost=st.sampled_from((False, False, True)))
    def ack(self, data: st.DataObject, lost: bool) -> None:
        found = self.draw_held(data)
        if found:
            done = self.step(found.by, lambda g: g.ack([found.lease]), lost=lost)
            if not lost:
                assert done == [found.lease.offset]
                self.note_settled(done)

    @rule(data=st.data(), by=st.sampled_from(MEMBERS))
    def ack_late(self, data: st.DataObject, by: str) -> None:
        """It counts as long as nobody else is at work on the record."""
        if not self.stale:
            return
        lease = data.draw(st.sampled_from(self.stale))
        held = self.held.get(lease.offset)
        is_free = held is None or (held.by, held.lease.attempt) == (lease.by, lease.attempt)
        wished = [lease.offset] if is_free and lease.offset not in self.settled else []
        assert self.step(by, lambda g: g.ack([lease])) == wished
        self.note_settled(wished)

    @rule(
        data=st.data(),
        delay=st.sampled_from((0.0, 1.0, 7.0)),
        lost=st.sampled_from((False, False, True)),
    )
    def nack(self, data: st.DataObject, delay: float, lost: bool) -> None:
        """A record failed. What its consumer has of the lane behind it goes back unread."""
        found = self.draw_held(data)
        if not found:
            return
        lease, offset = found.lease, found.lease.offset
        rest = [
            x.lease
            for x in self.held.values()
            if (x.by, x.consumer) == (found.by, found.consumer)
            and x.lease.offset > offset
            and self.lane(offset) is not None
            and self.lane(x.lease.offset) == self.lane(offset)
        ]

        def body(group: Group) -> bool | None:
            is_last = group.fail(lease, now=self.now, delay_s=delay)
            group.give_back(rest)
            return is_last

        is_last = self.step(found.by, body, lost=lost)
        if lost:
            return
        assert is_last is (lease.attempt > self.retries)
        for one in rest:
            del self.held[one.offset]
            self.uncount(one.offset)
        if is_last:
            self.settle(found.by, [offset])
        else:
            self.suspects.discard(offset)
            self.stale.append(self.held.pop(offset).lease)

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        found = self.draw_held(data)
        if found:
            self.step(found.by, lambda g: g.give_back([found.lease]))
            del self.held[found.lease.offset]
            self.uncount(found.lease.offset)

    @rule(data=st.data())
    def cover_and_bring_back(self, data: st.DataObject) -> None:
        """Another record's cumulative ack settled it; then its consumer failed."""
        found = self.draw_held(data)
        if not found or found.lease.attempt > self.retries:
            return
        lease, offset = found.lease, found.lease.offset
        tries = self.tries[offset]
        self.settle(found.by, [offset])

        def body(group: Group) -> Any:
            again = group.bring_back(lease, now=self.now)
            assert again is not None
            assert again.attempt == tries
            return group.fail(again, now=self.now, delay_s=1.0)

        assert self.step(found.by, body) is False
        self.settled.discard(offset)
        self.tries[offset] = tries
        self.late.add(offset)

    @rule(offset=st.integers(1, RECORDS), by=st.sampled_from(MEMBERS))
    def redrive(self, offset: int, by: str) -> None:
        if self.step(by, lambda g: g.redrive([offset])):
            self.settled.discard(offset)
            self.late.add(offset)

    @rule(seconds=st.sampled_from((0.5, 3.0, 11.0)), by=st.sampled_from(MEMBERS))
    def wait(self, seconds: float, by: str) -> None:
        self.now += seconds

        def body(group: Group) -> tuple[list[Lease], list[int]]:
            late = group.expired(self.now)
            return late, [x.offset for x in late if group.fail(x, now=self.now, delay_s=0.5)]

        late, given_up = self.step(by, body)
        assert {x.offset for x in late} <= self.held.keys()
        for lease in late:
            self.stale.append(self.held.pop(lease.offset).lease)
            self.suspects.discard(lease.offset)
        self.settle(by, given_up)

    @rule(dead=st.sampled_from(MEMBERS), data=st.data(), by_snapshot=st.booleans())
    def crash(self, dead: str, data: st.DataObject, by_snapshot: bool) -> None:
        """A process ends without a word, and starts with nothing but what is written."""
        other = MEMBERS[dead == "ann"]
        mine = sorted(o for o, x in self.held.items() if x.by == dead)
        hand = set(mine)
        is_known = data.draw(st.booleans())
        if is_known and mine:
            hand = data.draw(st.sets(st.sampled_from(mine)))
        self.step(other, lambda g: g.free(dead, hand.__contains__ if is_known else None))
        for offset in mine:
            del self.held[offset]
            if offset not in hand:
                self.uncount(offset)
        self.suspects |= hand
        if by_snapshot:
            self.groups[dead] = load(_saved.decode(msgspec.json.encode(self.groups[other].dump())))
            return
        self.groups[dead] = Group()
        for change in self.journal:
            self.groups[dead].apply(change)

    @rule(by=st.sampled_from(MEMBERS))
    def line_up(self, by: str) -> None:
        """What is derived anew from the facts is as it was; only who holds a lane is forgotten."""
        schedule = self.groups[by].schedule
        before = {offset: item.standing for offset, item in schedule.items.items()}
        schedule.line_up()
        for offset, item in schedule.items.items():
            was = before[offset]
            if was is Standing.RESERVED:
                assert item.standing is not Standing.READY
            elif not schedule.ledger.waiting:  # else a retry that came due waits to be looked at
                assert item.standing is was

    # -- what must be ----------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        for by, group in getattr(self, "groups", {}).items():
            ledger, schedule = group.ledger, group.schedule
            assert {o for o in range(1, RECORDS + 1) if ledger.is_settled(o)} == self.settled, by
            assert {o: x.by for o, x in ledger.leases.items()} == {
                o: x.by for o, x in self.held.items()
            }, by
            assert ledger.attempts == self.tries, by
            assert ledger.suspects == self.suspects, by
            for offset, item in schedule.items.items():
                assert (item.standing is Standing.LEASED) == (offset in ledger.leases)
            for lane in schedule.lanes.values():
                standings = [schedule.items[o].standing for o in lane.line if o in schedule.items]
                assert not {Standing.READY, Standing.RESERVED} & set(standings[1:])
                assert not (lane.leased and standings[:1] == [Standing.READY])

    def teardown(self) -> None:
        """Nothing is lost: in the end every record is settled."""
        if not hasattr(self, "groups"):
            return
        for _ in range(9 * RECORDS):
            if len(self.settled) == RECORDS:
                return
            self.wait(20.0, "ann")
            self.take("ann", 1, RECORDS, None, False)
            self.read("ann", RECORDS)
            self.take("ann", 1, RECORDS, None, False)
            for held in list(self.held.values()):
                self.settle(held.by, [held.lease.offset])
        raise AssertionError(f"never settled: {set(range(1, RECORDS + 1)) - self.settled}")


LONG = settings(
    max_examples=600,
    stateful_step_count=40,
    deadline=None,
    phases=(Phase.generate,),
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.timeout(180)
def test_any_interleaving_loses_nothing_and_keeps_the_order() -> None:
    run_state_machine_as_test(Model, settings=settings(LONG, max_examples=120))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_any_interleaving_loses_nothing_and_keeps_the_order_at_length() -> None:
    run_state_machine_as_test(Model, settings=LONG)


MUTANTS = {
    "another consumer takes what is reserved": Mutant(
        Schedule, "pick", "own = self._reserved", "consumer = 1; own = self._reserved"
    ),
    "a lane goes on while it is leased": Mutant(
        Schedule, "_advance", "if lane.leased:\n        wished", "if False:\n        wished"
    ),
    "a record placed before another one leaves it ready": Mutant(
        Schedule, "_advance", "second.standing = QUEUED", "pass"
    ),
    "begun records do not come first": Mutant(
        Lane, "place", "line, place = self.line,", "begun = {}\n    line, place = self.line,"
    ),
    "one end of a lease frees the lane": Mutant(
        Schedule, "_release", "lane.leased -= 1", "lane.leased = 0"
    ),
    "an ack frees the lane": Mutant(Schedule, "_drop", "lane.leased -= 1", "lane.leased = 0"),
    "a begun record has company": Mutant(
        Schedule, "pick", "alone = item.offset in begun and not in_order", "alone = False"
    ),
    "a run has no bound": Mutant(Schedule, "_follow_lane", "lane.leased < run", "True"),
    "a lost race leaves its standings": Mutant(
        Group, "roll_back", "self.schedule.line_up()", "pass"
    ),
    "a record that was redriven is not read": Mutant(
        Schedule, "follow", "self.missing |= {", "_ = {"
    ),
    "records of others are taken before their lane is known": Mutant(
        Schedule, "pick", "if self.strangers and any(", "if False and any("
    ),
    "a record that is brought back has its tries anew": Mutant(
        Group, "bring_back", "for _ in range(lease.attempt):", "for _ in range(1):"
    ),
    "a snapshot forgets the tries": Mutant(Ledger, "dump", "list(self.attempts.items())", "[]"),
    "an ack settles what is before it": Mutant(
        Group,
        "settle",
        "ledger = self.ledger",
        "ledger = self.ledger; offsets = range(1, 1 + max(offsets, default=0))",
    ),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_in_the_rules_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name].plant(monkeypatch)
    # A mistake ends the search. Which examples come depends on the modules that are imported, so
    # there are many more than are needed: a mistake must not get away by chance.
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Model, settings=settings(LONG, max_examples=6000))
