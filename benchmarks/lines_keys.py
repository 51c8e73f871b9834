"""Order by key beside no order, in a folder and through a broker: records that share a key must
wait for each other, and should wait for nothing else.
"""

from __future__ import annotations

import trunkline
from benchmarks.harness import TOPIC, Pair, Run, line, middle, payloads
from benchmarks.lines_broker import broker, client
from benchmarks.lines_deliver import work_off
from trunkline.bus import Bus

BATCH = 500
KEYS = 1000
ROUNDS = 5


async def _rate(bus: Bus, count: int, keys: int) -> float:
    """How fast a new group works off records of so many keys; 0: none has a key."""
    batch = payloads(BATCH)
    for start in range(0, count, BATCH):
        await bus.publish_many(
            TOPIC,
            [
                trunkline.Event(
                    topic=TOPIC,
                    payload=payload,
                    key=f"k{(start + number) % keys}" if keys else None,
                )
                for number, payload in enumerate(batch)
            ],
        )
    return await work_off(bus, count)


async def _local(run: Run, keys: int) -> float:
    async with trunkline.connect(f"file:{run.fresh()}") as bus:
        return await _rate(bus, run.count(20_000, 500), keys)


async def _remote(run: Run, keys: int) -> float:
    async with broker(run.fresh()) as url, client(url) as bus:
        return await _rate(bus, run.count(10_000, 500), keys)


@line("hot-key", against="no key", unit="events/s", goal=">= 0.35")
async def hot_key(run: Run) -> Pair:
    """A new group works off a log whose records all have one key."""
    return middle([Pair(await _local(run, 1), await _local(run, 0)) for _ in _rounds(run)])


@line("thousand-keys", against="no key", unit="events/s", goal=">= 0.6")
async def thousand_keys(run: Run) -> Pair:
    return middle([Pair(await _local(run, KEYS), await _local(run, 0)) for _ in _rounds(run)])


@line("ws-hot-key", against="no key", unit="events/s", goal=">= 0.35")
async def ws_hot_key(run: Run) -> Pair:
    """The same through a broker, by a client that acknowledges each record."""
    return middle([Pair(await _remote(run, 1), await _remote(run, 0)) for _ in _rounds(run)])


@line("ws-thousand-keys", against="no key", unit="events/s", goal=">= 0.6")
async def ws_thousand_keys(run: Run) -> Pair:
    return middle([Pair(await _remote(run, KEYS), await _remote(run, 0)) for _ in _rounds(run)])


def _rounds(run: Run) -> range:
    return range(run.count(ROUNDS, 1))
