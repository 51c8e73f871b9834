"""Groups against a simple model, by random steps of two processes that share one list of ops."""

from __future__ import annotations

from typing import Any

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

from trunkline.group import Group, Lease, Saved, load
from trunkline.group.changes import AnyOp
from trunkline.options import GroupOptions

RECORDS = 10
MEMBERS = ("ann", "bob")
_ops = msgspec.json.Decoder(list[AnyOp])


class Model(RuleBasedStateMachine):
    """What each offset is, in sets; the two groups must agree with them and with each other."""

    @initialize(
        ordering=st.sampled_from(["none", "key", "partition"]),
        retries=st.integers(0, 2),
        keys=st.lists(st.sampled_from([None, "a", "b"]), min_size=RECORDS, max_size=RECORDS),
        ranks=st.lists(st.integers(0, 3), min_size=RECORDS, max_size=RECORDS),
        delays=st.lists(st.sampled_from([0, 0, 0, 5]), min_size=RECORDS, max_size=RECORDS),
    )
    def begin(
        self, ordering: Any, retries: int, keys: list[Any], ranks: list[int], delays: list[int]
    ) -> None:
        self.now = 100.0
        self.options = GroupOptions(
            ordering=ordering, max_retries=retries, ack_timeout_s=10.0, lookahead=RECORDS
        )
        self.items = [(o, keys[o - 1], ranks[o - 1], delays[o - 1]) for o in range(1, RECORDS + 1)]
        self.journal: list[AnyOp] = []
        self.groups = {by: Group() for by in MEMBERS}
        self.hands: list[Lease] = []
        self.settled: set[int] = set()
        self.held: dict[int, Lease] = {}
        self.tries: dict[int, int] = {}
        self.again: set[int] = set()
        self.step("ann", lambda group: group.define(self.options, 0))

    def step(self, by: str, action: Any) -> Any:
        """As a journal does it: run, then let the other one apply the ops, as read from a file."""
        group = self.groups[by]
        group.ops.clear()
        result = action(group)
        shared = _ops.decode(msgspec.json.encode(group.ops))
        self.journal += shared
        for name, other in self.groups.items():
            if name != by:
                for op in shared:
                    other.apply(op)
        return result

    @rule(by=st.sampled_from(MEMBERS), count=st.integers(1, 4))
    def offer(self, by: str, count: int) -> None:
        group = self.groups[by]
        for offset, key, rank, delay in self.items[group.read_to - 1 : group.read_to - 1 + count]:
            due = 100.0 + delay
            group.offer(offset, key, rank, due, 1e9, now=self.now, wall=self.now)
        self.offer_wanted(group)

    def offer_wanted(self, group: Group) -> None:
        for offset in group.wanted():
            _, key, rank, delay = self.items[offset - 1]
            group.offer(offset, key, rank, 100.0 + delay, 1e9, now=self.now, wall=self.now)

    @rule(by=st.sampled_from(MEMBERS), limit=st.integers(1, 4))
    def take(self, by: str, limit: int) -> None:
        taken = self.step(by, lambda g: g.take(by, now=self.now, wall=self.now, limit=limit))
        for lease in (*taken.leases, *taken.dead):
            assert lease.offset not in self.held, "two hold it"
            assert lease.offset not in self.settled, "it was settled"
            self.check_order(by, lease.offset)
            self.held[lease.offset] = lease
        for lease in taken.leases:
            self.tries[lease.offset] = self.tries.get(lease.offset, 0) + 1
            assert lease.attempt == self.tries[lease.offset] <= self.options.max_retries + 1
            self.hands.append(lease)
        for lease in taken.dead:
            assert self.tries[lease.offset] > self.options.max_retries
            self.settle(by, [lease.offset])

    def check_order(self, by: str, offset: int) -> None:
        """Nothing of the same lane that this process knows and that is due may be open before,
        unless this one was begun before the order was changed.
        """
        _, key, _, _ = self.items[offset - 1]
        ordering = self.options.ordering
        if ordering == "none" or (key is None and ordering == "key") or offset in self.again:
            return
        for earlier, other, _, delay in self.items[: offset - 1]:
            lane = ordering == "partition" or other == key
            passed = self.tries.get(offset, 0) and not self.tries.get(earlier, 0)
            if lane and not delay and earlier not in self.settled | self.again and not passed:
                raise AssertionError(f"{offset} was leased before {earlier}")

    def settle(self, by: str, offsets: list[int]) -> None:
        fresh = self.step(by, lambda g: g.settle(offsets))
        assert sorted(fresh) == sorted(set(offsets) - self.settled)
        for offset in offsets:
            self.settled.add(offset)
            self.held.pop(offset, None)
            self.tries.pop(offset, None)
            self.again.discard(offset)

    @rule(data=st.data(), by=st.sampled_from(MEMBERS))
    def ack(self, data: st.DataObject, by: str) -> None:
        if self.hands:
            lease = data.draw(st.sampled_from(self.hands))
            if lease.era == self.groups[by].era:
                self.settle(by, [lease.offset])

    @rule(data=st.data(), delay=st.sampled_from([0.0, 1.0, 7.0]))
    def nack(self, data: st.DataObject, delay: float) -> None:
        if not self.hands:
            return
        lease = data.draw(st.sampled_from(self.hands))
        self.hands.remove(lease)
        outcome = self.step(lease.by, lambda g: g.fail(lease, now=self.now, delay_s=delay))
        mine = self.held.get(lease.offset)
        # A lease of before a seek says nothing of the record that is leased now.
        now, then = (
            (mine and (mine.by, mine.attempt, mine.era)),
            (lease.by, lease.attempt, lease.era),
        )
        assert (outcome is not None) == (now == then)
        if outcome is False:
            del self.held[lease.offset]
        if outcome is True:
            assert lease.attempt > self.options.max_retries
            self.settle(lease.by, [lease.offset])

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        if self.hands:
            lease = data.draw(st.sampled_from(self.hands))
            self.hands.remove(lease)
            if self.held.get(lease.offset) == lease:
                del self.held[lease.offset]
                self.tries[lease.offset] -= 1
            self.step(lease.by, lambda g: g.give_back([lease]))

    @rule(seconds=st.sampled_from([0.5, 3.0, 11.0]), by=st.sampled_from(MEMBERS))
    def wait(self, seconds: float, by: str) -> None:
        self.now += seconds

        def expire(group: Group) -> None:
            for lease in group.expired(self.now):
                assert lease.until <= self.now
                if group.fail(lease, now=self.now, delay_s=0.5):
                    group.settle([lease.offset])
                    self.settled.add(lease.offset)
                    self.tries.pop(lease.offset, None)
                    self.again.discard(lease.offset)
                self.held.pop(lease.offset, None)

        self.step(by, expire)

    @rule(dead=st.sampled_from(MEMBERS))
    def free(self, dead: str) -> None:
        """One process is gone and comes back with nothing but what is written."""
        other = next(by for by in MEMBERS if by != dead)
        self.step(other, lambda g: g.free(dead))
        self.held = {o: lease for o, lease in self.held.items() if lease.by != dead}
        self.hands = [lease for lease in self.hands if lease.by != dead]
        self.groups[dead] = Group()
        for op in self.journal:
            self.groups[dead].apply(op)

    @rule(by=st.sampled_from(MEMBERS))
    def reload(self, by: str) -> None:
        """By way of a snapshot."""
        saved = msgspec.convert(
            msgspec.json.decode(msgspec.json.encode(self.groups[by].dump())), Saved
        )
        self.groups[by] = load(saved)

    @rule(by=st.sampled_from(MEMBERS), floor=st.integers(0, RECORDS))
    def seek(self, by: str, floor: int) -> None:
        self.step(by, lambda g: g.seek(floor))
        self.settled = set(range(1, floor + 1))
        self.held, self.tries, self.again = {}, {}, set()

    @rule(
        by=st.sampled_from(MEMBERS),
        ordering=st.sampled_from(["none", "key", "partition"]),
        retries=st.integers(0, 2),
    )
    def edit(self, by: str, ordering: Any, retries: int) -> None:
        self.options = msgspec.structs.replace(self.options, ordering=ordering, max_retries=retries)
        self.step(by, lambda g: g.edit(self.options))

    @rule(by=st.sampled_from(MEMBERS), offset=st.integers(1, RECORDS))
    def redrive(self, by: str, offset: int) -> None:
        back = self.step(by, lambda g: g.redrive([offset]))
        assert back == ([offset] if offset in self.settled else [])
        if back:
            self.settled.discard(offset)
            self.again.add(offset)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "groups"):
            return
        for by, group in self.groups.items():
            known = {o for o in range(1, RECORDS + 1) if group.is_settled(o)}
            assert known == self.settled, by
            below = self.settled | self.again
            floor = next((o - 1 for o in range(1, RECORDS + 2) if o not in below), RECORDS)
            assert group.floor == floor or self.again, by
            assert {o: x.by for o, x in group.leases.items()} == {
                o: x.by for o, x in self.held.items()
            }, by
            assert group.attempts == {o: n for o, n in self.tries.items() if n}, by
            assert group.ledger.unsettled(RECORDS + 1) == RECORDS - len(self.settled), by

    def teardown(self) -> None:
        """In the end every record is settled, whatever happened."""
        if not hasattr(self, "groups"):
            return
        for _ in range(8 * RECORDS):
            if len(self.settled) == RECORDS:
                return
            self.wait(20.0, "ann")
            self.offer("ann", RECORDS)
            self.take("ann", RECORDS)
            for lease in list(self.held.values()):
                self.settle("ann", [lease.offset])
        raise AssertionError(f"never settled: {set(range(1, RECORDS + 1)) - self.settled}")


QUICK = settings(
    max_examples=300,
    stateful_step_count=40,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
# Not by chance: the same examples each time, or a mutant would now and then get away.
MUTANT = settings(
    QUICK, max_examples=200, phases=(Phase.generate,), print_blob=False, derandomize=True
)


@pytest.mark.timeout(180)
def test_a_group_does_what_the_model_says() -> None:
    run_state_machine_as_test(Model, settings=QUICK)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_group_does_what_the_model_says_at_length() -> None:
    run_state_machine_as_test(
        Model, settings=settings(QUICK, max_examples=3000, stateful_step_count=60)
    )


def test_an_ack_of_everything_below_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classic mistake: settling one offset settles all before it."""
    settle = Group.settle

    def cumulative(self: Group, offsets: Any) -> list[int]:
        offsets = list(offsets)
        return settle(self, range(self.floor + 1, max(offsets) + 1)) if offsets else []

    monkeypatch.setattr(Group, "settle", cumulative)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Model, settings=MUTANT)


def test_attempts_that_only_memory_knows_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    dump = Group.dump
    monkeypatch.setattr(Group, "dump", lambda self: {**dump(self), "attempts": []})
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Model, settings=MUTANT)
