"""inbox: the most important events first, within a budget, and a digest of the rest."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

from .conftest import ENV, PROGRAM, Run, lines


def test_the_most_important_come_first_across_topics(run: Run) -> None:
    for topic, priority in (("a", "low"), ("a", "normal"), ("b", "critical"), ("b", "high")):
        run("pub", topic, '{"n": 1}', "--priority", priority)

    *shown, digest = run("inbox", ">", "--group", "g", "--limit", "2").rows

    assert [row["priority"] for row in shown] == ["critical", "high"]
    assert all(row["handle"] and row["attempt"] == 1 for row in shown)
    assert (digest["more"], digest["in_flight"]) == (2, 0)
    assert digest["priorities"] == {"normal": 1, "low": 1}
    assert digest["topics"] == {"a": 2}


def test_events_that_are_not_shown_lose_no_try(run: Run) -> None:
    run("pub", "t", stdin=lines(30))

    first = run("inbox", "t", "--group", "g", "--limit", "3").rows
    second = run("inbox", "t", "--group", "g", "--limit", "40").rows

    assert [row["offset"] for row in first[:-1]] == [1, 2, 3]
    assert first[-1]["more"] == 27
    assert [row["offset"] for row in second[:-1]] == list(range(4, 31))
    assert {row["attempt"] for row in second[:-1]} == {1}
    assert (second[-1]["more"], second[-1]["in_flight"]) == (0, 3)


def test_the_output_keeps_to_its_budget(run: Run) -> None:
    run("pub", "t", json.dumps({"text": "x" * 100}), "--count", "200")

    done = run("inbox", "t", "--group", "g", "--limit", "200", "--budget", "2000")

    assert 1000 < len(done.out) <= 2000
    assert done.rows[-1]["more"] == 200 - len(done.rows) + 1


def test_one_long_event_is_shown_whatever_the_budget(run: Run) -> None:
    run("pub", "t", json.dumps("x" * 5000), "--count", "2")

    *shown, digest = run("inbox", "t", "--group", "g", "--budget", "100").rows

    assert (len(shown), digest["more"]) == (1, 1)


def test_an_inbox_waits_and_an_empty_one_says_so_by_its_code(run: Run, home: Path) -> None:
    run("pub", "t", "1")
    taken = run("inbox", "t", "--group", "g").rows
    assert len(taken) == 1  # without a rest there is no digest
    assert run("inbox", "t", "--group", "g", "--wait", "0.1").code == 3
    words = [*PROGRAM, "inbox", "t", "--group", "g", "--wait", "30"]
    with subprocess.Popen(words, cwd=home, env=ENV, stdout=subprocess.PIPE) as waiter:
        run("pub", "t", "2")
        assert waiter.stdout is not None
        first, digest = waiter.stdout.read().splitlines()

    assert json.loads(first)["payload"] == 2
    assert json.loads(digest) == {
        "more": 0,
        "in_flight": 1,
        "priorities": {},
        "topics": {},
        "oldest": None,
    }


def test_a_killed_inbox_frees_what_it_did_not_show_after_its_lease(run: Run, home: Path) -> None:
    run("pub", "t", stdin=lines(5))
    words = [*PROGRAM, "inbox", "t", "--group", "g", "--lease", "1s"]
    with subprocess.Popen(words, cwd=home, env=ENV, stdout=subprocess.DEVNULL) as killed:
        while not run("group", "ls", "--json").rows:
            if killed.poll() is not None:
                break
        killed.send_signal(signal.SIGKILL)

    offsets: set[int] = set()
    while offsets != {1, 2, 3, 4, 5}:
        done = run("take", "t", "--group", "g", "--limit", "9", "--wait", "20")
        assert done.code == 0
        offsets |= {row["offset"] for row in done.rows}
