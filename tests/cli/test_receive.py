"""sub and tail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from .conftest import ENV, PROGRAM, Run, Start, lines


def offsets(rows: list[dict[str, Any]]) -> list[int]:
    return [row["offset"] for row in rows]


def read_lines(process: subprocess.Popen[str], count: int) -> list[dict[str, Any]]:
    assert process.stdout is not None
    return [json.loads(process.stdout.readline()) for _ in range(count)]


def test_a_group_goes_on_where_it_stopped(run: Run) -> None:
    run("pub", "t", stdin=lines(10))

    first = run("sub", "t", "--group", "g", "--count", "4", "--wait", "5")
    second = run("sub", "t", "--group", "g", "--wait", "0.2")
    other = run("sub", "t", "--group", "h", "--wait", "0.2")

    assert offsets(first.rows) == [1, 2, 3, 4]
    assert offsets(second.rows) == [5, 6, 7, 8, 9, 10]
    assert offsets(other.rows) == list(range(1, 11))
    assert {row["attempt"] for row in second.rows} == {1}
    assert {row["lag"] for row in run("group", "ls", "--json").rows} == {0}


@pytest.mark.parametrize(
    ("place", "expected"), [("start", [1, 2, 3]), ("3", [3]), ("@-1h", [1, 2, 3]), ("end", [])]
)
def test_a_new_group_begins_where_it_is_told(run: Run, place: str, expected: list[int]) -> None:
    run("pub", "t", stdin=lines(3))

    done = run("sub", "t", "--group", "g", "--from", place, "--wait", "0.2")

    assert offsets(done.rows) == expected
    assert done.err == ""


def test_from_does_not_move_a_group_that_is_there(run: Run) -> None:
    run("pub", "t", stdin=lines(3))
    run("sub", "t", "--group", "g", "--wait", "0.2")

    done = run("sub", "t", "--group", "g", "--from", "start", "--wait", "0.2")

    assert done.rows == []
    assert "trunkline group seek t g" in done.err


def test_a_group_takes_a_condition(run: Run) -> None:
    run("pub", "t", stdin=lines(6))

    done = run("sub", "t", "--group", "g", "--where", "payload.n % 2 = 0", "--wait", "0.2")

    assert offsets(done.rows) == [2, 4, 6]
    assert run("group", "ls", "--json").rows[0]["lag"] == 0


def test_without_ack_a_group_is_looked_at_and_left_alone(run: Run) -> None:
    run("pub", "t", stdin=lines(5))
    run("sub", "t", "--group", "g", "--count", "2", "--wait", "5")

    for _ in range(8):
        peeked = run("sub", "t", "--group", "g", "--ack", "none", "--wait", "0.01")
        assert offsets(peeked.rows) == [3, 4, 5]

    taken = run("sub", "t", "--group", "g", "--wait", "0.2")
    assert [(row["offset"], row["attempt"]) for row in taken.rows] == [(3, 1), (4, 1), (5, 1)]
    assert run("dlq", "ls", "--json").rows == []


def test_looking_on_leaves_no_trace(run: Run, home: Path) -> None:
    run("pub", "t", stdin=lines(5))

    assert offsets(run("sub", "t", "--from", "-2", "--wait", "0.01").rows) == [4, 5]
    assert offsets(run("sub", "t", "--from", "2:4").rows) == [2, 3]
    assert offsets(run("sub", "t", "--from", "start", "--count", "3").rows) == [1, 2, 3]
    assert run("sub", "t", "--wait", "0.01").rows == []
    assert list((home / ".bus" / "offsets").iterdir()) == []


def test_what_a_group_cannot_do_is_refused(run: Run) -> None:
    run("pub", "t", "1")

    assert run("sub", "t", "--group", "g", "--from", "1:3").code == 4
    assert run("sub", "t", "--group", "g", "--from", "-3").code == 4
    assert run("sub", "t", "--group", "g", "-p", "0").code == 4
    assert run("sub", "t", "--group", "_g").code == 4
    assert run("sub", "t", "--ack", "none", "--wait", "0.1").code == 4
    assert run("sub", "t", "--group", "g", "--where", "(").code == 4


@pytest.mark.parametrize(
    "words", ["soon", "soon --group g", "soon --group g --ack none", "soon.* --group g", "soon.>"]
)
def test_a_topic_that_never_comes_is_told_after_the_wait(run: Run, words: str) -> None:
    run("init")

    done = run("sub", *words.split(), "--wait", "0.05")

    topic = words.split()[0]
    assert (done.code, done.out) == (3, "")
    assert done.err == (
        f"trunkline: there is no topic {topic} yet\n"
        f"trunkline: there is no topic {topic} (trunkline topic ls)\n"
    )
    assert run("group", "ls", "-q").out.strip() == ""


@pytest.mark.parametrize("words", ["", "--group g", "--group g --from end"])
def test_a_topic_that_is_not_there_yet_is_waited_for(run: Run, start: Start, words: str) -> None:
    run("init")
    waiting = start("sub", "soon", *words.split(), "--wait", "20", "--count", "1")
    assert waiting.stderr is not None
    assert "there is no topic soon yet" in waiting.stderr.readline()

    run("pub", "soon", "1")

    out, _ = waiting.communicate(timeout=30)
    assert (waiting.returncode, json.loads(out)["payload"]) == (0, 1)


def test_a_range_of_a_topic_that_is_not_there_is_not_waited_for(run: Run) -> None:
    run("init")

    assert run("sub", "soon", "--from", "1:3").code == 3


def test_tail_shows_the_last_records_of_all_partitions_in_order(run: Run) -> None:
    run("init")
    run("topic", "create", "t", "--partitions", "3")
    run("pub", "t", stdin=lines(30))

    def numbers(*words: str) -> list[int]:
        return [row["payload"]["n"] for row in run("tail", "t", *words).rows]

    assert numbers("-n", "4") == [27, 28, 29, 30]
    assert numbers() == list(range(21, 31))
    assert numbers("-n", "100") == list(range(1, 31))
    assert numbers("-n", "0") == []
    assert numbers("-n", "2", "--where", "payload.n < 10") == [8, 9]
    assert len(run("tail", "t", "-p", "1", "-n", "100").rows) == 10
    assert run("tail", "nope").code == 3


def test_tail_follows_what_comes_until_it_is_told_to_end(run: Run, start: Start) -> None:
    run("pub", "a.x", "1")
    process = start("tail", "a.*", "-f", "-n", "5")
    assert [row["payload"] for row in read_lines(process, 1)] == [1]

    run("pub", "a.x", "2")
    run("pub", "a.new", "3")

    assert [row["payload"] for row in read_lines(process, 2)] == [2, 3]
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)], ids=["INT", "TERM"]
)
def test_a_member_that_is_stopped_has_acknowledged_what_it_wrote(
    run: Run, start: Start, number: signal.Signals, code: int
) -> None:
    run("pub", "t", stdin=lines(5))
    process = start("sub", "t", "--group", "g")
    assert offsets(read_lines(process, 5)) == [1, 2, 3, 4, 5]

    process.send_signal(number)
    out, err = process.communicate(timeout=10)

    assert (process.returncode, out, err) == (code, "", "")
    assert (
        run("group", "ls", "--json").rows[0] | {"floor": 5, "lag": 0, "leases": 0}
        == (run("group", "ls", "--json").rows[0])
    )


def test_a_reader_that_leaves_ends_it_and_loses_nothing(run: Run, home: Path) -> None:
    run("pub", "t", stdin=lines(20_000))
    command = " ".join([*PROGRAM, "sub", "t", "--group", "g", "--wait", "5"])

    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | head -n 3"],
        cwd=home,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=30,
    )

    shown = [json.loads(line)["offset"] for line in done.stdout.splitlines()]
    assert (done.returncode, shown, done.stderr) == (0, [1, 2, 3], "")
    floor = run("group", "ls", "--json").rows[0]["floor"]
    rest = run("sub", "t", "--group", "g", "--count", "1", "--wait", "5").rows
    assert offsets(rest) == [floor + 1]


def test_a_broken_pipe_is_no_error_for_other_commands(run: Run, home: Path) -> None:
    run("pub", "t", stdin=lines(20_000))
    command = " ".join([*PROGRAM, "get", "t", "1:"])

    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | head -n 1"],
        cwd=home,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=30,
    )

    assert (done.returncode, done.stderr) == (0, "")


def test_a_member_takes_over_from_one_that_was_killed(run: Run, start: Start) -> None:
    run("pub", "t", "1")
    first = start("sub", "t", "--group", "g")
    assert offsets(read_lines(first, 1)) == [1]
    os.kill(first.pid, signal.SIGSTOP)
    run("pub", "t", stdin=lines(3))
    os.kill(first.pid, signal.SIGKILL)

    rest = run("sub", "t", "--group", "g", "--wait", "1")

    assert {2, 3, 4} <= set(offsets(rest.rows)) <= {1, 2, 3, 4}
    assert rest.code == 0
