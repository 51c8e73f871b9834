"""An inbox hands out the records of a lane one after the other, whatever its readers do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.mutants import Mutant
from trunkline.bus import Delivery, Outcome
from trunkline.delivery.inbox import OPEN, DeliveryInbox
from trunkline.event import Event, Record
from trunkline.group import Lease

LANES = (None, "a", "b")
# A record arrives of a lane, a reader reads one or a batch, or it settles one of what it has.
STEPS = st.lists(
    st.one_of(
        st.sampled_from(LANES),
        st.just("read"),
        st.just("batch"),
        st.tuples(st.integers(0, 9), st.sampled_from([Outcome.ACK, Outcome.ACK, Outcome.NACK])),
    ),
    max_size=60,
)


class Work:
    """A source and a reader of one inbox. The source sends again what came back, in order."""

    in_hand = None

    def __init__(self) -> None:
        self.inbox = DeliveryInbox(100, lambda: None, self.settle)
        self.inbox.life = OPEN
        self.next = 1
        self.hand: list[Delivery] = []
        self.back: list[Delivery] = []
        self.acked: list[Delivery] = []
        self.unordered = set[str | None]()  # lanes of which a batch was settled out of order

    def settle(
        self, delivery: Delivery, outcome: Outcome, delay_s: float | None, reason: str
    ) -> None:
        (self.acked if outcome is Outcome.ACK else self.back).append(delivery)

    def settle_all(self, deliveries: list[Delivery]) -> None:
        self.acked += deliveries

    def give_back(self, delivery: Delivery) -> None:
        self.back.append(delivery)

    def arrive(self, lane: str | None, offset: int = 0) -> None:
        offset = offset or self.next
        self.next = max(self.next, offset + 1)
        event = Event(topic="t", key=lane)
        lease = Lease(offset, 1, monotonic() + 100.0, "me")
        place = None if lane is None else (self, lane)
        record = Record(event, 0, offset)
        delivery = Delivery(record, lease, "g", self.inbox.settle, lambda _: None, place)
        self.inbox.put(self, delivery, monotonic())

    def read(self) -> None:
        if not self.inbox.is_ready:
            return
        delivery = self.inbox.pop()
        if delivery.lane is not None:
            lanes = [one.lane for one in self.hand]
            assert delivery.lane not in lanes, "another record of its lane is in hand"
            waiting = [one for one in self.back if one.lane == delivery.lane]
            assert not waiting, "a record of its lane before it came back"
        self.hand.append(delivery)

    def read_batch(self) -> None:
        if not self.inbox.is_ready:
            return
        lanes = {one.lane for one in self.hand} - {None}
        with pytest.raises(StopIteration) as ended:  # what is ready is read without waiting
            self.inbox.gather(3, 0.0).send(None)
        found: list[Delivery] = ended.value.value
        assert lanes.isdisjoint(one.lane for one in found), "a record of its lane is in hand"
        self.hand += found

    def finish(self, number: int, outcome: Outcome) -> None:
        if not self.hand:
            return
        delivery = self.hand.pop(number % len(self.hand))
        lane = delivery.lane
        if lane is not None and any(one.lane == lane for one in self.hand):
            self.unordered.add(delivery.event.key)
        delivery.finish(outcome)
        if outcome is not Outcome.ACK:
            here = [one for one in self.inbox.unread() if one.lane == lane and lane is not None]
            assert not here, "the rest of the lane of a record that failed stays"
            self.send_again()

    def send_again(self) -> None:
        again, self.back = sorted(self.back, key=lambda one: one.offset), []
        for one in again:
            self.arrive(one.event.key, one.offset)

    def drain(self) -> None:
        while self.inbox.open or self.hand:
            before = len(self.inbox.open) + len(self.hand)
            self.read()
            if self.hand:
                self.finish(0, Outcome.ACK)
            assert len(self.inbox.open) + len(self.hand) < before, "nothing can be read"


def play(steps: list[object]) -> None:
    work = Work()
    for step in steps:
        if isinstance(step, tuple):
            work.finish(*step)
        elif step == "read":
            work.read()
        elif step == "batch":
            work.read_batch()
        else:
            assert step is None or isinstance(step, str)
            work.arrive(step)
        assert len(work.inbox.unread()) == work.inbox.ahead - work.inbox.spare()
    work.drain()
    assert sorted(one.offset for one in work.acked) == list(range(1, work.next))
    for lane in LANES[1:]:
        done = [one.offset for one in work.acked if one.event.key == lane]
        assert lane in work.unordered or done == sorted(done), "a lane is worked in order"


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_any_steps_of_readers_keep_the_order_of_each_lane(steps: list[object]) -> None:
    play(steps)


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(
            Mutant(DeliveryInbox, "put", "if run is not None:", "if False:"), id="no gate"
        ),
        pytest.param(
            Mutant(DeliveryInbox, "_go_on", "if run.handed > 0:", "if False:"),
            id="the gate opens too early",
        ),
        pytest.param(
            Mutant(DeliveryInbox, "_finish_in_lane", "outcome is not ACK and run.behind", "False"),
            id="the rest of a run stays",
        ),
        pytest.param(
            Mutant(DeliveryInbox, "_go_on", "self._behind -= 1", "pass"),
            id="the rest is miscounted",
        ),
    ],
)
def test_a_mistake_in_the_inbox_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.plant(monkeypatch)
    search: Callable[[], None] = settings(
        max_examples=2000, deadline=None, database=None, report_multiple_bugs=False
    )(given(STEPS)(play))
    with pytest.raises(AssertionError):
        search()


async def test_a_reader_that_waits_for_a_slow_store_gets_records_ahead() -> None:
    """It got one record with each turn of a group in a database, however quick it was: the time
    for which the store let it wait was taken for its own.
    """
    work = Work()
    for _ in range(3):
        reading = asyncio.ensure_future(work.inbox.next())
        await asyncio.sleep(0.06)  # the store's time: longer than what counts as quick
        work.arrive(None)
        assert await reading is not None
    assert work.inbox.ahead > 1
