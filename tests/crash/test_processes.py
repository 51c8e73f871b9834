"""Many processes on one folder: who writes, who reads, who dies, who stops."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trunkline.log import upkeep
from trunkline.log.folder import Folder, GroupKey
from trunkline.options import StoreOptions

from .crowd import TOPIC

TESTS = str(Path(__file__).parents[1])
GROUPS = ("billing", "audit")
QUIET = StoreOptions(reserve_bytes=0)


def start(*words: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "crash.crowd", *map(str, words)],
        cwd=TESTS,
        stdout=subprocess.PIPE,
    )


class Member:
    """A consumer in a process of its own."""

    def __init__(self, folder: str, group: str) -> None:
        self.group = group
        self.process = start("consume", folder, group)
        assert self.process.stdout is not None
        self.name = self.process.stdout.readline().decode().strip()
        assert self.name


@contextlib.contextmanager
def members(folder: str) -> Iterator[list[Member]]:
    """Three members in each of two groups; they end when this does."""
    crowd = [Member(folder, group) for group in GROUPS for _ in range(3)]
    try:
        yield crowd
    finally:
        for member in crowd:
            member.process.terminate()
        for member in crowd:
            member.process.wait(30)
            member.process.stdout.close()  # type: ignore[union-attr]


class Journal:
    """Reads a group's journal as it grows, without taking any lock."""

    def __init__(self, folder: str, group: str) -> None:
        self._file = open(f"{folder}/offsets/{TOPIC}__{group}.journal", "rb")  # noqa: SIM115
        self._rest = b""
        self.settled: Counter[int] = Counter()
        self.leases: dict[int, str] = {}  # who holds what now
        self.workers: set[str] = set()

    def read(self) -> None:
        """Take in what is new."""
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        for line in lines:
            op = msgspec.json.decode(line)
            spans = op.get("offsets", ())
            offsets = [o for first, last in spans for o in range(first, last + 1)]
            match op.get("op"):
                case "leased":
                    self.leases |= dict.fromkeys(offsets, op["by"])
                    self.workers.add(op["by"])
                case "freed":
                    self.leases = {o: by for o, by in self.leases.items() if by != op["by"]}
                case "settled" | "returned" as kind:
                    for offset in offsets:
                        self.leases.pop(offset, None)
                    if kind == "settled":
                        self.settled.update(offsets)

    def close(self) -> None:
        self._file.close()


def wait_until(said: str, check: Any, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, f"after {timeout_s} s: {said}"
        time.sleep(0.005)


def kill_and_watch(victim: Member, journal: Journal) -> float:
    """Kill -9 a member that holds something; how long until all of it is leased again."""

    def holds() -> bool:
        journal.read()
        return victim.name in journal.leases.values()

    wait_until(f"{victim.name} holds nothing", holds, 30)
    victim.process.kill()
    killed = time.monotonic()
    victim.process.wait()
    journal.read()
    lost = {offset for offset, by in journal.leases.items() if by == victim.name}

    def is_again_in_hand() -> bool:
        journal.read()
        held = journal.leases
        return all(held.get(o, victim.name) != victim.name or journal.settled[o] for o in lost)

    wait_until(f"the leases of {victim.name} stay where they are", is_again_in_hand, 30)
    return time.monotonic() - killed


def crowd(folder: str, count: int, timeout_s: float) -> None:
    Folder(folder, QUIET).close()
    with members(folder) as consumers:
        journals = {group: Journal(folder, group) for group in GROUPS}
        publishers = [start("publish", folder, f"p{n}", count) for n in range(8)]
        half = 4 * count

        def is_half_done() -> bool:
            for journal in journals.values():
                journal.read()
            return all(len(journal.settled) >= half for journal in journals.values())

        wait_until("less than half is settled", is_half_done, timeout_s)
        slowest = 0.0
        dead = []
        for group in GROUPS:
            victim = next(member for member in consumers if member.group == group)
            dead.append(victim.name)
            slowest = max(slowest, kill_and_watch(victim, journals[group]))
        assert [publisher.wait(timeout_s) for publisher in publishers] == [0] * 8
        for publisher in publishers:
            publisher.stdout.close()  # type: ignore[union-attr]

        def is_done() -> bool:
            for journal in journals.values():
                journal.read()
            return all(len(journal.settled) == 8 * count for journal in journals.values())

        wait_until("not all is settled", is_done, timeout_s)
        for group, journal in journals.items():
            twice = {o: n for o, n in journal.settled.items() if n > 1}
            assert not twice, f"{group}: settled more than once: {twice}"
            alive = {m.name for m in consumers if m.group == group and m.name not in dead}
            idle = alive - journal.workers
            assert not idle, f"{group}: {idle} got no work"
            journal.close()
        print(f"8 x {count} events; leases of the dead in other hands after {slowest:.3f} s")
        assert slowest <= 1.0
    check_log(folder, count)


def check_log(folder: str, count: int) -> None:
    log = Folder(folder, QUIET)
    seen: Counter[tuple[str, int]] = Counter()
    offsets: list[int] = []
    while records := log.read(TOPIC, 0, len(offsets) + 1, 5000):
        offsets += [record.offset for record in records]
        seen.update((r.event.payload["by"], r.event.payload["n"]) for r in records)
    assert offsets == list(range(1, 8 * count + 1))
    assert seen == Counter((f"p{p}", n) for p in range(8) for n in range(count))
    assert not list(upkeep.verify(log, TOPIC, 0))
    for group in GROUPS:
        assert log.group(GroupKey(TOPIC, 0, group)).floor == 8 * count
    log.close()


@pytest.mark.timeout(120)
def test_eight_publish_while_two_groups_consume_and_two_members_die(tmp_path: Path) -> None:
    crowd(os.fspath(tmp_path / "bus"), 1000, 60)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_same_with_ten_thousand_each(tmp_path: Path) -> None:
    crowd(os.fspath(tmp_path / "bus"), 10_000, 300)
