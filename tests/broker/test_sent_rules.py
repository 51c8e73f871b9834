"""Cumulative acks of several clients of one group, by random interleavings: nothing is settled that
no client worked on, nothing is lost, and planted mistakes are found.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from kit.mutants import Mutant
from trunkline.broker.sent import Sent
from trunkline.group import Group, Lease
from trunkline.options import GroupOptions

WINDOW = 12


@dataclass(eq=False)
class Frame:
    lease: Lease
    place: str = "t/0"
    number: int = 0
    lane: str | None = None

    @property
    def offset(self) -> int:
        return self.lease.offset


@dataclass(eq=False)
class Client:
    """Works on frames one after the other and acks the last one of each ``batch``."""

    number: int
    batch: int
    since: int = 0
    sent: Sent = field(default_factory=lambda: Sent(WINDOW))
    opened: dict[int, Frame] = field(default_factory=dict)
    frames: deque[Frame] = field(default_factory=deque)  # on their way to the client
    replies: deque[tuple[str, int]] = field(default_factory=deque)  # on their way to the broker


class World:
    """Clients of one broker. Frames and replies are delayed independently of each other."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.records, self.now = rng.randint(1, 40), 0.0
        self.worked: set[int] = set()
        names: list[list[str | None]] = [[None], ["a"], ["a", "b"], [None, "a", "b", "c"]]
        keys = rng.choice(names)
        self.keys = {offset: rng.choice(keys) for offset in range(1, self.records + 1)}
        self.group = Group(GroupOptions(max_retries=99, ack_timeout_s=1e6))
        for offset, key in self.keys.items():
            self.group.offer(offset, key, 2, rng.choice((0.0, 0.0, 0.0, 5.0)))
        self.clients = [Client(n, rng.choice((1, 3, 10))) for n in range(1, rng.randint(2, 4))]

    def settled(self) -> set[int]:
        return {offset for offset in self.keys if self.group.is_settled(offset)}

    def send(self, client: Client) -> None:
        group, sent = self.group, client.sent
        for offset in group.wanted():
            group.offer(offset, self.keys[offset], now=self.now, wall=self.now)
        room = WINDOW + sent.spare() - len(client.opened)
        taken = group.take(
            "broker",
            now=self.now,
            wall=self.now,
            limit=room,
            consumer=client.number,
            in_order=True,
        )
        for lease in taken.leases:
            frame = client.opened[lease.offset] = Frame(lease)
            sent.add(frame)
            client.frames.append(frame)

    def work(self, client: Client, fails: float) -> None:
        if not client.frames:
            return
        frame = client.frames.popleft()
        if self.rng.random() < fails:
            client.replies.append(("NACK", frame.offset))
            return
        self.worked.add(frame.offset)
        client.since += 1
        if client.since >= client.batch:
            client.since = 0
            client.replies.append(("ACK", frame.offset))

    def hear(self, client: Client) -> None:
        if not client.replies:
            return
        verb, offset = client.replies.popleft()
        frame = client.opened.get(offset)
        if frame is None:
            return
        done = client.sent.upto(frame) if verb == "ACK" else [frame]
        client.sent.speak(frame)
        for one in done:
            client.sent.remove(one)
            mine = client.opened.pop(one.offset)
            if verb == "ACK":
                self.group.ack([mine.lease])
            else:
                self.group.fail(mine.lease, now=self.now, delay_s=0.5)

    def hang_up(self, client: Client) -> None:
        """Without a word: what the client may have begun counts as a try, the rest does not."""
        begun = client.sent.begun()
        assert len(begun) <= client.batch + client.sent.passed, "too many are counted"
        for frame in client.opened.values():
            tries = self.group.attempts[frame.offset]
            if frame.number in begun:
                self.group.fail(frame.lease, now=self.now, delay_s=0.0, crashed=True)
            else:
                self.group.give_back([frame.lease])
                assert self.group.attempts.get(frame.offset, 0) == tries - 1
        at = self.clients.index(client)
        self.clients[at] = Client(client.number, client.batch)

    def play(self) -> None:
        rng = self.rng
        for _ in range(rng.randint(0, 200)):
            client = rng.choice(self.clients)
            act = rng.choice("swwhh" + ("x" if rng.random() < 0.1 else "s"))
            if act == "s":
                self.send(client)
            elif act == "w":
                self.work(client, 0.2)
            elif act == "h":
                self.hear(client)
            else:
                self.hang_up(client)
            self.now += rng.choice((0.0, 0.0, 0.3))
            assert self.settled() <= self.worked, "a record is settled that nobody worked on"
        for _ in range(60 + 12 * self.records):  # nobody fails or leaves from now on
            self.now += 0.1
            for client in self.clients:
                self.send(client)
                self.work(client, 0.0)
                self.hear(client)
        left = self.keys.keys() - self.settled()
        assert left == {o for client in self.clients for o in client.opened}, "a record is lost"
        late = sum(client.batch - 1 + client.sent.passed for client in self.clients)
        assert len(left) <= late, "a client stalls"


def play_all(first: int = 0, count: int = 300) -> None:
    for seed in range(first, first + count):
        World(seed).play()


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 10))]
)
def test_clients_of_one_group_settle_only_what_was_worked_on(part: int) -> None:
    play_all(300 * part)


def test_an_ack_leaves_higher_offsets_that_were_sent_before_it() -> None:
    sent = Sent(WINDOW)
    late, frame = (Frame(Lease(offset, 1, 0.0, "broker")) for offset in (5, 3))
    sent.add(late)
    sent.add(frame)
    assert sent.upto(frame) == [frame]
    sent.speak(frame)
    assert sent.passed == 2, "the client has read past both"


def test_a_nack_brings_back_what_the_ack_of_another_frame_covered() -> None:
    sent = Sent(WINDOW)
    first, second = (Frame(Lease(offset, 1, 0.0, "broker")) for offset in (1, 2))
    sent.add(first)
    sent.add(second)
    assert sent.upto(second) == [first, second]
    assert sent.uncover("t/0", 1) is first
    assert sent.uncover("t/0", 2) is None, "an ack of its own is final"


COVERS = test_a_nack_brings_back_what_the_ack_of_another_frame_covered
LEAVES = test_an_ack_leaves_higher_offsets_that_were_sent_before_it
MUTANTS: dict[str, tuple[Mutant, Callable[[], None]]] = {
    "an ack covers whatever was sent": (
        Mutant(Sent, "upto", "if number >= frame.number:", "if False:"),
        play_all,
    ),
    "an ack covers higher offsets": (
        Mutant(Sent, "upto", "other.offset < frame.offset and ", ""),
        LEAVES,
    ),
    "an ack covers nothing": (
        Mutant(Sent, "upto", "return [*found, frame]", "return [frame]"),
        play_all,
    ),
    "what was covered is forgotten": (
        Mutant(Sent, "upto", "self._covered[other.place, other.offset] = other", "pass"),
        COVERS,
    ),
    "frames that were read past fill the window": (
        Mutant(Sent, "speak", "self.passed += ", "_ = "),
        play_all,
    ),
    "every open frame counts when a client hangs up": (
        Mutant(Sent, "begun", "if number <= reach", ""),
        play_all,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_about_acks_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant, check = MUTANTS[name]
    mutant.plant(monkeypatch)
    with pytest.raises(AssertionError):
        check()
