"""A tour of the bus in a few seconds: publish, deliver to two groups, fail, retry, dead letter,
redrive, kill a consumer, and a look at the files. The folder stays.

    python examples/tour.py [--url file:some-folder]
"""

import argparse
import asyncio
import logging
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path

import trunkline
from trunkline import Bus, Delivery, Event, GroupOptions

# Impatient, so that the tour is short. The defaults are 5 retries from 0.5 s on.
POLICY = GroupOptions(max_retries=3, backoff_base_s=0.1, backoff_max_s=0.4)
READINGS = 2000
STOCK = {"tea": 5, "cup": 5}
ORDERS = [
    {"order": 1, "item": "tea", "price": 4},
    {"order": 2, "item": "cup", "price": 7},
    {"order": 3, "item": "pot", "price": 19},
    {"order": 4, "item": "tea", "price": 4},
    {"order": 5, "item": "cup", "price": -7},
    {"order": 6, "item": "tea", "price": 4},
]


def say(text: str) -> None:
    print(text, flush=True)


def title(text: str) -> None:
    say(f"\n{text}\n{'-' * len(text)}")


def table(names: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """A table by rich where it is installed, plain columns where it is not."""
    lines = [[str(cell) for cell in row] for row in (names, *rows)]
    try:
        from rich.box import SIMPLE
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            say("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
        return
    drawn = Table(*lines[0], box=SIMPLE)
    for line in lines[1:]:
        drawn.add_row(*line)
    Console().print(drawn, end="")


class Shop:
    """Two groups on one topic. Each gets every order; what one does is nothing to the other."""

    def __init__(self, bus: Bus) -> None:
        self.history: list[tuple[str, int, int, str]] = []
        bus.on("orders", group="warehouse", workers=2, policy=POLICY)(self.pack)
        bus.on("orders", group="billing", workers=2, policy=POLICY)(self.bill)

    def note(self, delivery: Delivery, what: str) -> None:
        place = (delivery.group, delivery.offset, delivery.attempt)
        self.history.append((*place, what))
        say(f"  {place[0]:9} offset {place[1]} attempt {place[2]}: {what}")

    async def pack(self, event: Event, delivery: Delivery) -> None:
        item = event.payload["item"]
        if item not in STOCK:
            self.note(delivery, f"fails, there is no {item}")
            raise LookupError(f"there is no {item}")
        STOCK[item] -= 1
        self.note(delivery, f"packed {item}")

    async def bill(self, event: Event, delivery: Delivery) -> None:
        if event.payload["price"] < 0:
            self.note(delivery, "rejected, trying again cannot help")
            raise trunkline.Reject("a negative price")
        if event.payload["order"] == 2 and delivery.attempt == 1:
            self.note(delivery, "asks for a retry, the bank is away")
            raise trunkline.Retry(reason="the bank is away")
        self.note(delivery, f"billed {event.payload['price']}")


async def publish(bus: Bus) -> None:
    title("1. Publish: a receipt means that the event is on disk")
    started = time.perf_counter()
    first = await bus.publish("orders", ORDERS[0], key="c1")
    took_ms = (time.perf_counter() - started) * 1000
    say(f"one event: offset {first.offset}, durability {first.durability}, {took_ms:.1f} ms")
    others = await bus.publish_many("orders", ORDERS[1:])
    say(f"a batch, all or nothing: offsets {others[0].offset} to {others[-1].offset}")
    started = time.perf_counter()
    await asyncio.gather(
        *(bus.publish("readings", {"sensor": n}, type="reading") for n in range(READINGS))
    )
    rate = READINGS / (time.perf_counter() - started)
    say(f"{READINGS} publishers at once share their syncs: {rate:,.0f} durable events a second")


async def letters(bus: Bus) -> None:
    rows = [
        (x.offset, x.group, x.origin, x.attempts, x.reason, x.error)
        async for x in bus.dead_letters("orders").letters()
    ]
    table(("letter", "group", "offset", "attempts", "reason", "error"), rows)


async def redrive(bus: Bus) -> None:
    title("4. The pots arrive: give the order back to the warehouse, and to nobody else")
    STOCK["pot"] = 2
    desk = bus.dead_letters("orders")
    async for done in desk.redrive(group="warehouse"):
        say(f"redrive letter {done.letter.offset}: offset {done.letter.origin} of orders")
    await bus.drain(timeout_s=10)
    async for letter in desk.drop(group="billing"):
        say(f"drop letter {letter.offset}: nobody pays {letter.event.payload['price']}")
    say(f"letters left open: {len([letter async for letter in desk.letters()])}")


def hold(url: str, told: Connection) -> None:
    """Another process: takes records of the group ``charts``, and never settles them."""
    with trunkline.open(url) as bus:
        taken = []
        for delivery in bus.subscribe("readings", group="charts", max_inflight=50, timeout_s=30):
            taken.append(delivery.offset)
            if len(taken) == 50:
                told.send(taken)


async def kill(bus: Bus, url: str) -> None:
    title("5. A process holds 50 records and is killed with -9: the next process gets them")
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=hold, args=(url, there), daemon=True)
    process.start()
    taken = set(await asyncio.to_thread(here.recv))
    say(f"process {process.pid} holds offsets {min(taken)} to {max(taken)} of readings")
    process.kill()
    await asyncio.to_thread(process.join)
    killed = time.perf_counter()
    async with bus.subscribe("readings", group="charts") as deliveries:
        async for delivery in deliveries:
            await delivery.ack()
            taken.discard(delivery.offset)
            if not taken:
                break
    took_ms = (time.perf_counter() - killed) * 1000
    say(f"killed: all were delivered again within {took_ms:.0f} ms")


def totals(shop: Shop) -> None:
    title("6. What happened to the orders")
    counts = Counter((group, what.split()[0].rstrip(",")) for group, _, _, what in shop.history)
    table(("group", "outcome", "times"), [(*key, n) for key, n in sorted(counts.items())])


FILES = (
    ("wal/*.jsonl", "a line for each event"),
    ("dlq/*.jsonl", "the dead letters"),
    ("offsets/*.json", "where each group stands"),
)


def folder(url: str) -> None:
    root = Path(url.removeprefix("file:"))
    title(f"7. All of it is plain files in {os.path.relpath(root)}")
    table(
        ("file", "bytes", "holds"),
        [
            (path.relative_to(root), f"{path.stat().st_size:,}", about)
            for pattern, about in FILES
            for path in sorted(root.glob(pattern))
            if not path.name.startswith("system.")
        ],
    )
    log = root / "wal" / "orders.00000001.jsonl"
    say(f"the first line of {log.name}:\n{log.read_text().splitlines()[0]}")


async def tour(url: str) -> None:
    async with trunkline.connect(url, audit=1.0) as bus:  # so that Spark can tell the latency
        await publish(bus)
        title("2. Two groups, each with its own place in the log")
        say("There are no pots and one price is wrong: these two orders fail on purpose.")
        shop = Shop(bus)
        await bus.drain(timeout_s=20)
        title("3. Dead letters: what no retry could help, in the topic orders.DLQ")
        await letters(bus)
        await redrive(bus)
        if url.startswith("file:"):
            await kill(bus, url)
        health = await bus.health()
    totals(shop)
    say(f"health: {'ok' if health['ok'] else health}")
    if url.startswith("file:"):
        folder(url)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="file:.tour/bus", help="the bus; file:.tour/bus")
    url = parser.parse_args().url
    logging.basicConfig(level=logging.ERROR)  # the failures are part of the tour
    started = time.perf_counter()
    asyncio.run(tour(url))
    say(f"\nThe tour took {time.perf_counter() - started:.1f} s.")


if __name__ == "__main__":
    main()
