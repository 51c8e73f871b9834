"""dlq ls, show, redrive and drop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import trunkline
from trunkline import GroupOptions, Reject

from .conftest import Run, lines


def reject(topic: str, group: str, count: int) -> None:
    """Let a group give up what it gets."""

    async def run() -> None:
        async with trunkline.connect("file:.bus") as bus:
            done = 0
            async with bus.subscribe(topic, group=group, policy=GroupOptions()) as deliveries:
                async for delivery in deliveries:
                    await delivery.term(f"no \x1b[31m{delivery.offset}")
                    done += 1
                    if done == count:
                        break

    asyncio.run(run())


@pytest.fixture(autouse=True)
def bus(run: Run) -> None:
    run("pub", "t", stdin=lines(4))
    reject("t", "g", 4)


def open_letters(run: Run, *words: str) -> list[int]:
    return [row["letter"] for row in run("dlq", "ls", *words, "--json").rows]


def test_ls_shows_what_was_given_up_by_whom_and_why(run: Run) -> None:
    run("pub", "u", "1")
    reject("u", "h", 1)

    rows = run("dlq", "ls", "--json").rows

    assert [(row["topic"], row["offset"], row["group"], row["reason"]) for row in rows] == [
        *(("t", n, "g", "rejected") for n in (1, 2, 3, 4)),
        ("u", 1, "h", "rejected"),
    ]
    assert rows[0]["error"] == "no \x1b[31m1"
    assert open_letters(run, "u") == [1]
    assert open_letters(run, "t.DLQ") == [1, 2, 3, 4]
    assert open_letters(run, "--group", "h") == [1]
    assert open_letters(run, "t", "--where", "payload.n >= 3") == [3, 4]


def test_a_person_sees_no_control_characters(run: Run) -> None:
    listed = run("dlq", "ls", "t").out
    shown = run("dlq", "show", "t", "1").out

    assert "\x1b" not in listed + shown
    assert "no \\x1b[31m1" in listed


def test_show_has_the_event(run: Run) -> None:
    (row,) = run("dlq", "show", "t", "2", "--json").rows

    assert (row["letter"], row["offset"], row["event"]["payload"]) == (2, 2, {"n": 2})
    assert "rejected" in run("dlq", "show", "t", "2").out
    assert run("dlq", "show", "t", "9").code == 3
    assert run("dlq", "show", "nope", "1").code == 3


def test_redrive_gives_records_back_to_that_group_only(run: Run) -> None:
    run("sub", "t", "--group", "other", "--wait", "0.2")

    shown = run("dlq", "redrive", "t", "--where", "payload.n > 2", "--dry-run", "--json")
    assert open_letters(run) == [1, 2, 3, 4]
    done = run("dlq", "redrive", "t", "--where", "payload.n > 2")

    assert [row["letter"] for row in shown.rows] == [3, 4]
    assert done.out.endswith("2 redriven\n")
    assert open_letters(run) == [1, 2]
    again = run("sub", "t", "--group", "g", "--wait", "0.3").rows
    assert [(row["offset"], row["attempt"]) for row in again] == [(3, 1), (4, 1)]
    assert run("sub", "t", "--group", "other", "--wait", "0.2").rows == []
    closed = run("dlq", "ls", "--closed", "--json").rows
    assert [row["open"] for row in closed] == [True, True, False, False]


def test_redrive_takes_letters_by_number(run: Run) -> None:
    assert run("dlq", "redrive", "t", "2", "--rate", "100").code == 0
    assert open_letters(run) == [1, 3, 4]


@pytest.mark.parametrize("verb", ["redrive", "drop --yes"])
def test_a_letter_that_is_not_open_keeps_the_others_from_being_done(run: Run, verb: str) -> None:
    run("dlq", "redrive", "t", "2")
    missing = run("dlq", *verb.split(), "t", "1", "2", "99")
    assert (missing.code, "no open letter 2 99 of t" in missing.err) == (3, True)
    assert run("dlq", *verb.split(), "t", "1", "--group", "another").code == 3
    assert open_letters(run) == [1, 3, 4]


def test_letters_by_number_are_those_of_one_topic(run: Run) -> None:
    run("pub", "u", "1")
    reject("u", "h", 1)
    several = run("dlq", "redrive", "*", "1")
    assert (several.code, "more than one topic" in several.err) == (3, True)
    assert run("dlq", "redrive", "*").out.endswith("5 redriven\n")


@pytest.mark.parametrize("rate", ["0", "-1", "nan", "inf", "x"])
def test_a_rate_is_above_nothing(run: Run, rate: str) -> None:
    assert run("dlq", "redrive", "t", "--rate", rate).code == 4
    assert open_letters(run) == [1, 2, 3, 4]


def test_what_came_back_too_often_is_left_alone(run: Run) -> None:
    run("dlq", "redrive", "t", "1")
    reject("t", "g", 1)

    refused = run("dlq", "redrive", "t", "--max-redrives", "1", "--json")

    assert refused.code == 1
    last = refused.rows[-1]
    assert (last["offset"], last["redrives"], last["refused"]) == (1, 1, "redriven once already")
    assert run("dlq", "redrive", "t").code == 0


def test_drop_shows_then_asks_then_closes(run: Run) -> None:
    shown = run("dlq", "drop", "t", "--group", "g", "--dry-run")
    refused = run("dlq", "drop", "t")
    assert open_letters(run) == [1, 2, 3, 4]
    run("dlq", "drop", "t", "1", "3", "--yes")

    assert shown.out.endswith("4 would be dropped\n")
    assert refused.code == 4
    assert open_letters(run) == [2, 4]
    asked = run("dlq", "drop", "t", "--group", "g", "--where", "payload.n = 2").err
    assert "drop all open letters of t that g gave up where payload.n = 2?" in asked
    (dropped,) = run("dlq", "drop", "t", "2", "--yes", "--json").rows
    assert (dropped["letter"], dropped["open"]) == (2, False)
    assert run("sub", "t", "--group", "g", "--wait", "0.2").rows == []


def test_a_topic_without_dead_letters_has_none(run: Run) -> None:
    run("pub", "fine", "1")

    done = run("dlq", "ls", "fine")

    assert (done.code, done.out) == (0, "there are no dead letters\n")
    assert run("dlq", "ls", "nope").code == 3
    assert run("dlq", "redrive", "fine").out == "0 redriven\n"
    assert Reject("x").reason == "x"


@pytest.mark.parametrize("rate", ["0", "-1", "x", "nan", "inf"])
def test_a_rate_is_a_number_above_0(run: Run, rate: str) -> None:
    done = run("dlq", "redrive", "t", f"--rate={rate}")

    assert (done.code, f"not a number above 0: '{rate}'" in done.err) == (4, True)


def test_the_doctor_speaks_of_a_damaged_desk(run: Run, home: Path) -> None:
    run("dlq", "drop", "t", "1", "--yes")
    for path in (home / ".bus" / "offsets").glob("t.DLQ__*"):
        if not path.name.endswith(".lock"):
            path.write_bytes(b"\0" * path.stat().st_size)

    done = run("doctor", "--json")

    assert (done.code, done.rows[0]["where"]) == (1, "t.DLQ")
    assert run(*done.rows[0]["remedy"].split()[1:]).code == 0
    assert run("doctor").code == 0


def test_the_group_that_keeps_the_books_is_shown_when_asked_for(run: Run) -> None:
    run("dlq", "ls")
    run("dlq", "drop", "t", "1", "--yes")

    def groups(*words: str) -> list[str]:
        return [row["group"] for row in run("group", "ls", *words, "--json").rows]

    assert groups() == ["g"]
    assert groups("t.DLQ") == []
    assert groups("--all") == ["g", "desk"]
    assert groups("--group", "desk") == ["desk"]
    assert run("group", "ls", "-q").out == "g\n"
    assert run("group", "ls", "t.DLQ").out == "there are no groups\n"
    assert run("topic", "info", "t.DLQ", "--json").rows[0]["groups"] == []
    counts = {row["topic"]: row["groups"] for row in run("topic", "ls", "--json").rows}
    assert counts == {"t": 1, "t.DLQ": 0}
    assert run("group", "info", "t.DLQ", "desk").code == 0


def test_nobody_consumes_as_the_desk(run: Run) -> None:
    """It would close letters that nobody has looked at."""
    for topic in ("t.DLQ", "*.DLQ"):
        done = run("sub", topic, "--group", "desk", "--wait", "0.1")
        assert (done.code, done.out) == (4, "")
        assert "trunkline dlq" in done.err
    assert open_letters(run) == [1, 2, 3, 4]
    assert len(run("sub", "t", "--group", "desk", "--count", "4", "--wait", "5").rows) == 4


def test_what_was_compacted_away_is_not_redriven_and_its_letter_stays(run: Run) -> None:
    for n in (1, 2):
        run("pub", "prices", f'{{"n":{n}}}', "--key", "k")
    reject("prices", "g", 2)
    run("topic", "compact", "prices", "--all", "--yes")

    assert run("dlq", "redrive", "prices", "--dry-run").code == 1
    told = run("dlq", "redrive", "prices", "--json")

    assert told.code == 1
    assert [(row["offset"], row["refused"]) for row in told.rows] == [
        (1, "its record was removed"),
        (2, ""),
    ]
    assert open_letters(run, "prices") == [1]


def test_letters_that_a_reader_of_letters_gave_up_are_listed_apart(run: Run) -> None:
    reject("t.DLQ", "reader", 2)

    rows = run("dlq", "ls", "--json").rows
    assert [(row["topic"], row["offset"], row["group"]) for row in rows] == [
        *(("t", n, "g") for n in (1, 2, 3, 4)),
        *(("t.DLQ", n, "reader") for n in (1, 2)),
    ]
    assert open_letters(run, "t.DLQ.DLQ") == [1, 2]
    assert run("dlq", "show", "t.DLQ.DLQ", "1", "--json").rows[0]["topic"] == "t.DLQ"
    assert run("dlq", "redrive", "t.DLQ.DLQ", "1").code == 0
    assert open_letters(run, "t.DLQ.DLQ") == [2]
    assert open_letters(run, "t") == [1, 2, 3, 4]


def test_at_a_narrow_terminal_no_column_and_no_word_of_an_error_is_cut(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("pub", "orders.eu", stdin=lines(3))
    reject("orders.eu", "billing", 3)
    monkeypatch.setattr("trunkline.cli.dead.is_terminal", lambda: True)
    monkeypatch.setattr("trunkline.cli.render.is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    shown = run("dlq", "ls", "orders.eu").out
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= 80
    assert "billing" in shown
    assert "orders.eu 1: no" in shown
    assert "…" not in shown
