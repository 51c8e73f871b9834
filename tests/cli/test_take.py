"""take, ack, nack and extend: leases that outlive the command that took them."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from .conftest import ENV, PROGRAM, Run, lines


def test_a_handle_settles_from_another_process(program: Run) -> None:
    program("pub", "t", stdin=lines(2))

    taken = program("take", "t", "--group", "g", "--lease", "5m").rows[0]
    second = program("take", "t", "--group", "g").rows[0]
    nothing = program("take", "t", "--group", "g")
    acked = program("ack", taken["handle"], "--json")

    assert (taken["offset"], taken["attempt"], taken["lease_s"]) == (1, 1, 300)
    assert second["offset"] == 2
    assert (nothing.code, nothing.out) == (3, "")
    assert (acked.code, acked.rows[0]["state"]) == (0, "acked")
    assert program("ack", taken["handle"], "--json").rows[0]["state"] == "settled"
    [group] = program("group", "ls", "--json").rows
    assert (group["floor"], group["leases"], group["lag"]) == (1, 1, 1)


def test_a_lease_outlives_a_command_that_is_killed(run: Run, home: Path) -> None:
    run("pub", "t", stdin=lines(1))
    with subprocess.Popen(
        [*PROGRAM, "sub", "t", "--group", "g", "--exec", "exec sleep 60"], cwd=home, env=ENV
    ) as member:
        while not run("group", "ls", "--json").rows:
            pass
        while run("group", "ls", "--json").rows[0]["leases"] == 0:
            pass
        member.send_signal(signal.SIGKILL)
    after_a_member = run("take", "t", "--group", "g", "--wait", "10").rows[0]
    after_a_handle = run("take", "t", "--group", "g")

    assert after_a_member["attempt"] == 2  # the death of a member frees its lease
    assert after_a_handle.code == 3  # the end of the command that took it frees nothing
    assert run("ack", after_a_member["handle"]).code == 0


def test_a_taker_killed_while_it_waits_holds_nothing(run: Run, home: Path) -> None:
    run("pub", "t", stdin=lines(1))
    first = run("take", "t", "--group", "g").rows[0]
    words = [*PROGRAM, "take", "t", "--group", "g", "--wait", "60"]
    with subprocess.Popen(words, cwd=home, env=ENV, stdout=subprocess.PIPE) as waiter:
        with pytest.raises(subprocess.TimeoutExpired):
            waiter.wait(1)
        waiter.send_signal(signal.SIGKILL)

    assert run("nack", first["handle"], "--delay", "0").code == 0
    again = run("take", "t", "--group", "g", "--wait", "10").rows[0]
    assert (again["offset"], again["attempt"]) == (1, 2)


def test_a_waiting_take_gets_the_next_event(run: Run, home: Path) -> None:
    run("init")
    words = [*PROGRAM, "take", "t", "--group", "g", "--wait", "30"]
    with subprocess.Popen(words, cwd=home, env=ENV, stdout=subprocess.PIPE) as waiter:
        run("pub", "t", '{"n": 1}')
        assert waiter.stdout is not None
        assert json.loads(waiter.stdout.read())["payload"] == {"n": 1}
    assert waiter.returncode == 0


def test_a_lease_that_runs_out_comes_again_and_is_lost_to_its_handle(run: Run) -> None:
    run("pub", "t", stdin=lines(1))
    first = run("take", "t", "--group", "g", "--lease", "10ms").rows[0]
    second = run("take", "t", "--group", "g", "--wait", "20").rows[0]

    late = [run(verb, first["handle"], "--json") for verb in ("ack", "nack", "extend")]

    assert (second["offset"], second["attempt"]) == (1, 2)
    assert [(done.code, done.rows[0]["state"]) for done in late] == [(6, "taken")] * 3
    assert run("extend", second["handle"], "--lease", "1h").code == 0
    assert run("ack", second["handle"]).code == 0


def test_the_last_nack_makes_a_dead_letter_with_its_reason(run: Run) -> None:
    run("pub", "t", stdin=lines(1))
    run("sub", "t", "--group", "g", "--from", "end", "--wait", "0.1")
    run("group", "edit", "t", "g", "--max-retries", "0")
    run("group", "seek", "t", "g", "--to", "start")
    taken = run("take", "t", "--group", "g").rows[0]

    done = run("nack", taken["handle"], "--reason", "no paper", "--json")

    assert done.rows[0]["state"] == "dead"
    [letter] = run("dlq", "ls", "t", "--json").rows
    assert letter["error"] == "no paper"
    assert run("group", "ls", "--group", "g", "--json").rows[0]["lag"] == 0


def test_a_handle_of_a_group_that_was_moved_or_removed_settles_nothing(run: Run) -> None:
    run("pub", "t", stdin=lines(1))
    taken = run("take", "t", "--group", "g").rows[0]
    run("group", "seek", "t", "g", "--to", "start")

    assert run("ack", taken["handle"]).code == 3
    run("group", "rm", "t", "g", "--yes")
    assert run("ack", taken["handle"]).code == 3
    assert run("group", "ls", "--json").rows == []


def test_what_is_no_handle_is_refused_before_anything_is_settled(run: Run) -> None:
    run("pub", "t", stdin=lines(1))
    taken = run("take", "t", "--group", "g").rows[0]

    for wrong in ("x", "WzFd", "é", "WzIsInQiLDAsImciLDEsMSwwLCJ4Il0"):
        assert run("ack", taken["handle"], wrong).code == 4
    assert run("group", "ls", "--json").rows[0]["leases"] == 1


def test_taking_from_nothing_says_so(run: Run) -> None:
    assert run("take", "t", "--group", "g").code == 2
    run("init")
    done = run("take", "t", "--group", "g")
    assert (done.code, "there is no topic t" in done.err) == (3, True)
    assert run("group", "ls", "--json").rows == []


def test_a_condition_passes_over_the_others(run: Run) -> None:
    run("pub", "t", stdin=lines(4))

    done = run("take", "t", "--group", "g", "--limit", "9", "--where", "payload.n > 2")

    assert [row["payload"]["n"] for row in done.rows] == [3, 4]
    assert run("group", "ls", "--json").rows[0]["lag"] == 2


def test_a_reader_that_left_gets_no_lease(run: Run, home: Path) -> None:
    run("pub", "t", stdin=lines(1))
    command = [*PROGRAM, "take", "t", "--group", "g", "--limit", "5"]
    with subprocess.Popen(command, cwd=home, env=ENV, stdout=subprocess.PIPE) as taker:
        assert taker.stdout is not None
        taker.stdout.close()
    again = run("take", "t", "--group", "g").rows[0]
    assert (again["offset"], again["attempt"]) == (1, 1)


def test_why_gives_no_time_to_a_lease_of_unknown_length(run: Run) -> None:
    run("pub", "t", stdin=lines(1))
    [event] = run("get", "t", "1", "--json").rows
    run("ack", run("take", "t", "--group", "g", "--lease", "5m").rows[0]["handle"])

    steps = run("why", event["id"], "--json").rows

    assert [step["what"] for step in steps] == ["published", "delivered", "settled"]
    assert [bool(step.get("at")) for step in steps] == [True, False, False]
