"""What a person is told: help, guesses, tables, and messages that say what to do."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from trunkline.cli import GROUPS, VERBS
from trunkline.cli.render import Printer, fit, short

from .conftest import Run, Start, lines


def test_the_program_alone_prints_grouped_help_with_examples(run: Run) -> None:
    alone = run()
    assert (alone.code, alone.err) == (0, "")
    assert alone.out == run("--help").out == run("help").out
    for verb, (_, about) in VERBS.items():
        assert f"  {verb:<10} {about}\n" in alone.out
    for title, _ in GROUPS:
        assert f"\n{title}\n" in alone.out
    assert "trunkline pub orders" in alone.out
    assert max(map(len, alone.out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("pubb", "there is no command 'pubb': did you mean pub?"),
        ("lag", "there is no command 'lag': did you mean group lag?"),
        ("seek t g", "there is no command 'seek': did you mean group seek?"),
        ("topic lst", "there is no command 'lst': did you mean ls?"),
        ("qqqq", "there is no command 'qqqq': trunkline help lists them"),
        ("topic ls --jsn", "there is no option --jsn: did you mean --json?"),
        ("pub t 1 --priority hgh", "there is no value 'hgh': did you mean high?"),
        ("pub t 1 --priority zzz", "there is no value 'zzz': there are "),
        ("topic create t --retention-bytes 5XB", "'5XB' is not bytes, or 64KiB, 10MiB, 2GiB"),
        ("group edit t g --max-retries -1", "-1 is below 0"),
        ("topic create t --partitions 5000", "partitions must be a whole number <= 1024"),
        ("grep t --where 'payload.id = \"x\"'", "text stands in single quotes: 'x'"),
        ("grep t --where 'error = 1'", 'of a dead letter: headers."dlq-error"'),
        ("grep t --where 'nam = 1'", "a field of the payload is payload.nam"),
        ("grep t --where 'prioritty = 1'", "did you mean priority?"),
        ("grep t --where 'type = placed'", "text stands in single quotes: 'placed'"),
        ("grep t --where 'ts > now()'", "there is no function now"),
        ("grep t --where \"priority > 'low'\"", "priority in ('high', 'critical')"),
        ("grep t --where 'payload.id ='", "a value is missing behind the operator"),
    ],
)
def test_a_slip_is_told_with_what_was_meant(run: Run, words: str, said: str) -> None:
    run("pub", "t", "1")
    run("sub", "t", "--group", "g", "--wait", "0.1")
    done = run(*shlex.split(words))
    assert (done.code, done.err.count("\n")) == (4, 1), done.err
    assert said in done.err
    assert "Options:" not in done.err  # no class of ours
    assert "known options" not in done.err  # a list is noise beside a wrong value


def test_a_folder_that_goes_away_is_named(start: Start, run: Run, home: Path) -> None:
    run("pub", "t", "1")
    process = start("sub", "t", "--from", "start")
    assert process.stdout is not None
    assert '"payload":1' in process.stdout.readline()
    shutil.rmtree(home / ".bus")
    _, err = process.communicate(timeout=30)
    assert process.returncode == 2
    assert f"the bus at {home}/.bus is gone: the folder was removed or moved" in err
    assert err.count("\n") == 1


def test_nobody_is_said_where_nobody_holds_a_claim(run: Run) -> None:
    assert run("claims").err == "trunkline: there are no claims here\n"
    assert run("claims", "--json").err == ""


def test_doctor_says_what_to_do_about_lost_options(run: Run, home: Path) -> None:
    run("pub", "t", "1")
    run("topic", "create", "u", "--compact")
    (home / ".bus" / "topics.json").write_text("{")
    done = run("doctor")
    assert "move it away and set the options again by trunkline topic edit" in done.out
    assert "by hand" not in done.out


# -- tables ------------------------------------------------------------------------------------


def test_a_wide_table_is_cut_to_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trunkline.cli.render.is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    long = "a very long reason that no terminal has room for " * 4
    rows = [
        {
            "letter": n,
            "topic": "orders.placed.eu",
            "partition": 0,
            "group": "billing",
            "error": long,
        }
        for n in (1, 2)
    ]
    args = argparse.Namespace(json=False, quiet=False, no_color=True)
    capsys.readouterr()
    Printer(args).table(rows, ("letter", "topic", "partition", "group", "error"))
    shown = capsys.readouterr().out.rstrip("\n").splitlines()
    assert max(len(line.rstrip()) for line in shown) <= 80
    assert any("orders.placed.eu" in line for line in shown)  # only the widest is cut
    assert any("…" in line for line in shown)


def test_fit_leaves_a_table_that_fits_as_it_is() -> None:
    lines_ = [["topic", "lag"], ["orders", "3"]]
    assert fit(lines_, 80) == lines_


def test_a_column_that_says_nothing_is_left_out(run: Run) -> None:
    run("pub", "orders", stdin=lines(3))
    run("sub", "orders", "--group", "billing", "--count", "1", "--wait", "5")
    head = run("group", "ls").out.splitlines()[0].split()
    assert head == ["topic", "group", "floor", "lag", "members"]  # nobody is there: that is news
    run("group", "pause", "orders", "billing")
    assert "paused" in run("group", "ls").out.splitlines()[0].split()
    assert run("group", "ls", "--json").rows[0]["scheduled"] == 0


def test_a_time_in_a_table_is_short() -> None:
    assert short("2020-01-02T03:04:05.678901Z") == "2020-01-02"
    now = datetime.now(UTC)
    assert short(now) == f"{now:%H:%M:%S}"
    assert short("orders") == "orders"


def test_group_ls_watches(start: Start, run: Run) -> None:
    run("pub", "orders", stdin=lines(3))
    run("sub", "orders", "--group", "billing", "--count", "1", "--wait", "5")
    process = start("group", "ls", "--watch", "0.1")
    assert process.stdout is not None
    seen = [process.stdout.readline() for _ in range(6)]
    process.terminate()
    assert sum(line.startswith("topic") for line in seen) == 2


def test_top_shows_rates_and_lags(start: Start, run: Run) -> None:
    run("pub", "orders", stdin=lines(3))
    run("sub", "orders", "--group", "billing", "--count", "1", "--wait", "5")
    process = start("top", "--every", "0.2", "--json")
    assert process.stdout is not None
    topic, group = (json.loads(process.stdout.readline()) for _ in range(2))
    assert (topic["in_s"], group["lag"]) == (None, 2)
    run("pub", "orders", stdin=lines(4))
    rows = map(json.loads, process.stdout)
    assert next(row["in_s"] for row in rows if row.get("in_s")) > 0
    assert next(row["lag"] for row in rows if row.get("lag") == 6)
    process.terminate()
    assert run("top", "--count", "1").out.splitlines()[0].split() == [
        *("topic", "partitions", "records", "in_s")
    ]
