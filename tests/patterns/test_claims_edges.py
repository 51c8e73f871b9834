"""Claims where agents meet them first: killed waiters, worktrees, bridges, several paths."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from files.harness import ENV, TRUNKLINE, Run, runner
from trunkline.errors import Conflict, InvalidName
from trunkline.files.globs import expand
from trunkline.patterns.claims import WAIT_S, ClaimLedger, Claims, Process, open_claims

from .test_claims import HandClock, _nap, enter, git


@pytest.fixture
def cli(tmp_path: Path) -> Run:
    return runner(TRUNKLINE, tmp_path)


@pytest.fixture(params=["ndjson", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{request.param}:{tmp_path / 'place'}"


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that do not outlive the test."""
    found: list[subprocess.Popen[bytes]] = []
    yield found
    for process in found:
        if process.poll() is None:
            process.kill()
            process.wait()


def queue(url: str, actor: str, path: str) -> subprocess.Popen[bytes]:
    """A command that waits in the queue for a claim."""
    words = [*TRUNKLINE, "claim", path, "--wait", "60s", "--url", url, "--actor", actor]
    return subprocess.Popen(words, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def until_waiting(claims: Claims, actor: str) -> None:
    end = time.monotonic() + 20
    while (actor, "waiting") not in [(c.actor, state) for c, state in claims.table()]:
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_waiter_that_is_killed_never_becomes_the_holder(
    url: str, number: signal.Signals, started: list[subprocess.Popen[bytes]]
) -> None:
    with open_claims(url, "ann") as ann, open_claims(url, "cat") as cat:
        held = ann.claim("x.py")
        waiter = queue(url, "bob", "x.py")
        started.append(waiter)
        until_waiting(cat, "bob")
        waiter.send_signal(number)
        waiter.wait(20)
        ann.release(token=held.token)

        assert [c.actor for c, state in cat.table() if state == "held"] == []
        began = time.monotonic()
        got = cat.claim("x.py", wait_s=20)
        assert got.actor == "cat"
        assert time.monotonic() - began < 5  # its process is gone, which this machine sees


def test_the_ttl_begins_when_a_claim_is_granted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, url = HandClock(), f"ndjson:{tmp_path / 'log'}"
    ann, bob = open_claims(url, "ann", clock), open_claims(url, "bob", clock)
    ann.claim("a", ttl_s=1000)
    naps = iter(range(1000))

    def nap(_: float) -> None:
        clock.advance(1)
        if next(naps) == 30:
            ann.release("a")

    _nap(monkeypatch, nap)
    got = bob.claim("a", ttl_s=60, wait_s=None)
    assert got.expires_at is not None
    assert (got.expires_at - clock.now()).total_seconds() == 60


def test_a_claim_that_lost_a_race_waits_with_a_short_lease(tmp_path: Path) -> None:
    clock, url = HandClock(), f"ndjson:{tmp_path / 'log'}"
    ann, bob = open_claims(url, "ann", clock), open_claims(url, "bob", clock)
    bob.table()  # bob looks, ann claims, bob appends and dies
    ann.claim("a", ttl_s=1000)
    lost = enter(bob, "a", 1000)

    assert lost.waiting
    ann.release("a")
    assert [state for c, state in ann.table() if c.actor == "bob"] == ["waiting"]
    clock.advance(WAIT_S)
    assert open_claims(url, "cat", clock).claim("a").actor == "cat"


def test_several_paths_are_claimed_together_or_not_at_all(url: str) -> None:
    with open_claims(url, "ann") as ann, open_claims(url, "bob") as bob:
        ann.claim("b.py")
        with pytest.raises(Conflict, match=r"ann holds b\.py"):
            bob.claim("a.py", "b.py", "c.py")
        assert [c.actor for c, _ in bob.table()] == ["ann"]
        ann.release("b.py")
        got = bob.claim("a.py", "b.py", "c.py")
        assert got.paths == ("a.py", "b.py", "c.py")
        for path in got.paths:
            with pytest.raises(Conflict, match="bob holds"):
                ann.claim(path)
        assert ann.conflicts(["c.py", "d.py"]) == [("c.py", got)]


def test_braces_are_expanded_or_refused(url: str) -> None:
    assert expand("src/{a,b}/{c,d}.py") == [
        *("src/a/c.py", "src/a/d.py", "src/b/c.py", "src/b/d.py")
    ]
    for wrong in ("src/{a,b", "a}", "{a,{b,c}}", "{1,2,3,4}" * 4):
        with pytest.raises(InvalidName):
            expand(wrong)
    with open_claims(url, "ann") as ann, open_claims(url, "bob") as bob:
        ann.claim("src/{a,b}.py")
        with pytest.raises(Conflict):
            bob.claim("src/a.py")


def test_a_wait_that_would_never_end_is_refused_and_named(
    url: str, started: list[subprocess.Popen[bytes]]
) -> None:
    with open_claims(url, "ann") as ann, open_claims(url, "bob") as bob:
        ann.claim("a")
        bob.claim("b")
        started.append(queue(url, "ann", "b"))
        until_waiting(bob, "ann")
        with pytest.raises(Conflict, match="would never end: bob waits for a; ann waits for b"):
            bob.claim("a", wait_s=30)
        bob.release("b")
        assert started[0].wait(20) == 0


def test_a_holder_ends_with_the_process_it_names(url: str) -> None:
    process = subprocess.Popen(["sleep", "60"])
    with open_claims(url, "ann") as ann, open_claims(url, "bob") as bob:
        ann.claim("a", ttl_s=1000, process=Process.by_pid(process.pid))
        with pytest.raises(Conflict):
            bob.claim("a")
        process.kill()
        process.wait()
        assert bob.table() == []
        assert bob.claim("a").actor == "bob"


def test_a_process_elsewhere_counts_as_alive() -> None:
    mine = Process.by_pid(os.getpid())
    assert mine is not None
    assert not mine.is_gone()
    assert Process(mine.pid, "0", mine.where).is_gone()
    assert not Process(mine.pid, "0", "another machine").is_gone()
    assert Process.of(mine.to_json()) == mine
    assert Process.by_pid(2**22 + 1) is None


def test_claims_of_old_are_not_read_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_claims(url, "ann") as ann:
        keep = ann.claim("keep/**")
        for number in range(150):
            ann.claim(f"f{number}")
            ann.release(f"f{number}")
    folded: list[int] = []
    apply = ClaimLedger.apply

    def counted(ledger: ClaimLedger, position: int, event: dict[str, Any]) -> None:
        folded.append(position)
        apply(ledger, position, event)

    monkeypatch.setattr(ClaimLedger, "apply", counted)
    with open_claims(url, "bob") as bob:
        assert [c.token for c, _ in bob.table()] == [keep.token]
        with pytest.raises(Conflict):
            bob.claim("keep/a")
        assert bob.claim("f1").actor == "bob"
    assert len(folded) < 10


def test_a_checkpoint_of_another_log_is_passed_over(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with open_claims(f"ndjson:{log}", "ann") as ann:
        for number in range(110):
            ann.claim(f"f{number}")
            ann.release(f"f{number}")
        ann.claim("a")
    log.unlink()
    with open_claims(f"ndjson:{log}", "bob") as bob:
        assert bob.table() == []
        assert bob.claim("a").token == 1


def test_a_bridge_revives_no_claim(cli: Run, tmp_path: Path) -> None:
    bus, log = f"file:{tmp_path / 'bus'}", f"ndjson:{tmp_path / 'log'}"
    assert cli("claim", "a.py", "--actor", "cy", "--url", bus).code == 0
    assert cli("release", "a.py", "--actor", "cy", "--url", bus).code == 0
    assert cli("bridge", bus, log).code == 0

    assert b"coord.claim" in (tmp_path / "log").read_bytes()
    assert cli("claims", "--url", log).out == b""
    assert cli("claim", "a.py", "--actor", "ann", "--url", log).code == 0
    assert cli("bridge", log, bus).code == 0
    assert cli("claim", "a.py", "--actor", "eve", "--url", bus).code == 0


def test_worktrees_share_their_claims_and_the_place_is_decided_once(tmp_path: Path) -> None:
    main, tree = tmp_path / "main", tmp_path / "tree"
    main.mkdir()
    git(main, "init", "-q")
    git(main, "commit", "--allow-empty", "-qm", "x")
    assert git(main, "worktree", "add", "-q", str(tree)).returncode == 0
    here, there = runner(TRUNKLINE, main), runner(TRUNKLINE, tree)

    assert here("claim", "src/**", "--actor", "ann").code == 0
    assert there("claim", "src/a.py", "--actor", "bob").code == 6
    (main / "state" / "pubsub").mkdir(parents=True)
    (main / "state" / "pubsub" / "events_v0.ndjson").touch()
    assert here("claim", "src/a.py", "--actor", "bob").code == 6
    assert here("claims", "place").out == there("claims", "place").out

    log = f"ndjson:{main / 'state' / 'pubsub' / 'events_v0.ndjson'}"
    assert here("claim", "docs", "--actor", "eve", "--url", log).code == 0
    refused = here("claim", "b.py", "--actor", "bob")
    assert refused.code == 1
    assert b"open in two places" in refused.err
    assert here("release", "docs", "--actor", "eve", "--url", log).code == 0
    assert here("claim", "b.py", "--actor", "bob").code == 0


def test_a_claim_needs_a_name(cli: Run, url: str) -> None:
    refused = cli("claim", "a.py", "--url", url)
    assert refused.code == 4
    assert b"a claim needs an actor" in refused.err
    assert cli("claims", "--url", url).code == 2


def test_a_taken_path_is_told_as_json(cli: Run, url: str) -> None:
    cli("claim", "src/**", "--actor", "ann", "--url", url, "--ttl", "10m")
    done = cli("claim", "src/a", "--actor", "bob", "--url", url, "--json")
    row = json.loads(done.out)
    assert done.code == 6
    assert 590 < row.pop("left_s") <= 600
    assert row == {
        "state": "taken",
        "path": "src/a",
        "holder": "ann",
        "holds": ["src/**"],
        "token": 1,
        "place": 1,
        "circle": None,
    }


def test_claims_are_listed_by_path_and_by_actor_and_given_back_together(cli: Run, url: str) -> None:
    env = {"TRUNKLINE_URL": url, "TRUNKLINE_ACTOR": "ann"}
    cli("claim", "src/**", "docs/a.md", env=env)
    cli("claim", "lib", env=env)
    cli("claim", "x", "--actor", "bob", env=env)

    assert cli("claims", "-q", "docs/*", env=env).out == b"src/** docs/a.md\n"
    assert cli("claims", "-q", "--mine", env=env).out == b"src/** docs/a.md\nlib\n"
    assert cli("claims", "-q", "nothing", env=env).out == b""
    assert cli("release", "--mine", env=env).out.count(b"released") == 2
    assert cli("claims", "-q", env=env).out == b"x\n"
    assert cli("release", "--mine", env=env).code == 0


def test_wait_without_a_time_does_not_eat_the_path(cli: Run, url: str) -> None:
    done = cli("claim", "--wait", "src/x.py", "--actor", "ann", "--url", url, "--json")
    assert (done.code, json.loads(done.out)["path"]) == (0, "src/x.py")


def test_a_command_runs_while_the_claim_is_held(cli: Run, url: str, tmp_path: Path) -> None:
    look = [*TRUNKLINE, "claims", "--url", url, "--json"]
    done = cli("claim", "a", "--actor", "ann", "--url", url, "--", *look)
    row = json.loads(done.out)
    assert (done.code, row["actor"], row["state"]) == (0, "ann", "held")
    assert cli("claims", "--url", url).out == b""
    assert cli("claim", "a", "--actor", "ann", "--url", url, "--", "false").code == 1
    assert cli("claim", "a", "--actor", "ann", "--url", url, "--", "no-such-program").code == 3
    assert cli("claims", "--url", url).out == b""


def test_a_killed_holder_of_a_command_is_followed_at_once(
    url: str, started: list[subprocess.Popen[bytes]]
) -> None:
    words = [*TRUNKLINE, "claim", "a", "--actor", "ann", "--url", url, "--", "sleep", "0.1"]
    # A command that lives on would still touch the files: it is short, its holder is stopped.
    holder = subprocess.Popen(words, env=ENV)
    started.append(holder)
    with open_claims(url, "bob") as bob:
        end = time.monotonic() + 20
        while not bob.table():
            assert time.monotonic() < end
            time.sleep(0.005)
        holder.kill()
        holder.wait()
        began = time.monotonic()
        assert bob.claim("a", wait_s=20).actor == "bob"
        assert time.monotonic() - began < 3


def test_the_guard_answers_soon_when_the_broker_is_away(cli: Run, tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "a").touch()
    git(tmp_path, "add", "a")
    away = ("claims", "guard", "--url", "ws://127.0.0.1:9", "--actor", "ann")
    began = time.monotonic()
    refused = cli(*away)
    assert time.monotonic() - began < 6
    assert refused.code == 1
    assert b"the commit is refused (--offline refuse)" in refused.err
    allowed = cli(*away, "--offline", "allow")
    assert allowed.code == 0
    assert b"the commit goes on (--offline allow)" in allowed.err


def test_the_guard_can_require_a_claim_on_every_path(cli: Run, tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    for name in ("a", "b"):
        (tmp_path / name).touch()
    git(tmp_path, "add", "a", "b")
    cli("claim", "a", "--actor", "ann")

    assert cli("claims", "guard", "--actor", "ann").code == 0
    refused = cli("claims", "guard", "--actor", "ann", "--require")
    assert refused.code == 1
    assert b"you hold no claim on b" in refused.err
    assert b"you hold no claim on a" not in refused.err


def test_a_command_that_outlives_its_killed_holder_keeps_the_claim(
    url: str, started: list[subprocess.Popen[bytes]]
) -> None:
    words = [*TRUNKLINE, "claim", "a", "--actor", "ann", "--url", url, "--", "sleep", "4"]
    holder = subprocess.Popen(words, env=ENV)
    started.append(holder)
    with open_claims(url, "bob") as bob:
        end = time.monotonic() + 20
        while not (table := bob.table()) or table[0][0].process == Process.by_pid(holder.pid):
            assert time.monotonic() < end
            time.sleep(0.01)
        holder.kill()
        holder.wait()
        with pytest.raises(Conflict, match="ann holds a"):
            bob.claim("a")  # the command still edits
        began = time.monotonic()
        assert bob.claim("a", wait_s=20).actor == "bob"
        assert time.monotonic() - began < 10  # by the end of the command, not by the ttl


def test_claims_in_another_worktree_are_a_second_place(tmp_path: Path) -> None:
    main, tree = tmp_path / "main", tmp_path / "tree"
    main.mkdir()
    git(main, "init", "-q")
    git(main, "commit", "--allow-empty", "-qm", "x")
    assert git(main, "worktree", "add", "-q", str(tree)).returncode == 0
    here, there = runner(TRUNKLINE, main), runner(TRUNKLINE, tree)
    assert here("claim", "a.py", "--actor", "ann").code == 0
    assert there("claim", "b.py", "--actor", "bob", "--url", "file:.bus").code == 0
    refused = here("claim", "b.py", "--actor", "eve")
    assert refused.code == 1
    assert str(tree / ".bus").encode() in refused.err


@pytest.mark.parametrize("kind", ["closed", "silent"])
def test_the_guard_does_not_wait_for_a_server_that_is_silent(
    cli: Run, tmp_path: Path, kind: str
) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "a").touch()
    git(tmp_path, "add", "a")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1] if kind == "silent" else 9
        for scheme in ("ws", "nats", "mongodb"):
            began = time.monotonic()
            refused = cli("claims", "guard", "--url", f"{scheme}://127.0.0.1:{port}")
            assert time.monotonic() - began < 5  # 2 s where nothing else runs; it was 6 to 14
            assert refused.code == 1
            assert b"the commit is refused (--offline refuse)" in refused.err
