"""What the guards cost: each beside plain publishing, and how quickly a signed log is checked.

Both sides publish through the same call to folders of their own, with 64 tasks that each await one
event before the next. The side with the tree signs everything within its turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from time import perf_counter
from typing import Any

import trunkline
from benchmarks.harness import TOPIC, Pair, Run, alternate, line, payloads, publish_rate
from trunkline.crypto.keyring import KeyRing, new_wrapping_key
from trunkline.crypto.note import Signer, Verifier
from trunkline.folder import Folder, upkeep
from trunkline.guard.notary import Notary, seal_folder
from trunkline.guard.tree import PartitionTree
from trunkline.guard.vault import Vault
from trunkline.options import StoreOptions

PUBLISHERS = 64
_PAYLOADS = payloads()


def _vault(folder: Path) -> Vault:
    key = folder / "wrapping.key"
    key.write_text(new_wrapping_key(), "ascii")
    return Vault(KeyRing(folder / "keys", f"file:{key}", create=True))


class Empty:
    """Middleware that does nothing."""

    async def publish(self, events: Any, call_next: Any) -> Any:
        return await call_next(events)


def _rate(bus: trunkline.Bus, end: Callable[[], Awaitable[Any]] | None = None) -> Any:
    async def rate(seconds: float) -> float:
        started = perf_counter()

        async def publish(number: int) -> None:
            await bus.publish(TOPIC, _PAYLOADS[number % len(_PAYLOADS)])

        found = await publish_rate(publish, PUBLISHERS, seconds)
        if end is None:
            return found
        count = found * seconds
        published = perf_counter()
        await end()
        return count / (seconds + perf_counter() - published) if published > started else 0.0

    return rate


@line("guard-sealed", against="plain publishing", unit="events/s", goal=">= 0.5")
async def guard_sealed(run: Run) -> Pair:
    """Every payload is a JWE."""
    vault = await asyncio.to_thread(_vault, run.fresh())
    async with (
        trunkline.connect(f"file:{run.fresh()}", middleware=[vault]) as sealed,
        trunkline.connect(f"file:{run.fresh()}") as plain,
    ):
        return await alternate(run, _rate(sealed), _rate(plain))


@line("guard-tree", against="plain publishing", unit="events/s", goal=">= 0.8")
async def guard_tree(run: Run) -> Pair:
    """Every event is salted, and at the end of each turn all of them are in a signed tree."""
    async with (
        trunkline.connect(f"file:{run.fresh()}") as signed,
        trunkline.connect(f"file:{run.fresh()}") as plain,
    ):
        notary = Notary(signed, Signer.new("example.com/bench"))
        signed.use(notary)
        return await alternate(run, _rate(signed, notary.seal), _rate(plain))


@line("guard-five-empty", against="plain publishing", unit="events/s", goal=">= 0.85")
async def guard_five_empty(run: Run) -> Pair:
    async with (
        trunkline.connect(f"file:{run.fresh()}", middleware=[Empty() for _ in range(5)]) as wrapped,
        trunkline.connect(f"file:{run.fresh()}") as plain,
    ):
        return await alternate(run, _rate(wrapped), _rate(plain))


@line("guard-verify", against="checksums alone", unit="records/s", goal=">= 0.25")
async def guard_verify(run: Run) -> Pair:
    """Check every record against the signed tree, beside every line against its checksum."""
    place, count = run.fresh(), run.count(100_000, 5_000)
    async with trunkline.connect(f"file:{place}") as bus:
        for start in range(0, count, 1000):
            events = [_PAYLOADS[(start + at) % len(_PAYLOADS)] for at in range(1000)]
            await bus.publish_many(TOPIC, events)
    signer = Signer.new("example.com/bench")
    verifier = Verifier(signer.public)

    def measure() -> Pair:
        with closing(Folder(str(place), StoreOptions(create=False))) as folder:
            seal_folder(folder, signer)
            started = perf_counter()
            assert not list(PartitionTree(folder, TOPIC).verify(verifier))
            between = perf_counter()
            assert not list(upkeep.verify(folder, TOPIC, 0))
            ended = perf_counter()
        return Pair(count / (between - started), count / (ended - between))

    return await asyncio.to_thread(measure)
