"""``--limit`` and ``--budget``: no command prints more than its reader can take."""

from __future__ import annotations

import pytest

from .conftest import Run, lines


@pytest.fixture(autouse=True)
def bus(run: Run) -> None:
    run("pub", "t", stdin=lines(30))
    run("topic", "create", "u")
    run("sub", "t", "--group", "g", "--count", "1", "--wait", "5")
    run("sub", "t", "--group", "h", "--count", "1", "--wait", "5")


RECORDS = [
    ("get", "t", "1:"),
    ("tail", "t", "-n", "30"),
    ("grep", "t", "."),
    ("sub", "t", "--from", "1:30"),
]
LISTS = [("topic", "ls"), ("group", "ls")]


@pytest.mark.parametrize("words", RECORDS)
def test_records_stop_at_a_limit_and_at_a_budget(run: Run, words: tuple[str, ...]) -> None:
    limited = run(*words, "--limit", "3", "--json")
    assert (limited.code, len(limited.rows)) == (0, 3)
    short = run(*words, "--budget", "500", "--json")
    assert 1 < len(short.rows) < 30
    assert len(short.out) <= 500
    assert "there is more" in short.err
    assert len(run(*words, "--budget", "1", "--json").rows) == 1  # a long one blocks nobody


@pytest.mark.parametrize("words", LISTS)
def test_lists_stop_at_a_limit_and_at_a_budget(run: Run, words: tuple[str, ...]) -> None:
    for bound in (("--limit", "1"), ("--budget", "1")):
        listed = run(*words, *bound, "--json")
        assert (listed.code, len(listed.rows)) == (0, 1)
        assert "1 more, of 2" in listed.err
    assert len(run(*words, "--limit", "2", "--json").rows) == 2


def test_a_member_acks_what_it_printed_and_nothing_else(run: Run) -> None:
    shown = run("sub", "t", "--group", "new", "--budget", "400", "--wait", "5", "--json")
    assert 1 < len(shown.rows) < 30
    (row,) = run("group", "ls", "--group", "new", "--json").rows
    assert row["floor"] == len(shown.rows)
    more = run("sub", "t", "--group", "new", "--limit", "2", "--wait", "5", "--json")
    assert [row["offset"] for row in more.rows] == [len(shown.rows) + 1, len(shown.rows) + 2]


def test_claims_stop_at_a_limit(run: Run) -> None:
    for path in ("a", "b", "c"):
        run("claim", path, "--actor", "ann")
    listed = run("claims", "--limit", "2", "--json")
    assert [row["path"] for row in listed.rows] == ["a", "b"]
    assert "there is more" in listed.err
    assert len(run("claims", "--budget", "1", "--json").rows) == 1
