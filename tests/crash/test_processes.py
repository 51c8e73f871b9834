"""Many processes on one folder: who writes, who reads, who dies, who stops."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trunkline.errors import Closed, LockTimeout
from trunkline.folder import Folder, upkeep
from trunkline.names import GroupKey
from trunkline.options import StoreOptions, TopicOptions

from .crowd import TOPIC
from .promises import append, records_of, values

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


@pytest.mark.timeout(200)
def test_eight_publish_while_two_groups_consume_and_two_members_die(tmp_path: Path) -> None:
    crowd(os.fspath(tmp_path / "bus"), 2000, 90)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_same_with_ten_thousand_each(tmp_path: Path) -> None:
    crowd(os.fspath(tmp_path / "bus"), 10_000, 300)


def in_child(action: Callable[[], str]) -> str:
    """What ``action`` says in a forked child."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, action().encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(pid, 0)
    return said


def test_a_folder_is_not_used_across_a_fork(tmp_path: Path) -> None:
    folder = Folder(os.fspath(tmp_path), QUIET)
    append(folder, TOPIC, [1])
    folder.join()

    def use() -> str:
        said = []
        for action in (
            lambda: append(folder, TOPIC, [2]),
            lambda: folder.step(GroupKey(TOPIC, 0, "g"), lambda group: group),
            lambda: folder.fresh_reader(TOPIC, 0) and folder.writer(TOPIC, 0),
        ):
            try:
                action()
            except Closed:
                said.append("closed")
        folder.close()
        return " ".join(said)

    assert in_child(use) == "closed closed closed"
    assert folder.is_alive(folder.member), "the child took its parent's place"
    assert append(folder, TOPIC, [2]) == {2: 2}
    folder.close()


def test_a_forked_child_does_not_keep_the_locks_of_a_dead_parent(tmp_path: Path) -> None:
    root = os.fspath(tmp_path)
    program = (
        "import os, sys, time\n"
        "from trunkline.folder import Folder\n"
        "from crash.promises import append\n"
        "folder = Folder(sys.argv[1])\n"
        "append(folder, 't', [1])\n"
        "folder.writer('t', 0).begin()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    time.sleep(60)\n"
        "print(pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, root], cwd=TESTS, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    folder = Folder(root, StoreOptions(reserve_bytes=0, lock_timeout_s=5.0))
    try:
        parent.kill()
        parent.wait()
        started = time.monotonic()
        assert append(folder, TOPIC, [2]) == {2: 2}
        assert time.monotonic() - started < 1.0
    finally:
        os.kill(child, signal.SIGKILL)
        parent.stdout.close()
        folder.close()


@pytest.mark.parametrize("what", ["partition", "group"])
def test_a_holder_that_was_stopped_gives_others_a_timeout(what: str, tmp_path: Path) -> None:
    root = os.fspath(tmp_path)
    program = (
        "import sys, time\n"
        "from trunkline.folder import Folder\n"
        "from trunkline.names import GroupKey\n"
        "from trunkline.options import GroupOptions\n"
        "from crash.promises import append\n"
        "folder = Folder(sys.argv[1])\n"
        "append(folder, 't', [1])\n"
        "def hold(group=None):\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.readline()\n"
        "def define(group):\n"
        "    group.define(GroupOptions(), 0)\n"
        "    hold()\n"
        "if sys.argv[2] == 'group':\n"
        "    folder.step(GroupKey('t', 0, 'g'), define)\n"
        "else:\n"
        "    folder.writer('t', 0).begin()\n"
        "    hold()\n"
        "    folder.writer('t', 0).end()\n"
        "append(folder, 't', [2])\n"
        "folder.close()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, root, what],
        cwd=TESTS,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    holder.send_signal(signal.SIGSTOP)
    folder = Folder(root, StoreOptions(reserve_bytes=0, lock_timeout_s=0.2))
    key = GroupKey(TOPIC, 0, "g")
    use: Callable[[], object] = (
        (lambda: folder.step(key, lambda group: group))
        if what == "group"
        else (lambda: append(folder, TOPIC, [9]))
    )
    with pytest.raises(LockTimeout) as caught:
        use()
    assert caught.value.hint
    holder.send_signal(signal.SIGCONT)
    holder.communicate(b"\n", timeout=30)
    assert holder.returncode == 0
    assert append(folder, TOPIC, [3]) == {3: 3}
    folder.step(key, lambda group: group)
    folder.close()


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_one_key_from_many_processes_with_kills(tmp_path: Path) -> None:
    check_one_key(os.fspath(tmp_path), 8, 200)


@pytest.mark.timeout(60)
def test_one_key_from_many_processes(tmp_path: Path) -> None:
    check_one_key(os.fspath(tmp_path), 4, 40)


def check_one_key(root: str, processes: int, tries: int) -> None:
    """The same idempotency keys from everywhere, some of the publishers killed: one record each."""
    folder = Folder(root, QUIET)
    folder.define(TOPIC, TopicOptions(dedup_window_s=600.0, segment_records=7))
    program = (
        "import sys\n"
        "from trunkline.folder import Folder\n"
        "from crash.promises import append\n"
        "folder = Folder(sys.argv[1])\n"
        "for number in range(1, int(sys.argv[2]) + 1):\n"
        "    append(folder, 't', [number], idem_key=f'k{number}')\n"
    )
    crowd = [
        subprocess.Popen([sys.executable, "-c", program, root, str(tries)], cwd=TESTS)
        for _ in range(processes)
    ]
    wait_until("nothing was published", lambda: folder.bounds(TOPIC, 0).next > tries // 2, 30)
    for process in crowd[1::2]:
        process.kill()
    assert crowd[0].wait(60) == 0
    for process in crowd:
        process.wait(60)
    seen = values(records_of(folder, TOPIC))
    assert sorted(seen.values()) == list(range(1, tries + 1))
    folder.close()
