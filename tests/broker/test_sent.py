"""What acks mean on the wire: random clients that work in order, with delays, nacks and batches."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from trunkline.broker.sent import Sent


@dataclass(eq=False)
class Paper:
    """A frame of a simulated connection."""

    place: str
    offset: int
    number: int = 0
    lane: str | None = None


@dataclass
class Client:
    """Works on frames in the order in which they came; acks every ``batch``-th."""

    batch: int
    inbox: list[Paper] = field(default_factory=list)
    worked: set[Paper] = field(default_factory=set)
    since: int = 0


def simulate(seed: int, records: int = 40) -> tuple[int, int]:
    """Play one history; how many frames were settled, and how many never were."""
    rng = random.Random(seed)
    client = Client(batch=rng.choice([1, 3, 10]))
    window = rng.choice([1, 5, 16, 32])
    window = max(window, client.batch)
    sent = Sent(window)
    places = [f"t/{n}" for n in range(rng.choice([1, 1, 3]))]
    waiting = [(rng.choice(places), n) for n in range(1, records + 1)]
    opened: dict[tuple[str, int], Paper] = {}
    said: list[tuple[str, str, int]] = []  # from the client, not read by the broker yet
    coming: list[Paper] = []  # from the broker, not read by the client yet
    settled: set[tuple[str, int]] = set()
    failing = {n for n in range(1, records + 1) if rng.random() < 0.15}
    for _ in range(records * 40):
        what = rng.random()
        room = window + min(sent.passed, window) - len(opened)
        if what < 0.35 and waiting and room > 0:
            place, offset = waiting.pop(0)
            frame = Paper(place, offset)
            sent.add(frame)
            opened[place, offset] = frame
            coming.append(frame)
        elif what < 0.6 and coming:
            frame = coming.pop(0)
            client.inbox.append(frame)
            if frame.offset in failing:
                failing.discard(frame.offset)
                said.append(("nack", frame.place, frame.offset))
            else:
                client.worked.add(frame)
                client.since += 1
                if client.since >= client.batch:
                    client.since = 0
                    for place in {one.place for one in client.inbox}:
                        mine = [f for f in client.inbox if f in client.worked and f.place == place]
                        if mine:
                            said.append(("ack", place, mine[-1].offset))
                    client.inbox = [f for f in client.inbox if f not in client.worked]
        elif said:
            kind, place, offset = said.pop(0)
            one = opened.get((place, offset))
            if kind == "nack":
                if one is None:
                    found = sent.uncover(place, offset)
                    if found is not None:
                        settled.discard((place, offset))
                        waiting.append((place, offset))
                    continue
                sent.speak(one)
                sent.remove(one)
                del opened[place, offset]
                waiting.append((place, offset))
            elif one is not None:
                chosen = sent.upto(one)
                sent.speak(one)
                for each in chosen:
                    assert isinstance(each, Paper)
                    assert each in client.worked, "a record is settled that nobody worked on"
                    sent.remove(each)
                    del opened[each.place, each.offset]
                    settled.add((each.place, each.offset))
    assert not waiting, "a client that acks its last worked record does not stall"
    left = len(opened)
    assert left <= window + client.batch * len(places)
    return len(settled), left


@pytest.mark.parametrize(
    "part", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 12))]
)
def test_nothing_that_nobody_worked_on_is_settled_and_nothing_stalls(part: int) -> None:
    for seed in range(part * 1000, (part + 1) * 1000):
        simulate(seed)


def test_an_ack_covers_only_frames_that_were_sent_before_its_own() -> None:
    sent = Sent(10)
    first, third, second = (Paper("t", offset) for offset in (1, 3, 2))
    for frame in (first, third, second):
        sent.add(frame)
    assert sent.upto(third) == [first, third]
    assert sent.uncover("t", 1) is first
    assert sent.uncover("t", 1) is None
    assert sent.uncover("t", 3) is None, "an ACK of its own is final"


def test_a_client_that_acks_every_third_frame_may_have_begun_three() -> None:
    sent = Sent(10)
    frames = [Paper("t", offset) for offset in range(1, 10)]
    for frame in frames:
        sent.add(frame)
    assert sent.begun() == {1}
    for done in sent.upto(frames[2]):
        sent.remove(done)
    sent.speak(frames[2])
    assert sent.begun() == {4, 5, 6}
