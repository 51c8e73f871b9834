"""What every line of the benchmark shares: the registry, the measuring loops, the events.

A line is one decorated coroutine that returns two numbers, ours and theirs; the goal is a bound on
their quotient. Rates are taken in short alternating turns, and the round with the median quotient
counts, so that a busy moment of the machine meets both sides; for latencies under traffic see
``pace``. Rounds in which the host of a virtual machine gave its cores to others are taken anew, for
both sides.
"""

from __future__ import annotations

import asyncio
import operator
import os
import random
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import msgspec

TOPIC = "orders"
EVENT_BYTES = 400
_COMPARE = {">=": operator.ge, "<=": operator.le}
_QUIET = 0.02
T = TypeVar("T")


class Pair(NamedTuple):
    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs if self.theirs else 0.0


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table and one object of ``results/latest.json``."""

    name: str
    ours: float
    against: str
    theirs: float
    unit: str
    ratio: float
    goal: str
    met: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    name: str
    against: str
    unit: str
    goal: str
    measure: Callable[[Run], Awaitable[Pair]]

    def judge(self, pair: Pair) -> Result:
        word, bound = self.goal.split()
        return Result(
            name=self.name,
            ours=_rounded(pair.ours),
            against=self.against,
            theirs=_rounded(pair.theirs),
            unit=self.unit,
            ratio=_rounded(pair.ratio),
            goal=self.goal,
            met=bool(_COMPARE[word](pair.ratio, float(bound))),
        )


def _rounded(value: float) -> float:
    return round(value, 1) if value >= 1000 else float(f"{value:.4g}")


LINES: dict[str, Line] = {}


def line(
    name: str, *, against: str, unit: str, goal: str
) -> Callable[[Callable[[Run], Awaitable[Pair]]], Callable[[Run], Awaitable[Pair]]]:
    """Add a line to the table. ``goal`` bounds ours / theirs: ``">= 0.40"`` or ``"<= 3"``."""

    def add(measure: Callable[[Run], Awaitable[Pair]]) -> Callable[[Run], Awaitable[Pair]]:
        if name in LINES:
            raise ValueError(f"two lines are named {name}")
        LINES[name] = Line(name=name, against=against, unit=unit, goal=goal, measure=measure)
        return measure

    return add


def lines_named(only: str | None) -> list[Line]:
    """The line of that name, else those whose name starts with it; all of them without a name."""
    if not only:
        return list(LINES.values())
    if only in LINES:
        return [LINES[only]]
    return [line for name, line in LINES.items() if name.startswith(only)]


class MissingPeerError(Exception):
    """A peer is not installed."""


@dataclass(slots=True)
class Run:
    """One run of the benchmark: where its files go, how long it measures, what lines share."""

    folder: Path
    quick: bool = False
    _made: dict[str, Path] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return 0.2 if self.quick else 0.8

    @property
    def rounds(self) -> int:
        return 1 if self.quick else 9

    def count(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def fresh(self) -> Path:
        """A new empty folder of this run's own."""
        return Path(tempfile.mkdtemp(dir=self.folder))

    async def once(self, name: str, build: Callable[[Path], Awaitable[None]]) -> Path:
        """A folder that several lines share, built by the first that asks for it."""
        if name not in self._made:
            folder = self.fresh()
            await build(folder)
            self._made[name] = folder
        return self._made[name]


class Steal:
    """The share of the cores that the host gave to other machines since it was last asked."""

    def __init__(self) -> None:
        self._before = self._counted()

    def share(self) -> float:
        before, self._before = self._before, self._counted()
        stolen, time = (now - then for now, then in zip(self._before, before, strict=True))
        return stolen / time if time else 0.0

    @staticmethod
    def _counted() -> tuple[int, int]:
        """In ticks of the kernel: what was stolen, and all."""
        with open("/proc/stat", encoding="ascii") as stat:
            ticks = [int(word) for word in stat.readline().split()[1:9]]
        return ticks[7], sum(ticks)


async def least_stolen(
    wanted: int, measure: Callable[[], Awaitable[T]], stolen: Callable[[], float] | None = None
) -> list[T]:
    """That many rounds with hardly any steal; of three times as many, those with the least of it.

    A round is all sides, one after another: none is chosen by what it measured.
    """
    found: list[tuple[float, T]] = []
    stolen = stolen or Steal().share
    while sum(share <= _QUIET for share, _ in found) < wanted and len(found) < 3 * wanted:
        result = await measure()
        found.append((stolen(), result))
    return [result for _, result in sorted(found, key=lambda pair: pair[0])[:wanted]]


async def alternate(
    run: Run, ours: Callable[[float], Awaitable[float]], theirs: Callable[[float], Awaitable[float]]
) -> Pair:
    """The rates of both sides in the middle round, measured in turns after one short turn of
    warming up.

    Each turn starts with clean page caches, so that no side pays for what the other left unwritten.
    """
    sides = [ours, theirs]
    for side in sides:
        await side(run.seconds / 4)

    async def both() -> Pair:
        rates = {}
        for side in sides:
            await asyncio.to_thread(os.sync)
            rates[side] = await side(run.seconds)
        sides.reverse()
        return Pair(rates[ours], rates[theirs])

    return middle(await least_stolen(run.rounds, both))


def middle(rounds: Sequence[Pair]) -> Pair:
    """The round with the median ratio: while a machine is slow, it is so for both of a round."""
    return sorted(rounds, key=lambda pair: pair.ratio)[len(rounds) // 2]


async def publish_rate(
    publish: Callable[[int], Awaitable[Any]], publishers: int, seconds: float
) -> float:
    """Acknowledged events per second of tasks that each await one event before the next."""
    started = perf_counter()
    end = started + seconds

    async def publisher(number: int) -> int:
        sent = 0
        while perf_counter() < end:
            await publish(number + sent)
            sent += 1
        return sent

    sent = await asyncio.gather(*(publisher(number * 97) for number in range(publishers)))
    return sum(sent) / (perf_counter() - started)


def percentile(samples: Sequence[float], fraction: float) -> float:
    ordered = sorted(samples)
    return ordered[min(int(len(ordered) * fraction), len(ordered) - 1)]


class SyncProbe:
    """The machine's own price of durability: append one event's bytes and ``fdatasync``, alone."""

    def __init__(self, folder: Path) -> None:
        self.samples: list[float] = []
        self._data = b"." * (EVENT_BYTES + 30)
        self._fd = os.open(folder / "probe", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)

    def burst(self, count: int) -> None:
        fd, data = self._fd, self._data
        for _ in range(count):
            started = perf_counter()
            os.write(fd, data)
            os.fdatasync(fd)
            self.samples.append(perf_counter() - started)

    def p(self, fraction: float) -> float:
        return percentile(self.samples, fraction)

    def close(self) -> None:
        os.close(self._fd)


def payloads(count: int = 1024) -> list[dict[str, Any]]:
    """Orders of one size: framed as a line of the log each takes about ``EVENT_BYTES``."""
    rng = random.Random(7)
    return [
        {
            "order": 100_000 + number,
            "customer": f"c{rng.randrange(10_000):04d}",
            "status": "placed",
            "total": rng.randrange(1000, 9999) / 100,
            "items": [{"sku": f"sku-{rng.randrange(100_000):05d}", "quantity": number % 7 + 1}],
            "note": f"{rng.getrandbits(256):064x}"[:64] * 2,
        }
        for number in range(count)
    ]


def resident_mb(pid: int | str = "self", *, peak: bool = False) -> float:
    """Resident memory of a process, now or at its highest."""
    word = "VmHWM:" if peak else "VmRSS:"
    for text in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if text.startswith(word):
            return int(text.split()[1]) / 1024
    raise ProcessLookupError(pid)


def forget_cached(folder: Path) -> None:
    """Ask the kernel to drop a folder's files from its cache, so that reads come from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
