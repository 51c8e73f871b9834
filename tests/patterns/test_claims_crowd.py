"""Twenty agents on overlapping globs, in two working trees, killed and stopped at random."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from files.harness import ENV
from trunkline.clock import SystemClock
from trunkline.patterns.claims import open_claims

from .test_claims import git

GLOBS = (
    *("src/**", "src/a.py", "**/a.py", "src/[a-c].*"),
    *("docs/*", "docs/x.md", "lib/{a,b}.py", "lib/b.py"),
)
PATHS = ("src/a.py", "src/b.py", "docs/x.md", "lib/a.py", "lib/b.py", "other/a.py")

# Each holder locks every path that it covers with the kernel's own lock, and writes its token and
# the end of its lease into the lock file: two live holders would meet there. A holder that is
# stopped keeps its lock when its lease is over. The next holder then reads a lease that has run
# out, and replaces the lock file. It counts as an overlap only if both leases are running: its own
# by the claims, the other one by the clock, since the claims never call two overlapping ones held.
AGENT = """
import fcntl, os, random, sys, time
from trunkline.errors import Conflict, Denied, NotFound
from trunkline.files.globs import covers, expand
from trunkline.patterns.claims import open_claims
url, actor, folder, seed, paths, globs = sys.argv[1:]
rng = random.Random(seed)

def lock(claims, claim, name):
    while True:
        claims.verify(claim.token)
        fd = os.open(name, os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            words = os.read(fd, 100).split()
            os.close(fd)
            claims.verify(claim.token)  # Denied: this agent itself was stopped past its lease
            if not words:  # the other one is about to write its token, or to unlock
                time.sleep(0.001)
            elif float(words[1]) > time.time():
                print("overlap", actor, name, claim.token, *map(bytes.decode, words), flush=True)
                return None
            else:
                print("stopped", actor, name, claim.token, *map(bytes.decode, words), flush=True)
                try:
                    os.unlink(name)
                except FileNotFoundError:
                    pass
            continue
        if os.fstat(fd).st_nlink == 0:  # replaced between opening and locking
            os.close(fd)
            continue
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d %f" % (claim.token, claim.expires_at.timestamp()), 0)
        return fd

def unlock(fd):
    os.ftruncate(fd, 0)
    os.close(fd)

with open_claims(url, actor) as claims:
    while True:
        pattern = rng.choice(globs.split())
        began = time.monotonic()
        try:
            claim = claims.claim(pattern, ttl_s=4, wait_s=30)
        except Conflict:
            print("timeout", actor, flush=True)
            continue
        waited = time.monotonic() - began
        locked = []
        try:
            for path in paths.split():
                if any(covers(one, path) for one in expand(pattern)):
                    locked.append(lock(claims, claim, os.path.join(folder, path.replace("/", "_"))))
            time.sleep(rng.uniform(0, 0.05))
            claims.verify(claim.token)
            print("grant", actor, f"{waited:.2f}", flush=True)
        except (Denied, NotFound):
            print("lost", actor, flush=True)
        finally:
            for fd in locked:
                if fd is not None:
                    unlock(fd)
        try:
            claims.release(token=claim.token)
        except Exception:
            pass
"""


@pytest.mark.parametrize(("left_s", "said"), [(-1, "stopped"), (600, "overlap")])
def test_a_lock_counts_while_the_lease_of_its_holder_runs(
    tmp_path: Path, left_s: float, said: str
) -> None:
    """What the crowd below is judged by: this process is the holder that an agent meets."""
    words = [f"file:{tmp_path / 'bus'}", "agent", str(tmp_path), "1", "a.py", "*.py"]
    with (tmp_path / "a.py").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        held.write(f"7 {SystemClock().now().timestamp() + left_s}")
        held.flush()
        with subprocess.Popen(
            [sys.executable, "-c", AGENT, *words], env=ENV, stdout=subprocess.PIPE, text=True
        ) as agent:
            assert agent.stdout is not None
            try:
                lines = [agent.stdout.readline().split() for _ in range(2)]
            finally:
                agent.kill()
    assert (lines[0][0], lines[0][4]) == (said, "7")
    assert lines[1][0] == "grant"  # it goes on, under a new lock if it has replaced the old one


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_twenty_agents_never_have_two_live_holders(tmp_path: Path) -> None:
    seconds = float(os.environ.get("CLAIMS_CROWD_S", "300"))
    main = tmp_path / "main"
    main.mkdir()
    git(main, "init", "-q")
    git(main, "commit", "--allow-empty", "-qm", "x")
    git(main, "worktree", "add", "-q", str(tmp_path / "tree"))
    locks = tmp_path / "locks"
    locks.mkdir()
    url = f"file:{main / '.git' / 'trunkline' / 'bus'}"
    rng = random.Random(7)
    out = (tmp_path / "out").open("ab")
    agents: dict[int, subprocess.Popen[bytes]] = {}
    number = 0

    def start(at: int) -> None:
        nonlocal number
        number += 1
        words = [sys.executable, "-c", AGENT, url, f"agent{number}", str(locks), str(number)]
        where = main if at % 2 else tmp_path / "tree"
        agents[at] = subprocess.Popen(
            [*words, " ".join(PATHS), " ".join(GLOBS)], env=ENV, cwd=where, stdout=out, stderr=out
        )

    for at in range(20):
        start(at)
    end = time.monotonic() + seconds
    kills = stops = 0
    try:
        while time.monotonic() < end:
            time.sleep(rng.uniform(0.2, 1.0))
            at = rng.randrange(20)
            if rng.random() < 0.5:
                agents[at].kill()
                agents[at].wait()
                kills += 1
                start(at)
            else:
                agents[at].send_signal(signal.SIGSTOP)
                time.sleep(rng.uniform(0.1, 6.0))
                agents[at].send_signal(signal.SIGCONT)
                stops += 1
            for each, agent in list(agents.items()):
                if agent.poll() is not None:
                    start(each)
    finally:
        for agent in agents.values():
            agent.send_signal(signal.SIGCONT)
            agent.kill()
            agent.wait()
        out.close()
    lines = (tmp_path / "out").read_text().splitlines()
    waits = [float(line.split()[2]) for line in lines if line.startswith("grant")]
    overlaps = [line for line in lines if line.startswith("overlap")]
    outlived = sum(line.startswith("stopped") for line in lines)
    print(f"{len(waits)} grants, {kills} kills, {stops} stops, longest wait {max(waits):.1f} s")
    print(f"{outlived} locks of holders that were stopped past their lease")
    assert overlaps == []
    assert not [line for line in lines if "Traceback" in line]
    assert len(waits) > seconds
    began = time.monotonic()
    with open_claims(url, "last") as last:  # everybody is dead: nobody is waited for much longer
        last.claim("**", wait_s=30)
    assert time.monotonic() - began < 15
