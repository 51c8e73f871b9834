"""sub --exec: the exit code of a command settles its event."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

from .conftest import ENV, PROGRAM, Run, lines


def until(path: Path) -> str:
    """The text of a file that a command is about to write."""
    for _ in range(1000):
        if path.exists() and (text := path.read_text("utf-8")):
            return text
        time.sleep(0.02)
    raise AssertionError(f"{path} was not written")


def test_a_command_gets_payload_attempt_place_key_and_headers(run: Run, home: Path) -> None:
    run("pub", "t", '{"n": 1}', "--key", "k", "-H", "x-region:eu", "--type", "made")
    script = "cat > payload; env | grep ^EVENT_ > vars"

    done = run("sub", "t", "--group", "g", "--exec", script, "--count", "1", "--wait", "20")

    told = dict(line.split("=", 1) for line in (home / "vars").read_text("utf-8").splitlines())
    assert done.code == 0
    assert json.loads((home / "payload").read_text("utf-8")) == {"n": 1}
    assert told["EVENT_TOPIC"] == "t"
    assert (told["EVENT_OFFSET"], told["EVENT_ATTEMPT"], told["EVENT_KEY"]) == ("1", "1", "k")
    assert (told["EVENT_TYPE"], told["EVENT_HEADER_X_REGION"]) == ("made", "eu")
    assert json.loads(told["EVENT_HEADERS"]) == {"x-region": "eu"}
    assert run("group", "ls", "--json").rows[0]["lag"] == 0


def test_75_retries_in_silence_and_another_code_nacks_aloud(program: Run, home: Path) -> None:
    program("pub", "t", stdin=lines(1))
    script = "echo $EVENT_ATTEMPT >> tries; case $EVENT_ATTEMPT in 1) exit 75;; 2) exit 74;; esac"

    done = program("sub", "t", "--group", "g", "--exec", script, "--count", "3", "--wait", "30")

    assert (home / "tries").read_text("utf-8").split() == ["1", "2", "3"]
    assert done.err.splitlines() == ["trunkline: t/0@1 attempt 2: exit code 74"]
    assert program("group", "ls", "--json").rows[0]["lag"] == 0


def test_a_command_that_always_fails_leaves_a_dead_letter(run: Run) -> None:
    run("pub", "t", stdin=lines(1))
    run("sub", "t", "--group", "g", "--from", "end", "--wait", "0.1")
    run("group", "edit", "t", "g", "--max-retries", "1", "--backoff-base-s", "10ms")
    run("group", "seek", "t", "g", "--to", "start")

    run("sub", "t", "--group", "g", "--exec", "kill -TERM $$", "--count", "2", "--wait", "20")

    [letter] = run("dlq", "ls", "t", "--json").rows
    assert (letter["attempts"], letter["error"]) == (2, "the command was ended by SIGTERM")


def test_a_member_killed_at_work_loses_nothing(run: Run, home: Path) -> None:
    run("pub", "t", stdin=lines(3))
    words = [*PROGRAM, "sub", "t", "--group", "g", "--exec", "echo x >> begun; exec sleep 60"]
    with subprocess.Popen(words, cwd=home, env=ENV, start_new_session=True) as member:
        until(home / "begun")
        member.send_signal(signal.SIGKILL)

    again = "echo $EVENT_OFFSET $EVENT_ATTEMPT >> done"
    run("sub", "t", "--group", "g", "--exec", again, "--count", "3", "--wait", "20")

    assert sorted((home / "done").read_text("utf-8").splitlines()) == ["1 2", "2 1", "3 1"]


def test_sigterm_lets_the_command_finish(run: Run, home: Path) -> None:
    run("pub", "t", stdin=lines(2))
    words = [
        *PROGRAM,
        "sub",
        "t",
        "--group",
        "g",
        "--exec",
        "echo x >> begun; sleep 1; echo x > end",
    ]
    with subprocess.Popen(words, cwd=home, env=ENV) as member:
        until(home / "begun")
        member.send_signal(signal.SIGTERM)
        assert member.wait(20) == 0

    assert (home / "end").exists()
    [group] = run("group", "ls", "--json").rows
    assert (group["floor"], group["lag"], group["leases"]) == (1, 1, 0)


def test_exec_is_for_a_group_alone(run: Run) -> None:
    run("pub", "t", "1")
    assert run("sub", "t", "--exec", "true").code == 4
    assert run("sub", "t", "--group", "g", "--ack", "none", "--exec", "true").code == 4
    assert run("sub", "t", "--group", "g", "--format", "%o", "--exec", "true").code == 4
