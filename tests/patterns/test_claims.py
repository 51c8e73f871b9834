"""Claims: leases, fencing tokens, the queue, the guard, the table."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from files.harness import ENV, TRUNKLINE, Run, memory_dir, runner
from trunkline.broker.server import Broker
from trunkline.bus import sync
from trunkline.errors import Conflict, Denied, InvalidName, InvalidOption, NoBus, NotFound
from trunkline.files import ndjson
from trunkline.files.globs import overlap
from trunkline.options import BrokerOptions
from trunkline.patterns.claims import (
    Claim,
    ClaimLedger,
    Claims,
    NdjsonCarrier,
    export_table,
    import_table,
    open_claims,
)


class HandClock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.at = datetime(2026, 2, 16, 12, 0, 0, 500_000, tzinfo=UTC)

    def now(self) -> datetime:
        return self.at

    def monotonic(self) -> float:
        return self.at.timestamp()

    def advance(self, seconds: float) -> None:
        self.at += timedelta(seconds=seconds)


@pytest.fixture(params=["ndjson", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{request.param}:{tmp_path / 'place'}"


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def cli(tmp_path: Path) -> Run:
    return runner(TRUNKLINE, tmp_path)


class Team:
    """Several actors on one carrier and one clock."""

    def __init__(self, url: str, clock: HandClock) -> None:
        self._url, self._clock = url, clock
        self._open: dict[str, Claims] = {}

    def __getitem__(self, actor: str) -> Claims:
        if actor not in self._open:
            self._open[actor] = open_claims(self._url, actor, self._clock)
        return self._open[actor]

    def close(self) -> None:
        for claims in self._open.values():
            claims.__exit__()


@pytest.fixture
def team(url: str, clock: HandClock) -> Iterator[Team]:
    team = Team(url, clock)
    yield team
    team.close()


def test_a_claim_keeps_others_out_until_it_is_released(team: Team) -> None:
    first = team["ann"].claim("src/**")

    with pytest.raises(Conflict) as caught:
        team["bob"].claim("src/a.py")
    assert caught.value.claim.actor == "ann"
    team["bob"].claim("docs/*.md")
    assert team["bob"].conflicts(["src/x/y.py", "docs/a.md"]) == [("src/x/y.py", first)]
    team["ann"].release("src/**")
    second = team["bob"].claim("src/a.py")
    assert second.token > first.token
    assert [c.path for c, state in team["ann"].table() if state == "held"] == [
        "docs/*.md",
        "src/a.py",
    ]


def test_a_refused_claim_leaves_nothing_behind(team: Team, url: str) -> None:
    team["ann"].claim("a")
    for _ in range(2):
        with pytest.raises(Conflict):
            team["bob"].claim("a")

    assert [c.actor for c, _ in team["eve"].table(every=True)] == ["ann"]


def test_an_expired_holder_is_refused_and_the_token_rises(team: Team, clock: HandClock) -> None:
    old = team["ann"].claim("a", ttl_s=10)
    assert team["ann"].verify(old.token, "a").actor == "ann"
    clock.advance(9.999)
    assert team["ann"].verify(old.token).token == old.token
    clock.advance(0.001)

    with pytest.raises(Denied):
        team["ann"].verify(old.token)
    with pytest.raises(Denied):
        team["ann"].renew(old.token)
    with pytest.raises(NotFound):
        team["ann"].release("a")
    new = team["bob"].claim("a")
    assert new.token > old.token
    assert team["eve"].verify(new.token, "a").actor == "bob"
    with pytest.raises(Denied):
        team["ann"].renew(old.token)
    with pytest.raises(Denied):
        team["bob"].verify(new.token, "b")
    with pytest.raises(NotFound):
        team["bob"].verify(10_000)


def test_a_clock_that_steps_back_does_not_bring_a_holder_back(team: Team, clock: HandClock) -> None:
    old = team["ann"].claim("a", ttl_s=10)
    clock.advance(11)
    new = team["bob"].claim("a", ttl_s=60)
    clock.advance(-8)

    with pytest.raises(Denied):
        team["ann"].renew(old.token)
    assert team["eve"].verify(new.token).actor == "bob"
    assert [(c.actor, state) for c, state in team["eve"].table()] == [("bob", "held")]


def test_renewing_extends_and_claiming_again_is_renewing(team: Team, clock: HandClock) -> None:
    claim = team["ann"].claim("a", ttl_s=10)
    clock.advance(5)
    renewed = team["ann"].renew(claim.token, ttl_s=10)
    clock.advance(9)
    again = team["ann"].claim("a", ttl_s=100)

    assert renewed.token == again.token == claim.token
    assert again.expires_at == clock.now() + timedelta(seconds=100)
    with pytest.raises(Conflict):
        team["bob"].claim("a")


def test_a_renewal_that_came_first_beats_an_actor_that_saw_it_run_out(
    clock: HandClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between looking and appending anything may happen: the log's order decides."""
    url = f"ndjson:{tmp_path / 'log'}"
    ann, bob = open_claims(url, "ann", clock), open_claims(url, "bob", clock)
    held = ann.claim("a", ttl_s=10)
    bob.table()
    clock.advance(9)
    late = clock.now()
    clock.advance(2)
    real = NdjsonCarrier.append

    def append(carrier: NdjsonCarrier, event: dict[str, Any]) -> None:
        if event["actor"] == "bob" and "supersedes" in event["payload"]:
            # Ann looked at her clock at 9 s, was stopped, and appends only now.
            at = late.isoformat().replace("+00:00", "Z")
            renewal = {"path": "a", "intent": "edit", "renews": held.token}
            real(
                carrier,
                {**event, "actor": "ann", "event_id": "late", "ts": at, "payload": renewal},
            )
        real(carrier, event)

    monkeypatch.setattr(NdjsonCarrier, "append", append)
    with pytest.raises(Conflict):
        bob.claim("a")
    monkeypatch.undo()

    assert ann.verify(held.token).actor == "ann"


def enter(claims: Claims, path: str, ttl_s: int, *, waiting: bool = False) -> Claim:
    """Append a claim and do nothing more about it."""
    return claims._enter((path,), ttl_s, "edit", waiting=waiting, process=None)


def test_the_queue_is_served_in_order_and_the_dead_are_passed_over(
    team: Team, clock: HandClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each nap of the waiting one is a turn of the others."""
    team["ann"].claim("src/**", ttl_s=30)
    dead = enter(team["dead"], "src/**", 20, waiting=True)  # queued, and never heard of again
    team["cat"].table()
    enter(team["cat"], "src/b", 1000)
    turns: list[Callable[[], object]] = [
        lambda: clock.advance(25),  # the dead one's place runs out
        lambda: team["ann"].release("src/**"),
        lambda: team["cat"].release("src/b"),
    ]
    log: list[str] = []

    def nap(_: float) -> None:
        log.append(",".join(f"{c.actor}:{s}" for c, s in team["eve"].table()))
        turns.pop(0)()

    _nap(monkeypatch, nap)
    got = team["bob"].claim("src/*", ttl_s=30, wait_s=1000)

    assert dead.token < got.token
    assert log == [
        "ann:held,dead:waiting,cat:waiting,bob:waiting",
        "ann:held,cat:waiting,bob:waiting",
        "cat:held,bob:waiting",
    ]
    assert got.expires_at == clock.now() + timedelta(seconds=30)
    assert [c.actor for c, s in team["eve"].table() if s == "held"] == ["bob"]


def test_waiting_ends_with_a_conflict_and_gives_the_place_up(
    team: Team, clock: HandClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    team["ann"].claim("a", ttl_s=1000)
    _nap(monkeypatch, clock.advance)

    with pytest.raises(Conflict):
        team["bob"].claim("a", ttl_s=2, wait_s=10)

    assert [c.actor for c, _ in team["eve"].table(every=True)] == ["ann"]


def test_a_waiting_one_that_was_stopped_loses_its_place_and_queues_again(
    team: Team, clock: HandClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    team["ann"].claim("a", ttl_s=30)
    naps = iter([25.0, 10.0])
    _nap(monkeypatch, lambda _: clock.advance(next(naps, 1.0)))

    got = team["bob"].claim("a", ttl_s=5, wait_s=None)

    assert got.actor == "bob"
    assert team["bob"].verify(got.token) == got


def test_nor_does_one_that_was_stopped_at_its_turn(
    team: Team, clock: HandClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    team["ann"].claim("a", ttl_s=3)
    stops = iter([10.0])
    grant = Claims._append_renewal

    def late(claims: Claims, claim: Claim, ttl_s: int, **facts: Any) -> None:
        if not facts:
            clock.advance(next(stops, 0.0))
        grant(claims, claim, ttl_s, **facts)

    _nap(monkeypatch, lambda _: clock.advance(1.0))
    monkeypatch.setattr(Claims, "_append_renewal", late)

    got = team["bob"].claim("a", ttl_s=5, wait_s=None)

    assert team["bob"].verify(got.token) == got


def _nap(monkeypatch: pytest.MonkeyPatch, nap: Callable[[float], None]) -> None:
    """Let who waits in a queue do this, and nobody else who sleeps: a lock may, for a moment."""
    monkeypatch.setattr("trunkline.patterns.claims.time", SimpleNamespace(sleep=nap))


def test_release_is_for_the_holder_unless_forced(team: Team) -> None:
    claim = team["ann"].claim("a")
    with pytest.raises(NotFound):
        team["bob"].release("a")
    with pytest.raises(NotFound):
        team["bob"].release(token=claim.token)
    assert [c.token for c in team["bob"].release("a", force=True)] == [claim.token]
    with pytest.raises(Denied):
        team["ann"].verify(claim.token)


def test_one_actor_may_hold_overlapping_globs(team: Team) -> None:
    team["ann"].claim("src/**")
    team["ann"].claim("src/a.py")

    assert [state for _, state in team["ann"].table()] == ["held", "held"]
    team["ann"].release("src/**")
    with pytest.raises(Conflict):
        team["bob"].claim("src/*")


def test_bad_input_is_refused_before_anything_is_written(team: Team, tmp_path: Path) -> None:
    for path in ("", "/etc/passwd", "../x"):
        with pytest.raises(InvalidName):
            team["ann"].claim(path)
    with pytest.raises(InvalidOption):
        team["ann"].claim("a", ttl_s=0)
    with pytest.raises(InvalidName):
        team[""]
    assert team["ann"].table(every=True) == []


def test_claims_need_one_order(tmp_path: Path) -> None:
    with sync.open(f"file:{tmp_path / 'bus'}") as bus:
        bus.define("coord.claim", partitions=2)

    with pytest.raises(InvalidOption):
        open_claims(f"file:{tmp_path / 'bus'}", "ann")


def test_nothing_is_made_by_a_command_that_only_looks(tmp_path: Path) -> None:
    for kind in ("ndjson", "file"):
        with pytest.raises(NoBus):
            open_claims(f"{kind}:{tmp_path / 'none'}", "ann", create=False)
    assert list(tmp_path.iterdir()) == []


def test_plain_events_of_other_tools_count(tmp_path: Path, clock: HandClock) -> None:
    log = str(tmp_path / "log")
    at = clock.now()
    ndjson.publish(
        ndjson.make_event(
            "coord.claim", "scene/x.md", "gray", {"path": "scene/x.md", "intent": "edit"}, ts=at
        ),
        log,
    )
    ndjson.publish(ndjson.make_event("coord.claim", "scene/y.md", "gray", ts=at, ttl_s=0), log)
    ndjson.publish(ndjson.make_event("coord.claim", "/bad", "gray", ts=at), log)
    ndjson.publish(ndjson.make_event("gate.status_changed", "scene/z.md", "gray", ts=at), log)
    with open(log, "ab") as file:
        file.write(b'{"topic":"coord.claim"}\n{"topic":"coord.claim","payload":5,"ts":"x"}\n')
    bob = open_claims(f"ndjson:{log}", "bob", clock)

    for path in ("scene/x.md", "scene/y.md"):
        with pytest.raises(Conflict):
            bob.claim(path)
    bob.claim("scene/z.md")
    ndjson.publish(ndjson.make_event("coord.release", "scene/x.md", "gray", ts=at), log)
    assert bob.claim("scene/x.md").actor == "bob"
    clock.advance(10_000_000)
    with pytest.raises(Conflict):
        bob.claim("scene/y.md")  # no ttl: until it is released


def test_the_events_are_those_of_the_ndjson_contract(tmp_path: Path, clock: HandClock) -> None:
    log = tmp_path / "log"
    ann = open_claims(f"ndjson:{log}", "ann", clock)
    claim = ann.claim("src/**", ttl_s=60, intent="refactor")
    ann.release("src/**")

    events = [json.loads(line) for line in log.read_text().splitlines()]
    for event in events:
        assert sorted(event) == [
            *("actor", "event_id", "idempotency_key", "payload", "scope", "topic", "ts", "ttl_s")
        ]
        assert (event["actor"], event["scope"], event["ts"]) == (
            "ann",
            "src/**",
            "2026-02-16T12:00:00Z",
        )
    assert [event["topic"] for event in events] == ["coord.claim", "coord.release"]
    assert events[0]["payload"]["path"] == "src/**"
    assert events[0]["payload"]["intent"] == "refactor"
    assert events[0]["ttl_s"] == 60
    assert events[1]["payload"]["token"] == claim.token == 1


ACTORS = ("ann", "bob", "cat")
GLOBS = ("a/**", "a/x", "b/*", "**/x", "b/x")


@settings(max_examples=100, deadline=None)
@given(
    script=st.lists(
        st.tuples(
            st.sampled_from(ACTORS),
            st.sampled_from(["claim", "renew", "release", "enter", "pass"]),
            st.sampled_from(GLOBS),
            st.integers(1, 20),
        ),
        max_size=40,
    )
)
def test_whatever_they_do_no_path_has_two_holders(
    script: list[tuple[str, str, str, int]],
) -> None:
    with memory_dir() as folder:
        play(script, folder / "log")


def play(script: list[tuple[str, str, str, int]], log: Path) -> None:
    clock = HandClock()
    team = {actor: open_claims(f"ndjson:{log}", actor, clock) for actor in ACTORS}
    held: dict[int, Claim] = {}
    for actor, verb, path, number in script:
        claims = team[actor]
        with suppress(Conflict, Denied, NotFound):
            if verb == "claim":
                got = claims.claim(path, ttl_s=number)
                assert claims.verify(got.token) == got
            elif verb == "renew":
                claims.renew(number, ttl_s=number)
            elif verb == "release":
                claims.release(path)
            elif verb == "enter":
                enter(claims, path, number, waiting=number % 2 == 0)
            else:
                clock.advance(number)
        tables = [each.table(every=True) for each in team.values()]
        assert tables[0] == tables[1] == tables[2]
        ledger = claims._ledger
        valid = [
            claim for claim, state in tables[0] if state == "held" and not ledger.blockers(claim)
        ]
        for one in valid:
            rivals = [c for c in valid if c.actor != one.actor and overlap(c.path, one.path)]
            assert rivals == []
            # Whoever comes to hold a path has a higher token than all who held it before.
            if one.token not in held:
                before = [c for c in held.values() if c.actor != one.actor]
                assert all(c.token < one.token for c in before if overlap(c.path, one.path))
                held[one.token] = one


def test_a_ledger_survives_any_event() -> None:
    ledger = ClaimLedger()
    base = {"topic": "coord.claim", "ts": "2026-01-01T00:00:00Z", "actor": "a", "scope": "x"}
    odd: list[Any] = [None, 5, "x", [], {}, {"renews": "x"}, {"renews": 1}, {"supersedes": {}}]
    odd += [{"supersedes": ["x", None, 1, []]}, {"path": 7}, {"token": "x"}, {"token": 1}]
    for number, payload in enumerate(odd):
        ledger.apply(number, {**base, "payload": payload})
        ledger.apply(number, {**base, "topic": "coord.release", "payload": payload, "actor": 7})
        ledger.apply(number, {"payload": payload})
    assert all(claim.path == "x" for claim in ledger.open())


def test_a_renewal_that_comes_too_late_counts_for_nothing() -> None:
    """Its writer looked in time and was stopped before it wrote."""
    ledger = ClaimLedger()
    base = {"topic": "coord.claim", "actor": "a", "scope": "x", "ttl_s": 10}
    ledger.apply(1, {**base, "ts": "2026-01-01T00:00:00Z", "payload": {"path": "x"}})
    before = ledger.claims[1]

    ledger.apply(2, {**base, "ts": "2026-01-01T00:00:10Z", "payload": {"renews": 1}})
    assert ledger.claims[1] == before
    ledger.apply(3, {**base, "ts": "2026-01-01T00:00:09Z", "payload": {"renews": 1}})
    assert ledger.claims[1].expires_at == before.claimed_at + timedelta(seconds=19)
    taken = {"path": "x", "supersedes": [1]}
    other = {**base, "actor": "b", "payload": taken}
    ledger.apply(4, {**other, "ts": "2026-01-01T00:00:18Z"})
    assert not ledger.claims[1].ended
    ledger.apply(5, {**other, "ts": "2026-01-01T00:00:19Z"})
    assert ledger.claims[1].ended


def test_taking_over_costs_one_event(tmp_path: Path, clock: HandClock) -> None:
    log = tmp_path / "log"
    open_claims(f"ndjson:{log}", "ann", clock).claim("a", ttl_s=1)
    clock.advance(2)
    open_claims(f"ndjson:{log}", "bob", clock).claim("a")

    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert [event["payload"].get("supersedes") for event in events] == [None, [1]]


def test_agents_contend_for_overlapping_globs(tmp_path: Path, url: str) -> None:
    """Real processes. Each holder writes its token to a file that only a holder may touch."""
    code = """
import os, sys, time
from trunkline.patterns.claims import open_claims
url, actor, folder, glob = sys.argv[1:]
with open_claims(url, actor) as claims:
    for _ in range(4):
        claim = claims.claim(glob, ttl_s=30, wait_s=None)
        path = os.path.join(folder, "holder")
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        claims.verify(claim.token)
        with open(os.path.join(folder, "log"), "a") as log:
            log.write(f"{claim.token} {actor}\\n")
        time.sleep(0.01)
        os.unlink(path)
        os.close(fd)
        claims.release(token=claim.token)
"""
    globs = ["src/**", "src/a.py", "**/a.py", "src/[a-c].*"]
    agents = [
        subprocess.Popen(
            [sys.executable, "-c", code, url, f"agent{n}", str(tmp_path), globs[n]], env=ENV
        )
        for n in range(4)
    ]
    assert [agent.wait(50) for agent in agents] == [0] * 4

    rows = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    tokens = [int(token) for token, _ in rows]
    assert len(rows) == 16
    assert tokens == sorted(set(tokens))
    assert sorted(actor for _, actor in rows) == [f"agent{n // 4}" for n in range(16)]


def test_a_killed_holder_is_followed_after_its_lease(tmp_path: Path, url: str) -> None:
    code = """
import os, sys, signal
from trunkline.patterns.claims import open_claims
claims = open_claims(sys.argv[1], "dead")
print(claims.claim("a", ttl_s=1).token, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    out = subprocess.run(
        [sys.executable, "-c", code, url], env=ENV, capture_output=True, check=False
    ).stdout
    started = time.monotonic()

    with open_claims(url, "heir") as claims:
        claim = claims.claim("a", wait_s=10)

    assert claim.token > int(out)
    assert 0.3 < time.monotonic() - started < 5


def test_the_command_line(cli: Run, url: str) -> None:
    where = ("--url", url, "--actor", "ann")
    done = cli("claim", "src/**", "--ttl", "10m", *where)
    assert (done.code, done.err) == (0, b"")
    assert done.out.decode().startswith("claimed src/** by ann, token 1 until 20")
    taken = cli("claim", "src/a.py", "--url", url, "--actor", "bob")
    assert (taken.code, taken.out) == (6, b"")
    assert "src/a.py is claimed: ann holds src/** until" in taken.err.decode()
    assert cli("claim", "src/a.py", "--wait", "0s", "--url", url, "--actor", "bob").code == 6
    rows = [json.loads(line) for line in cli("claims", "--json", "--url", url).out.splitlines()]
    assert [(r["path"], r["actor"], r["token"], r["state"]) for r in rows] == [
        ("src/**", "ann", 1, "held")
    ]
    assert cli("claims", "check", "1", "src/x", "--url", url).code == 0
    assert cli("claims", "check", "1", "docs/x", "--url", url).code == 1
    assert cli("release", "src/**", "--url", url, "--actor", "bob").code == 3
    assert cli("release", "--token", "1", *where).code == 0
    assert cli("claims", "check", "1", "--url", url).code == 1
    assert cli("claims", "check", "77", "--url", url).code == 3
    assert cli("claims", "--url", url).out == b""
    assert cli("claim", "x", "--ttl", "soon", *where).code == 4
    assert cli("claim", "/etc", *where).code == 4
    assert cli("release", *where).code == 4
    assert cli("claims", "--url", "file:nowhere").code == 2
    env = {"TRUNKLINE_URL": url, "TRUNKLINE_ACTOR": "eve"}
    assert json.loads(cli("claim", "x", "--json", env=env).out)["actor"] == "eve"


def git(repo: Path, *words: str, actor: str = "ann") -> subprocess.CompletedProcess[bytes]:
    env = {**ENV, "TRUNKLINE_ACTOR": actor, "GIT_CONFIG_GLOBAL": os.devnull}
    for who in ("AUTHOR", "COMMITTER"):
        env |= {f"GIT_{who}_NAME": "t", f"GIT_{who}_EMAIL": "t@example.org"}
    return subprocess.run(["git", *words], cwd=repo, env=env, capture_output=True, check=False)


def test_the_guard_refuses_a_commit_on_someone_elses_claim(cli: Run, tmp_path: Path) -> None:
    assert git(tmp_path, "init", "-q").returncode == 0
    (tmp_path / "state" / "pubsub").mkdir(parents=True)
    (tmp_path / "state" / "pubsub" / "events_v0.ndjson").touch()
    (tmp_path / "src").mkdir()
    for name in ("a.py", "b c.py"):
        (tmp_path / "src" / name).write_text(name * 100)
    git(tmp_path, "add", "src")
    assert cli("claims", "install-hook").code == 0
    assert cli("claims", "install-hook").code == 0

    below = runner(TRUNKLINE, tmp_path / "src")
    assert below("claim", "b*", "--actor", "bob").out.startswith(b"claimed src/b* by bob")
    refused = git(tmp_path, "commit", "-qm", "x")
    assert refused.returncode == 1
    assert b"src/b c.py is claimed by bob" in refused.stderr
    assert b"a.py is claimed" not in refused.stderr
    assert git(tmp_path, "commit", "-qm", "x", actor="bob").returncode == 0

    git(tmp_path, "mv", "src/b c.py", "src/moved.py")  # the old name is touched as well
    assert git(tmp_path, "commit", "-qm", "y").returncode == 1
    assert cli("release", "src/b*", "--actor", "bob").code == 0
    assert git(tmp_path, "commit", "-qm", "y").returncode == 0


def test_the_guard_lets_everything_pass_where_nobody_claims(cli: Run, tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "a").touch()
    git(tmp_path, "add", "a")

    assert cli("claims", "guard").code == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == [".git", "a"]


def test_a_hook_of_another_program_is_left_alone(cli: Run, tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    hook = tmp_path / ".git" / "hooks" / "pre-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\nexit 0\n")

    done = cli("claims", "install-hook")

    assert (done.code, hook.read_text()) == (1, "#!/bin/sh\nexit 0\n")
    assert b"add this line to it: " in done.err


def test_the_table_goes_out_and_comes_back(cli: Run, url: str, tmp_path: Path) -> None:
    for path, actor in (("src/**", "ann"), ("docs/a.md", "bob")):
        assert cli("claim", path, "--actor", actor, "--url", url).code == 0
    table = cli("claims", "export", "--url", url).out.decode()
    lines = table.splitlines()
    assert [line.rpartition(" | ")[0] for line in lines] == ["src/** | ann", "docs/a.md | bob"]
    (tmp_path / "coord_claims.md").write_text(
        f"# Claims\n\n| path | actor | at |\n| --- | --- | --- |\n{table}"
        "| `old/x` | cat | 2020-01-01T00:00:00Z |\nmalformed line\n"
    )
    other = f"ndjson:{tmp_path / 'other'}"

    done = cli("claims", "import", "--url", other)

    assert (done.code, done.out.count(b"claimed ")) == (0, 2)
    assert cli("claims", "export", "--url", other).out.decode().count(" | ann | ") == 1
    assert cli("claim", "src/x", "--actor", "eve", "--url", other).code == 6
    assert cli("claims", "import", "none.md", "--url", other).code == 3


def test_a_token_is_checked_against_paths_as_they_are_typed(cli: Run, tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "src" / "a").mkdir(parents=True)
    assert cli("claim", "src/**", "--actor", "ann").code == 0
    below = runner(TRUNKLINE, tmp_path / "src" / "a")

    paths = ["./x.py", str(tmp_path / "src" / "x"), "../../x"]
    assert [below("claims", "check", "1", path).code for path in paths] == [0, 0, 1]


def test_claims_in_a_repository_are_not_committed_with_it(cli: Run, tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    cli("claim", "x", "--actor", "ann")
    (tmp_path / "x").touch()
    git(tmp_path, "add", "-A")

    assert git(tmp_path, "diff", "--cached", "--name-only").stdout == b"x\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".git", "x"]


def test_a_hook_finds_its_claims_from_every_folder(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "sub").mkdir()
    below = runner(TRUNKLINE, tmp_path / "sub")
    assert below("claims", "install-hook", "--url", "ndjson:log", "--actor", "ann").code == 0
    assert below("claim", "x", "--url", "ndjson:log", "--actor", "bob").code == 0
    (tmp_path / "sub" / "x").touch()
    git(tmp_path, "add", "-A")

    assert b"sub/x is claimed by bob" in git(tmp_path, "commit", "-m", "x").stderr


def test_odd_rows_of_a_table_do_not_stop_the_others(cli: Run, tmp_path: Path) -> None:
    far, log = "2999-01-01T00:00:00Z", f"ndjson:{tmp_path / 'log'}"
    (tmp_path / "t.md").write_text(f"a | b\x01c | {far}\n../x | bob | {far}\ny | bob | {far}\n")

    done = cli("claims", "import", "t.md", "--ttl", "60", "--url", log, "--json")

    (row,) = [json.loads(line) for line in done.out.splitlines()]
    lasts = datetime.fromisoformat(row["expires_at"]) - datetime.fromisoformat(row["claimed_at"])
    assert (done.code, row["path"], lasts) == (0, "y", timedelta(seconds=60))


def test_table_rows() -> None:
    at = datetime(2026, 2, 16, 11, 12, tzinfo=UTC)
    rows = import_table(
        "a/b.md | gray_and_orange | 2026-02-16T11:12:00Z\n"
        "| `c/**` | bob | 2026-02-16T12:12:00+01:00 | note |\n"
        "/abs | x | 2026-02-16T11:12:00Z\npath | actor | ts\n--- | --- | ---\n"
    )
    assert rows == [("a/b.md", "gray_and_orange", at), ("c/**", "bob", at)]
    claim = Claim(
        token=1,
        paths=("a/b.md",),
        actor="bob",
        intent="edit",
        claimed_at=at,
        expires_at=None,
        event_id="e",
    )
    assert export_table([(claim, "held")], header=True) == (
        "path | actor | claimed at\n--- | --- | ---\na/b.md | bob | 2026-02-16T11:12:00Z\n"
    )
    assert export_table([(claim, "waiting")]) == ""


async def test_claims_are_carried_by_a_broker() -> None:
    def take_turns(url: str) -> None:
        with open_claims(url, "ann") as ann, open_claims(url, "bob", create=False) as bob:
            held = ann.claim("src/**")
            with pytest.raises(Conflict, match="ann holds src"):
                bob.claim("src/a.py")
            ann.release(token=held.token)
            assert bob.claim("src/a.py").token > held.token

    async with Broker(BrokerOptions(url="memory:", port=0)) as broker:
        await asyncio.to_thread(take_turns, broker.url)
