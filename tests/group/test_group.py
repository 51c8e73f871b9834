"""The rules of delivery, driven by hand: offsets and times in, leases out."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from trunkline.errors import Conflict, InvalidOption, NotFound
from trunkline.group import Group, Lease, Saved, backoff_s, load
from trunkline.group.changes import AnyOp, Leased, Settled
from trunkline.options import GroupOptions

NEVER = float("inf")


def make(count: int = 0, *, keys: str = "", **options: Any) -> Group:
    """A group whose window holds offsets 1 to ``count``, with keys from ``keys``, '-' for none."""
    group = Group(GroupOptions(**options))
    for offset in range(1, max(count, len(keys)) + 1):
        key = keys[offset - 1] if keys else "-"
        group.offer(offset, None if key == "-" else key)
    return group


def take(group: Group, limit: int = 100, now: float = 0.0, by: str = "me") -> list[int]:
    taken = group.take(by, now=now, wall=now, limit=limit)
    if not taken.leases and group.wanted():  # records that came due are read again
        for offset in group.wanted():
            group.offer(offset, now=now, wall=now)
        taken = group.take(by, now=now, wall=now, limit=limit)
    return [one.offset for one in taken.leases]


def the(group: Group, offset: int) -> Lease:
    return group.leases[offset]


def test_an_event_acked_out_of_order_does_not_move_the_floor() -> None:
    group = make(5)
    assert take(group) == [1, 2, 3, 4, 5]

    assert group.settle([2, 4]) == [2, 4]
    assert (group.floor, list(group.settled)) == (0, [(2, 2), (4, 4)])
    assert group.settle([1]) == [1]
    assert (group.floor, list(group.settled)) == (2, [(4, 4)])
    assert group.settle([3, 4]) == [3]
    assert (group.floor, list(group.settled), group.last_settled) == (4, [], 4)
    assert group.lag(6) == 1


def test_no_more_is_leased_than_asked_for() -> None:
    group = make(5)
    assert take(group, 2) == [1, 2]
    assert take(group, 2) == [3, 4]
    assert take(group, 0) == []
    assert take(group) == [5]
    assert take(group) == []


def test_a_lease_counts_as_an_attempt_and_a_return_takes_it_back() -> None:
    group = make(1)
    take(group)
    assert the(group, 1).attempt == 1
    group.give_back([the(group, 1)])
    take(group)
    assert the(group, 1).attempt == 1
    group.fail(the(group, 1), now=0.0, delay_s=0.0)
    take(group)
    assert the(group, 1).attempt == 2


def test_a_lease_that_was_extended_is_given_back_all_the_same() -> None:
    group = make(1)
    (lease,) = group.take("m", now=0.0, wall=0.0, limit=1).leases
    group.extend(lease, now=5.0)
    group.give_back([lease])
    assert not group.leases
    assert not group.attempts


def test_a_failed_lease_waits_for_its_time() -> None:
    group = make(1)
    take(group, now=10.0)
    assert group.fail(the(group, 1), now=10.0, delay_s=5.0) is False

    assert group.next_wakeup(10.0, 10.0) == 5.0
    assert take(group, now=14.9) == []
    assert take(group, now=15.0) == [1]


def test_when_no_try_is_left_the_lease_stays_until_it_is_buried() -> None:
    group = make(1, max_retries=1)
    for _ in range(2):
        take(group)
        dead = group.fail(the(group, 1), now=0.0, delay_s=0.0)
    assert dead is True
    assert take(group) == []
    assert group.settle([1]) == [1]
    assert (group.leases, group.attempts) == ({}, {})


def test_a_record_that_kills_its_consumer_runs_out_of_tries_too() -> None:
    group = make(1, max_retries=1)
    for _ in range(2):
        assert take(group, by="victim") == [1]
        group.free("victim")
    taken = group.take("me", now=0.0, wall=0.0, limit=10)
    assert (taken.leases, [one.offset for one in taken.dead]) == ([], [1])


def test_what_another_member_lost_cannot_be_failed_or_extended() -> None:
    group = make(1)
    take(group, by="a")
    old = the(group, 1)
    group.free("a")
    take(group, by="b")

    assert group.fail(old, now=0.0, delay_s=0.0) is None
    assert group.extend(old, now=0.0) is None
    assert group.hold(old, now=0.0) is False
    group.give_back([old])
    assert the(group, 1).by == "b"


def test_expired_leases_are_found_once_and_extended_ones_later() -> None:
    group = make(2, ack_timeout_s=30.0)
    take(group)
    group.extend(the(group, 2), now=10.0)

    assert group.expired(29.9) == []
    assert [one.offset for one in group.expired(30.0)] == [1]
    group.fail(the(group, 1), now=30.0, delay_s=100.0)
    assert [one.offset for one in group.expired(40.0)] == [2]


@pytest.mark.parametrize(
    ("ordering", "first"), [("key", [1, 2, 5]), ("partition", [1]), ("none", [1, 2, 3, 4, 5])]
)
def test_what_may_be_handled_at_once(ordering: Any, first: list[int]) -> None:
    group = make(keys="ab-ab"[:2] + "ab-", ordering=ordering)
    assert take(group) == first


def test_a_key_goes_on_when_its_head_is_settled_and_not_before() -> None:
    group = make(keys="aaa")
    assert take(group) == [1]
    group.fail(the(group, 1), now=0.0, delay_s=9.0)
    assert take(group) == []
    assert take(group, now=9.0) == [1]
    group.settle([1])
    assert take(group, now=9.0) == [2]


def test_higher_priority_first_and_offset_order_inside_one() -> None:
    group = Group(GroupOptions())
    for offset, rank in enumerate((3, 2, 0, 1, 0), 1):
        group.offer(offset, None, rank, 0.0, NEVER, now=0.0)
    assert [take(group, 1)[0] for _ in range(5)] == [3, 5, 4, 2, 1]


def test_what_waits_gains_a_step_of_priority_for_every_aging_time() -> None:
    group = Group(GroupOptions(aging_s=5.0))
    group.offer(1, None, 3, 0.0, NEVER, now=0.0)
    group.offer(2, None, 0, 0.0, NEVER, now=14.9)
    assert take(group, 1, now=14.9) == [2]
    group.offer(3, None, 0, 0.0, NEVER, now=15.1)
    assert take(group, 1, now=15.1) == [1]


def test_a_delayed_record_holds_up_nobody_and_comes_when_due() -> None:
    group = Group(GroupOptions())
    group.offer(1, "a", 2, 100.0, NEVER, now=0.0)
    group.offer(2, "a", 2, 0.0, NEVER, now=0.0)
    assert take(group, now=0.0) == [2]
    group.settle([2])
    assert group.next_wakeup(25.0, 98.0) == 2.0
    assert take(group, now=100.0) == [1]


@pytest.mark.parametrize("ttl", ["drop", "dlq", "deliver"])
def test_an_expired_record_meets_the_policy(ttl: Any) -> None:
    group = Group(GroupOptions())
    group.offer(1, "a", 2, 0.0, 50.0, now=0.0)
    group.offer(2, "a", 2, 0.0, NEVER, now=0.0)
    taken = group.take("me", now=0.0, wall=50.0, limit=10, ttl=ttl)
    found = (
        [one.offset for one in taken.leases],
        [one.offset for one in taken.expired],
        taken.dropped,
    )
    wanted = {"drop": ([2], [], [1]), "dlq": ([], [1], []), "deliver": ([1], [], [])}
    assert found == wanted[ttl]
    assert group.is_settled(1) is (ttl == "drop")


def test_a_redriven_offset_below_the_floor_is_unsettled_until_settled_again() -> None:
    group = make(3)
    take(group)
    group.settle([1, 2, 3])
    assert group.redrive([2, 9]) == [2]
    assert (group.floor, group.is_settled(2), group.lag(4)) == (3, False, 1)
    assert group.wanted() == [2]

    group.offer(2, None, 2, 0.0, NEVER, now=0.0)
    assert take(group) == [2]
    assert the(group, 2).attempt == 1
    group.settle([2])
    assert (group.is_settled(2), group.lag(4), group.wanted()) == (True, 0, [])


def test_a_paused_group_takes_nothing() -> None:
    group = make(1)
    group.pause(True)
    assert take(group) == []
    group.pause(False)
    assert take(group) == [1]


def test_a_lease_of_another_era_does_nothing() -> None:
    earlier, group = Group(era=1), Group(era=2)
    for one in (earlier, group):
        one.define(GroupOptions(), 0)
        one.offer(1, None, 2, 0.0, NEVER, now=0.0)
        assert take(one) == [1]
    stale = the(earlier, 1)
    assert (stale.offset, stale.attempt) == (the(group, 1).offset, the(group, 1).attempt)

    assert group.ack([stale]) == []
    assert group.fail(stale, now=0.0, delay_s=0.0) is None
    assert group.extend(stale, now=0.0) is None
    group.give_back([stale])
    assert list(group.leases) == [1]
    assert group.ack([the(group, 1)]) == [1]


def test_seek_forgets_everything_above() -> None:
    group = make(5)
    take(group)
    group.settle([1, 2, 5])
    group.seek(1)
    assert (group.floor, list(group.settled), group.leases, group.read_to) == (1, [], {}, 2)


def test_a_policy_is_set_once() -> None:
    group = Group()
    group.define(GroupOptions(max_retries=3), 7)
    assert (group.floor, group.created) == (7, True)
    group.define(GroupOptions(max_retries=3), 99)
    with pytest.raises(Conflict) as caught:
        group.define(GroupOptions(max_retries=4), 0)
    assert caught.value.have == GroupOptions(max_retries=3)
    assert group.floor == 7


def drive(group: Group) -> list[AnyOp]:
    """Something of everything; returns what happened."""
    happened: list[AnyOp] = []

    def note() -> None:
        happened.extend(group.ops)
        group.ops.clear()

    group.define(GroupOptions(max_retries=1, ack_timeout_s=5.0), 0)
    note()
    for offset in range(1, 9):
        group.offer(offset, "abc-"[offset % 4], 2, 0.0, NEVER, now=0.0)
    take(group, 6)
    group.settle([2, 3])
    group.fail(the(group, 1), now=1.0, delay_s=2.0)
    group.extend(the(group, 4), now=2.0)
    note()
    take(group, now=3.0, by="other")
    group.free("other")
    group.redrive([3])
    group.pause(True)
    group.edit(GroupOptions(max_retries=7, ack_timeout_s=5.0))
    note()
    return happened


def look(group: Group) -> Any:
    return msgspec.json.decode(msgspec.json.encode(group.dump()))


def test_a_process_that_applies_the_same_changes_holds_the_same_state() -> None:
    mine, theirs = Group(), Group()
    for op in drive(mine):
        theirs.apply(msgspec.json.decode(msgspec.json.encode(op), type=AnyOp))
    assert look(theirs) == look(mine)


def test_what_is_dumped_is_loaded_as_it_was() -> None:
    group = Group()
    drive(group)
    again = load(msgspec.convert(look(group), Saved))
    assert look(again) == look(group)
    assert again.next_wakeup(3.0, 3.0) == 4.0, "the deadline of the lease of offset 4"


def test_backoff_grows_to_its_bound_and_keeps_its_floor() -> None:
    options = GroupOptions()
    most = [backoff_s(options, attempt, 1.0) for attempt in (1, 2, 3, 6, 7, 8, 10_000)]
    assert most == [0.5, 1.0, 2.0, 16.0, 30.0, 30.0, 30.0]
    assert backoff_s(options, 3, 0.5) == 1.75
    assert backoff_s(options, 3, 0.0) == 1.5


def shortest_s(options: GroupOptions) -> float:
    """How long the retries of a policy last if every draw is the smallest."""
    return sum(backoff_s(options, attempt, 0.0) for attempt in range(1, options.max_retries + 1))


def test_the_default_retries_last_longer_than_eight_seconds() -> None:
    assert shortest_s(GroupOptions()) > 11


def test_a_patient_policy_outlasts_ten_minutes() -> None:
    assert shortest_s(GroupOptions.patient()) > 600
    changed = GroupOptions.patient(max_retries=20, ordering="none")
    assert (changed.max_retries, changed.ordering, changed.backoff_max_s) == (20, "none", 120.0)


def test_another_policy_is_told_by_what_differs() -> None:
    group = Group(GroupOptions(max_retries=1, ordering="none"))
    with pytest.raises(Conflict, match="policy: max_retries 1 -> 2, ordering none -> key") as told:
        group.define(GroupOptions(max_retries=2), 0)
    hint = told.value.hint
    assert hint.endswith("trunkline group edit TOPIC GROUP --max-retries 2 --ordering key")
    with pytest.raises(Conflict, match=r"^group billing on orders has another policy") as told:
        group.define(GroupOptions(max_retries=2), 0, topic="orders", name="billing")
    hint = told.value.hint
    assert hint.endswith("trunkline group edit orders billing --max-retries 2 --ordering key")


def test_an_edit_keeps_the_place_and_counts_from_the_next_lease_on() -> None:
    group = make(3, max_retries=5, ack_timeout_s=5.0)
    take(group, 2)
    group.settle([1])
    group.edit(GroupOptions(max_retries=0, ack_timeout_s=60.0))
    assert (group.floor, list(group.leases), the(group, 2).until) == (1, [2], 5.0)
    assert take(group, now=1.0) == [3]
    assert the(group, 3).until == 61.0
    assert group.fail(the(group, 3), now=2.0, delay_s=0.0) is True
    group.ops.clear()
    group.edit(group.options)
    assert group.ops == [], "nothing changed"


@pytest.mark.parametrize("after", ["key", "partition", "none"])
@pytest.mark.parametrize("before", ["key", "partition", "none"])
def test_an_edit_of_the_order_holds_for_what_is_in_line(before: Any, after: Any) -> None:
    """As in a window that was filled under the new rule."""
    group = make(keys="abab-", ordering=before)
    fresh = make(keys="abab-", ordering=after)
    group.edit(GroupOptions(ordering=after))
    for _ in range(5):
        taken = take(group)
        assert taken == take(fresh)
        group.settle(taken[:1])
        fresh.settle(taken[:1])


def test_what_was_handed_out_together_comes_again_in_the_new_order() -> None:
    group = make(keys="aa", ordering="none")
    assert take(group) == [1, 2]
    group.edit(GroupOptions(ordering="key"))
    group.fail(the(group, 1), now=0.0, delay_s=3.0)
    group.fail(the(group, 2), now=0.0, delay_s=1.0)
    assert take(group, now=2.0) == []
    assert take(group, now=4.0) == [1]
    group.settle([1])
    assert take(group, now=4.0) == [2]


@pytest.mark.parametrize("ordering", ["key", "partition"])
def test_an_edit_lets_nothing_pass_what_is_handed_out(ordering: Any) -> None:
    group = make(keys="aaa", ordering=ordering)
    take(group)
    group.settle([1])
    assert take(group) == [2]
    group.redrive([1])
    group.offer(1, "a", 2, 0.0, NEVER, now=0.0)
    assert take(group) == []
    group.edit(GroupOptions(ordering=ordering, max_retries=7))
    assert take(group) == [], "one at a time"
    group.settle([2])
    assert take(group) == [1]
    group.settle([1])
    assert take(group) == [3]


def test_what_is_not_there_is_not_edited() -> None:
    with pytest.raises(NotFound):
        Group().edit(GroupOptions())


@pytest.mark.parametrize("policy", [{"max_retries": 1}, 5, None, "earliest"])
def test_a_policy_of_another_type_is_refused(policy: Any) -> None:
    group = Group()
    with pytest.raises(InvalidOption, match="GroupOptions"):
        group.define(policy, 0)
    assert (group.created, group.ops) == (False, [])


def test_a_stray_does_not_stand_for_what_lies_before_it() -> None:
    group = make(2)
    group.apply(Settled([(7, 7)]))
    group.redrive([7])
    group.offer(7, None, 2, 0.0, NEVER, now=0.0)
    assert group.read_to == 3
    for offset in range(3, 9):
        group.offer(offset, None, 2, 0.0, NEVER, now=0.0)
    assert take(group) == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("seed", [*range(60), 1519, 2400, 3516, 3931])
def test_processes_that_share_a_group_never_hold_two_of_a_key(seed: int) -> None:
    """Each has read another stretch of the log, and some records come late: delayed, redriven."""
    draw = random.Random(seed)
    log = {
        offset: (draw.choice("ab"), 2, draw.choice((0.0, 0.0, 9.0, 30.0)))
        for offset in range(1, 25)
    }
    ordering: Any = draw.choice(["key", "partition"])
    policy = GroupOptions(ordering=ordering, lookahead=draw.choice((8, 99)), max_retries=99)
    groups = [Group(policy) for _ in range(3)]
    now = 0.0

    def share(group: Group) -> None:
        for op in group.ops:
            for other in groups:
                if other is not group:
                    other.apply(op)
        group.ops.clear()

    idle = 0
    while idle < 200:
        now += draw.random()
        number = draw.randrange(3)
        if draw.random() < 0.05:  # a process begins anew
            dumped = msgspec.json.encode(groups[number].dump())
            groups[number] = load(msgspec.json.decode(dumped, type=Saved))
        group = groups[number]
        for _ in range(draw.randrange(4)):
            if group.read_to in log and group.schedule.wants() > 0:
                group.offer(group.read_to, *log[group.read_to], now=now, wall=now)
        for offset in group.wanted():
            group.offer(offset, *log[offset], now=now, wall=now)
        limit, by = draw.randrange(3), str(number)
        took = group.take(by, now=now, wall=now, limit=limit).leases
        held = [log[offset][0] if ordering == "key" else "" for offset in group.leases]
        assert len(held) == len(set(held)), f"{group.leases} by {now}"
        for lease in list(group.leases.values()):
            if draw.random() < 0.2:
                group.fail(lease, now=now, delay_s=1.0)
            elif draw.random() < 0.3:
                group.settle([lease.offset])
            elif draw.random() < 0.1:
                group.give_back([lease])
        if draw.random() < 0.02 and now < 40:
            group.redrive([draw.randrange(1, 25)])
        share(group)
        idle = 0 if took or group.leases or now < 50 else idle + 1
    assert groups[0].floor == 24
    assert not groups[0].again


def test_what_the_log_does_not_hold_is_no_lag() -> None:
    group = Group(GroupOptions(ordering="none"))
    group.settle([2, 3, 4, 5, 12])
    assert group.lag(20) == 14
    assert group.lag(20, 10) == 9
    group.redrive([3, 12])
    assert group.lag(20, 10) == 10


def test_nothing_goes_before_a_record_that_another_member_began_and_nobody_read_here() -> None:
    """The clock of the other member is ahead: the record is due there, and not here."""
    group = Group(GroupOptions(), 0)
    group.offer(1, "k", due=100.0, wall=0.0)
    group.offer(2, "k", wall=0.0)
    group.apply(Leased("bob", 10.0, [(1, 1)]))
    assert not group.take("ann", now=0.0, wall=0.0, limit=5).leases
