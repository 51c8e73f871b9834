"""Brokers and clients that are killed, stopped and ended, and what their histories show.

The long run takes as many seconds as ``TRUNKLINE_CHAOS_S`` says, 600 if nothing does;
``TRUNKLINE_CHAOS_SEED`` chooses its faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import pytest

from kit.history import (
    AFTER_ACK,
    DEAD,
    LOST,
    ORDER,
    UNSETTLED,
    UNWORKED,
    Accepted,
    History,
    Kept,
    Step,
    Violation,
    check,
    table,
)
from trunkline.bus.connect import connect
from trunkline.bus.remote import RemoteBus
from trunkline.errors import TrunklineError

from .chaos_client import KEYS
from .client import Process, start

TESTS = Path(__file__).parents[1]
STYLES = ("each", "tenth", "throw")
MEMBERS = 3
LONG_S = float(os.environ.get("TRUNKLINE_CHAOS_S", "600"))
DRAIN_S = 240.0


# -- the checker ---------------------------------------------------------------------------------


def step(what: str, at: float, offset: int, client: str = "a", **more: float) -> Step:
    return Step(
        what, at, client, "g", "t", offset, int(more.get("attempt", 1)), more.get("since", at)
    )


def good() -> History:
    """Two records of one key: the second fails once and is worked by another client. A third one
    is dead after two tries.
    """
    steps = [
        *(step("got", 1, 1), step("worked", 2, 1), step("settled", 3, 1)),
        *(step("got", 4, 2), step("got", 5, 2, "b", attempt=2)),
        *(step("worked", 6, 2, "b"), step("settled", 7, 2, "b")),
        *(step("got", 8, 3), step("got", 9, 3, "b", attempt=2)),
    ]
    names = {1: "one", 2: "two", 3: "poison"}
    return History(
        accepted=[Accepted("t", offset, name) for offset, name in names.items()],
        log={("t", offset): Kept(name, "k") for offset, name in names.items()},
        steps=steps,
        floors={("g", "t"): 3},
        letters={("g", "t", 3): 2},
        strict=frozenset({"g"}),
    )


def without(what: str, offset: int) -> list[Step]:
    return [one for one in good().steps if (one.what, one.offset) != (what, offset)]


PLANTED: dict[str, tuple[str, Callable[[History], History]]] = {
    "an accepted record is gone": (
        LOST,
        lambda h: h._replace(accepted=[*h.accepted, Accepted("t", 4, "four")]),
    ),
    "an offset has another record": (
        LOST,
        lambda h: h._replace(log={**h.log, ("t", 2): Kept("other", "k")}),
    ),
    "a group stands still": (UNSETTLED, lambda h: h._replace(floors={("g", "t"): 2})),
    "nobody worked on a settled record": (
        UNWORKED,
        lambda h: h._replace(steps=without("worked", 1)),
    ),
    "a record comes after a later one of its key": (
        ORDER,
        lambda h: h._replace(steps=[*without("settled", 1), step("got", 6, 1, "c", since=5.5)]),
    ),
    "a record comes first after a later one of its key": (
        ORDER,
        lambda h: h._replace(
            steps=[
                *(one for one in h.steps if one.offset != 1),
                *(step("got", 4.5, 1), step("worked", 4.6, 1)),
            ],
            strict=frozenset[str](),
        ),
    ),
    "a letter has more attempts than failures": (
        DEAD,
        lambda h: h._replace(letters={("g", "t", 3): 3}),
    ),
    "a letter of a record that was settled": (
        DEAD,
        lambda h: h._replace(letters={**h.letters, ("g", "t", 1): 1}),
    ),
    "a settled record comes again": (
        AFTER_ACK,
        lambda h: h._replace(steps=[*h.steps, step("got", 9, 2, "c", since=7.5)]),
    ),
}


def test_the_checker_finds_nothing_in_a_good_history() -> None:
    assert check(good()) == []


@pytest.mark.parametrize("fault", PLANTED)
def test_the_checker_finds_what_is_planted(fault: str) -> None:
    kind, plant = PLANTED[fault]
    found = check(plant(good()))
    assert {one.kind for one in found} == {kind}
    assert f"violations: {kind}" in table(good(), found)


def test_an_ack_that_a_kill_of_the_broker_took_back_is_counted_apart() -> None:
    steps = [*good().steps, step("got", 7.9, 2, "c", since=7.5)]
    cut = good()._replace(steps=steps, kills=(7.3,))
    assert check(cut) == []
    assert "taken back by a kill of the broker           1" in table(cut, [])
    assert [one.kind for one in check(cut._replace(kills=(6.5, 8.2)))] == [AFTER_ACK]


def test_a_client_that_was_killed_may_have_failed_unseen() -> None:
    letters = {("g", "t", 3): 3}
    unseen = good()._replace(letters=letters, ends=(("g", 8.5),))
    assert check(unseen) == []
    for ends in ((("other", 8.5),), (("g", 80.0),)):
        assert [one.kind for one in check(unseen._replace(ends=ends))] == [DEAD]
    nobody = unseen._replace(steps=without("got", 3))
    assert [one.kind for one in check(nobody)] == [DEAD]


def test_a_frame_that_may_have_been_sent_before_is_no_fault() -> None:
    stale = step("got", 20, 1, "stopped", since=0.5)
    assert check(good()._replace(steps=[*good().steps, stale])) == []


def test_a_record_that_failed_may_follow_later_ones_where_the_group_is_not_strict() -> None:
    late = step("got", 9, 1, "c", attempt=2, since=8)
    steps = [*without("settled", 1), late]
    assert [one.kind for one in check(good()._replace(steps=steps))] == [ORDER]
    assert check(good()._replace(steps=steps, strict=frozenset())) == []


# -- the run -------------------------------------------------------------------------------------


class Chaos:
    """A broker, a publisher and three consumers of each style; each is a process that may end."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.rng = random.Random(seed)
        self.broker: Process
        self.port = 0
        self.clients: dict[str, asyncio.subprocess.Process] = {}
        self.names = [f"{style}-{n}" for style in STYLES for n in range(MEMBERS)]
        self.started = 0
        self.done: Counter[str] = Counter()
        self.kills: list[float] = []
        self.ends: list[tuple[str, float]] = []
        self.jobs: dict[str, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        self.broker = await start(self.folder / "bus", "--log-level", "error", port=self.port)
        self.port = self.broker.port

    async def begin(self, name: str) -> None:
        self.started += 1
        style, journal = name.partition("-")[0], self.folder / f"{name}.journal"
        self.clients[name] = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "broker.chaos_client", style, str(self.port), str(journal)),
            f"{name}.{self.started}",
            cwd=TESTS,
        )

    async def run(self, seconds: float) -> None:
        await self.serve()
        try:
            for name in ("publish-0", *self.names):
                await self.begin(name)
            end = monotonic() + seconds
            while monotonic() < end:
                await asyncio.sleep(self.rng.uniform(0.2, 1.2))
                await self.harm()
            await asyncio.gather(*self.jobs.values())
            await self.finish()
        finally:
            for job in self.jobs.values():
                job.cancel()
            for process in (*self.clients.values(), self.broker.process):
                if process.returncode is None:
                    process.kill()
                    await process.wait()

    async def harm(self) -> None:
        """One fault; a client that is in the middle of one is left alone."""
        for name, process in self.clients.items():
            is_harmed = name in self.jobs and not self.jobs[name].done()
            assert is_harmed or process.returncode is None, f"{name} ended by itself"
        if self.rng.random() < 0.25:
            what = self.rng.choice(("kill", "end", "stop"))
            self.done[f"broker {what}"] += 1
            await self.harm_broker(what)
            return
        name = self.rng.choice([*self.names, *self.names, "publish-0"])
        if name in self.jobs and not self.jobs[name].done():
            return
        what = self.rng.choice(("kill", "end", "stop"))
        self.done[f"client {what}"] += 1
        self.jobs[name] = asyncio.ensure_future(self.harm_client(name, what))

    async def harm_broker(self, what: str) -> None:
        if what == "stop":
            self.broker.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(self.rng.choice((0.3, 1.0, 6.0)))
            self.broker.process.send_signal(signal.SIGCONT)
            return
        if what == "kill":
            self.broker.kill()
            self.kills.append(monotonic())
        else:
            self.broker.process.terminate()
        await asyncio.wait_for(self.broker.process.wait(), 60)
        await asyncio.sleep(self.rng.uniform(0, 0.5))
        await self.serve()

    async def harm_client(self, name: str, what: str) -> None:
        process = self.clients[name]
        self.ends.append((name.partition("-")[0], monotonic()))
        if what == "stop":
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(self.rng.choice((0.3, 2.0, 8.0)))
            process.send_signal(signal.SIGCONT)
            return
        process.kill() if what == "kill" else process.terminate()
        await asyncio.wait_for(process.wait(), 60)
        await asyncio.sleep(self.rng.uniform(0, 1.0))
        await self.begin(name)

    async def finish(self) -> None:
        """No more faults and publishes; wait until every group has settled everything."""
        self.clients["publish-0"].terminate()
        await self.clients["publish-0"].wait()
        end = monotonic() + DRAIN_S
        async with RemoteBus(self.broker.url) as bus:
            while monotonic() < end:
                with contextlib.suppress(TrunklineError, TimeoutError):
                    groups = [one for one in await bus.groups() if one.group in STYLES]
                    if not any(one.lag or one.leases or one.waiting for one in groups):
                        break
                await asyncio.sleep(0.5)
        for name in self.names:
            self.clients[name].terminate()
            await asyncio.wait_for(self.clients[name].wait(), 60)
        await self.broker.end(60)

    async def history(self) -> History:
        accepted, steps, errors = [], [], []
        for name in ("publish-0", *self.names):
            for line in (self.folder / f"{name}.journal").read_bytes().splitlines():
                what, *rest = json.loads(line)
                if what == "accepted":
                    accepted.append(Accepted(*rest))
                elif what == "error":
                    errors.append(rest)
                else:
                    steps.append(Step(what, *rest))
        if errors:
            print(f"{len(errors)} errors were answered, the first: {errors[0]}")
        log, floors, letters = {}, {}, {}
        async with connect(f"file:{self.folder / 'bus'}") as bus:
            for topic in KEYS:
                at = 1
                while found := await bus.read(topic, at, 1000):
                    for one in found:
                        log[topic, one.offset] = Kept(one.event.payload["name"], one.event.key)
                    at = found[-1].offset + 1
                async for letter in bus.dead_letters(topic).letters():
                    letters[letter.group, topic, letter.origin] = letter.attempts
            for group in await bus.groups():
                if group.group in STYLES:
                    floors[group.group, group.topic] = group.floor
        strict = frozenset({"each"})
        return History(
            *(accepted, log, steps, floors, letters, strict), tuple(self.kills), tuple(self.ends)
        )


async def unsettling(folder: Path, seconds: float, seed: int) -> tuple[History, list[Violation]]:
    chaos = Chaos(folder, seed)
    await chaos.run(seconds)
    history = await chaos.history()
    found = check(history)
    print(f"{seconds:.0f} s of chaos, seed {seed}: {dict(sorted(chaos.done.items()))}")
    print(table(history, found))
    for one in found[:20]:
        print(one)
    return history, found


@pytest.mark.slow
@pytest.mark.timeout(LONG_S + 2 * DRAIN_S)
async def test_kills_and_stops_break_no_promise(tmp_path: Path) -> None:
    history, found = await unsettling(
        tmp_path, LONG_S, seed=int(os.environ.get("TRUNKLINE_CHAOS_SEED", "7"))
    )
    assert found == []
    assert len(history.floors) == len(STYLES) * len(KEYS)
    assert len(history.accepted) > LONG_S
