"""Spark over a day of a shop: the day is lived through by a real bus under a clock of its own, then
the pipelines make their tables of it, and the report draws them. Everything stays in the folder.

    python examples/spark_day.py [--folder .tour] [--events 20000]

The day has what real days have: a rush at noon, a bank that is away for an hour, events that
come twice, late or in the wrong shape, a group that stopped, a sensor that fell silent.
"""

import argparse
import asyncio
import logging
import math
import random
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import trunkline
from trunkline import Event, GroupOptions
from trunkline.bus import Bus
from trunkline.cli import main as command
from trunkline.clock import SystemClock
from trunkline.patterns.schemas import Registry
from trunkline.spark import session

STEP_S = 600
STEPS = 24 * 3600 // STEP_S
POLICY = GroupOptions(max_retries=0)  # a failure is a dead letter at once
ORDER = {
    "type": "object",
    "properties": {
        "order": {"type": "integer"},
        "item": {"type": "string"},
        "total": {"type": "number", "minimum": 0},
    },
    "required": ["order", "item", "total"],
}
ITEMS = ("tea", "cup", "pot", "tray")
SENSORS = tuple(f"room-{number}" for number in range(1, 9))
AGENTS = ("ada", "grace", "alan")
# How sure an agent is of an action, and how often the action really ends well.
ACTIONS = {"mail": (0.9, 0.86), "call": (0.7, 0.75), "discount": (0.8, 0.45), "wait": (0.4, 0.3)}


class DayClock(SystemClock):
    """Its wall is set to where the day is. Deadlines and pauses take real time."""

    def __init__(self, start: datetime) -> None:
        super().__init__()
        self._wall = start
        self._extra_s = 0.0

    @property
    def boot(self) -> str:
        return "a day"  # its monotonic time means nothing to other processes

    def now(self) -> datetime:
        return self._wall

    def monotonic(self) -> float:
        return super().monotonic() + self._extra_s

    def reach(self, wall: datetime) -> None:
        self._wall = max(self._wall, wall)

    def spend(self, seconds: float) -> None:
        """Work took so long."""
        self._wall += timedelta(seconds=seconds)
        self._extra_s += seconds


class Day:
    """The events of 24 hours, step by step."""

    def __init__(self, start: datetime, events: int) -> None:
        self.start = start
        self.random = random.Random(7)
        self.per_step = events / STEPS
        self._orders = 0

    def rush(self, at: datetime) -> float:
        """How busy the shop is: 1 on average, quiet at night, most at noon and in the evening."""
        hour = at.hour + at.minute / 60
        noon, evening = (math.exp(-(((hour - peak) / 2.2) ** 2)) for peak in (12.5, 19))
        return 0.25 + 2.1 * noon + 1.6 * evening

    def step(self, number: int) -> dict[str, list[Event]]:
        """The events of one step, by topic."""
        at = self.start + timedelta(seconds=number * STEP_S)
        found: dict[str, list[Event]] = {}
        wanted = self.per_step * self.rush(at) * 0.8
        count = int(wanted) + (self.random.random() < wanted % 1)
        while count > 0:
            for event in self._visit(at):
                found.setdefault(event.topic, []).append(event)
                count -= 1
        for event in (*self._sensors(at, number), *self._agents(at, number)):
            found.setdefault(event.topic, []).append(event)
        return {topic: sorted(events, key=lambda one: one.ts) for topic, events in found.items()}

    def _visit(self, at: datetime) -> Iterator[Event]:
        """A customer looks around, and may buy. Some visits are told hours later."""
        dice = self.random
        who = f"customer-{int(dice.triangular(1, 300, 20))}"
        bought = at + timedelta(seconds=STEP_S / 2 + dice.uniform(0, 1))
        late = timedelta(hours=2) if dice.random() < 0.01 else timedelta(0)
        seen = sorted(dice.uniform(3, STEP_S / 2) for _ in range(dice.randint(1, 4)))
        for ago_s in reversed(seen):
            page = {"page": dice.choice(("/", "/tea", "/cups", "/sale"))}
            then = bought - timedelta(seconds=ago_s) - late
            yield Event(topic="shop.visits", type="seen", actor=who, key=who, payload=page, ts=then)
        if dice.random() < 0.45:
            self._orders += 1
            yield from self._order(who, bought)

    def _order(self, who: str, now: datetime) -> Iterator[Event]:
        dice, number = self.random, self._orders
        payload: dict[str, Any] = {"order": number, "item": dice.choice(ITEMS)}
        payload["total"] = round(dice.lognormvariate(2.5, 0.6), 2)
        if number % 83 == 0:
            payload["total"] = "free"  # the schema says that it is a number
        facts: dict[str, Any] = {"topic": "shop.orders", "actor": who, "key": who}
        facts["payload"] = payload
        for _ in range(2 if number % 61 == 0 else 1):  # some are published twice
            yield Event(type="placed", ts=now, idem_key=f"order-{number}", **facts)
        if number % 97 == 0:
            yield Event(type=None, ts=now, **facts)
        if dice.random() < 0.8:
            paid = now + timedelta(seconds=dice.uniform(0.2, 1.5))
            yield Event(type="paid", ts=paid, **facts)
            if dice.random() < 0.9:
                yield Event(type="sent", ts=paid + timedelta(seconds=dice.uniform(0.2, 1)), **facts)

    def _sensors(self, at: datetime, number: int) -> Iterator[Event]:
        for index, sensor in enumerate(SENSORS):
            if sensor == SENSORS[2] and number > STEPS * 0.8:
                continue  # it fell silent
            warm = 19 + 3 * math.sin((at.hour - 6) / 24 * 2 * math.pi) + index / 4
            reading = {"celsius": round(warm + self.random.gauss(0, 0.2), 2)}
            then = at + timedelta(seconds=index)
            yield Event(topic="house.sensors", type="reading", key=sensor, payload=reading, ts=then)

    def _agents(self, at: datetime, number: int) -> Iterator[Event]:
        dice = self.random
        who = AGENTS[number % len(AGENTS)]
        action, (confidence, rate) = dice.choice(tuple(ACTIONS.items()))
        context = "day" if 7 <= at.hour < 20 else "night"
        decision: dict[str, Any] = {"action_id": f"a{number}", "action": action}
        decision["context"] = context
        decision["confidence"] = round(min(0.99, max(0.01, dice.gauss(confidence, 0.08))), 2)
        yield Event(
            topic="agent.actions", type="ACTION_DECISION", actor=who, payload=decision, ts=at
        )
        ok = dice.random() < rate
        then = at + timedelta(seconds=dice.uniform(10, 250))
        done = {"action_id": f"a{number}", "ok": ok, "reward": float(ok)}
        yield Event(topic="agent.actions", type="ACTION_EXECUTED", actor=who, payload=done, ts=then)
        if number % 3 == 0:
            file = f"shop/page-{dice.randint(1, 6)}.html"
            facts: dict[str, Any] = {"subject": file, "payload": {}}
            other = AGENTS[(number // 3) % len(AGENTS)]
            yield Event(topic="coord.claim", type="claim", actor=other, ts=at, ttl_s=900, **facts)
            if number % 27:
                then = at + timedelta(seconds=dice.uniform(20, 280))
                yield Event(topic="coord.release", type="release", actor=other, ts=then, **facts)


class Shop:
    """The groups that handle the orders. What a handler does takes time of the day."""

    def __init__(self, bus: Bus, clock: DayClock, dice: random.Random) -> None:
        self._clock = clock
        self._dice = dice
        bus.on("shop.orders", group="billing", policy=POLICY)(self.bill)
        bus.on("shop.orders", group="shipping", policy=POLICY)(self.ship)

    async def bill(self, event: Event) -> None:
        self._clock.spend(self._dice.expovariate(1 / 0.03))
        if event.payload["total"] == "free":
            raise trunkline.Reject("TypeError: the total is 'free'")
        if self._clock.now().hour == 14 and event.payload["order"] % 3 == 0:
            waited_s = self._dice.uniform(1, 3)
            self._clock.spend(waited_s)
            raise TimeoutError(f"the bank did not answer within {waited_s:.1f} s")
        if event.payload["order"] % 251 == 0:
            raise KeyError(f"{event.key} has no account")

    async def ship(self, _: Event) -> None:
        self._clock.spend(self._dice.expovariate(1 / 0.01))


async def live(url: str, day: Day) -> int:
    """Live through the day. Returns how many events there were."""
    clock, count = DayClock(day.start), 0
    bus = trunkline.connect(url, clock=clock, audit=0.5)
    analytics = trunkline.connect(url, clock=clock)

    @analytics.on("shop.orders", group="analytics")
    async def count_order(event: Event) -> None:
        pass

    async with bus:
        await Registry(bus).add("shop.orders", ORDER)
        Shop(bus, clock, random.Random(11))
        await analytics.start()
        for number in range(STEPS):
            for topic, events in day.step(number).items():
                clock.reach(events[-1].ts)
                await bus.publish_many(topic, events)
                count += len(events)
                if topic == "shop.orders":
                    await bus.drain(timeout_s=30)
            if number == STEPS * 2 // 3:
                await analytics.drain(timeout_s=30)
                await analytics.close()  # nobody started it again
    return count


def generate(url: str, events: int) -> None:
    with trunkline.open(url) as bus:
        if "shop.orders" in bus.topics():
            print("The day is there from the last time.", flush=True)
            return
    started = time.perf_counter()
    now = datetime.now(UTC).replace(second=0, microsecond=0)
    count = asyncio.run(live(url, Day(now - timedelta(hours=24), events)))
    took = time.perf_counter() - started
    print(f"A shop lived through a day: {count:,} events, in {took:.0f} s.", flush=True)


def run(*words: str) -> int:
    """Run one of the commands as a person would."""
    print(f"\n$ trunkline {' '.join(words)}", flush=True)
    return command(list(words))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default=".tour", help="where everything is and stays; .tour")
    parser.add_argument("--events", type=int, default=20_000, help="about how many; 20000")
    args = parser.parse_args()
    logging.basicConfig(level=logging.CRITICAL)  # the failures are part of the day
    bus, lake, page = (f"{args.folder}/{name}" for name in ("bus", "lake", "report.html"))
    generate(f"file:{bus}", args.events)
    session("a day", quick=True)  # the commands use it: it is the better one for a day
    code = run("pipeline", "run", "--url", f"file:{bus}", "--lake", lake)
    code = run("pipeline", "report", "--lake", lake, "--out", page, "--rows", "3") or code
    print(f"\nThe log:    {bus}\nThe tables: {lake}\nThe report: {Path(page).resolve().as_uri()}")
    return code


if __name__ == "__main__":
    sys.exit(main())
