"""topic ls, info, create, edit, rm, purge and compact."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from trunkline.cli.flags import MEANING
from trunkline.options import TopicOptions

from .conftest import Run, lines


@pytest.fixture(autouse=True)
def bus(run: Run) -> None:
    run("init")


def options(run: Run, topic: str) -> dict[str, object]:
    found: dict[str, object] = run("topic", "info", topic, "--json").rows[0]["options"]
    return found


def test_each_option_of_a_topic_is_a_flag_with_its_default_and_a_meaning(run: Run) -> None:
    shown = " ".join(run("topic", "create", "--help").out.split())

    for kind, meant in MEANING.items():
        assert list(meant) == list(kind.__struct_fields__)
    for field in msgspec.structs.fields(TopicOptions):
        assert f"--{field.name.replace('_', '-')}" in shown
    assert "at least 1, at most 1024 (default: 1)" in shown
    assert "at least 1048576, at most 104857600 (default: 67108864)" in shown


def test_create_stores_what_was_asked_for_and_nothing_else(run: Run, home: Path) -> None:
    done = run(
        *("topic", "create", "t", "--partitions", "3", "--durability", "os", "--compress"),
        *("--segment-bytes", "2MiB", "--retention-age-s", "7d", "--no-retain-unsettled"),
    )

    stored = json.loads((home / ".bus" / "topics.json").read_text())
    assert done.code == 0
    assert stored.keys() == {"t", "__crc"}
    assert stored == stored | {
        "t": {
            "partitions": 3,
            "durability": "os",
            "segment_bytes": 2 * 1024 * 1024,
            "compress": True,
            "retention_age_s": 604800.0,
            "retain_unsettled": False,
        }
    }


def test_create_again_is_fine_with_the_same_options_and_a_conflict_with_others(run: Run) -> None:
    run("topic", "create", "t", "--partitions", "2")

    assert run("topic", "create", "t", "--partitions", "2").code == 0
    other = run("topic", "create", "t")
    assert (other.code, "trunkline topic edit t" in other.err) == (1, True)


@pytest.mark.parametrize(
    "words",
    [
        ("--partitions", "0"),
        ("--partitions", "2000"),
        ("--partitions", "two"),
        ("--partitions", "1K"),
        ("--segment-bytes", "1"),
        ("--durability", "maybe"),
        ("--retention-age-s", "-1"),
        ("--nonsense",),
    ],
)
def test_an_option_out_of_bounds_is_refused(run: Run, words: tuple[str, ...]) -> None:
    assert run("topic", "create", "t", *words).code == 4
    assert run("topic", "ls", "--json").rows == []


def test_edit_changes_one_option_and_keeps_the_others(run: Run) -> None:
    run("topic", "create", "t", "--partitions", "2", "--compact", "--retention-records", "5")

    run("topic", "edit", "t", "--retention-bytes", "1GiB", "--no-compact")
    first = options(run, "t")
    run("topic", "edit", "t", "--unset", "retention-bytes", "--retention-records", "none")
    second = options(run, "t")

    assert (first["partitions"], first["compact"], first["retention_bytes"]) == (2, False, 2**30)
    assert (second["retention_bytes"], second["retention_records"]) == (None, None)
    assert run("topic", "edit", "t").code == 4
    assert run("topic", "edit", "t", "--unset", "colour").code == 4
    done = run("topic", "edit", "t", "--unset", "retention-age-s", "--retention-age-s", "3d")
    assert (done.code, "--unset retention_age_s and a value for it" in done.err) == (4, True)
    assert run("topic", "edit", "nope", "--compact").code == 3
    assert run("topic", "edit", "t", "--partitions", "1").code == 1


def test_ls_shows_topics_that_were_defined_and_those_that_were_published_to(run: Run) -> None:
    run("topic", "create", "a.x")
    run("pub", "a.y", stdin=lines(3))
    run("pub", "b", "1")
    run("sub", "b", "--group", "g", "--wait", "0.1")

    rows = run("topic", "ls", "--json").rows

    assert [(row["topic"], row["records"], row["groups"]) for row in rows] == [
        ("a.x", 0, 0),
        ("a.y", 3, 0),
        ("b", 1, 1),
    ]
    assert rows[1]["bytes"] > 100
    assert run("topic", "ls", "a.*", "-q").out == "a.x\na.y\n"
    assert run("topic", "ls").out.splitlines()[0].split() == [
        *("topic", "partitions", "records", "size", "groups")
    ]


def test_info_shows_options_partitions_and_groups(run: Run) -> None:
    run("topic", "create", "t", "--partitions", "2")
    run("pub", "t", stdin=lines(10))
    run("sub", "t", "--group", "g", "--count", "4", "--wait", "5")

    (info,) = run("topic", "info", "t", "--json").rows
    text = run("topic", "info", "t").out

    parts = [(p["partition"], p["first"], p["next"], p["segments"]) for p in info["partitions"]]
    assert parts == [(0, 1, 6, 1), (1, 1, 6, 1)]
    assert sum(group["lag"] for group in info["groups"]) == 6
    assert "partitions 2 *" in " ".join(text.split())
    assert run("topic", "info", "nope").code == 3


def test_rm_shows_then_asks_then_removes(run: Run, home: Path) -> None:
    run("pub", "t", stdin=lines(3))
    run("sub", "t", "--group", "g", "--wait", "0.1")

    shown = run("topic", "rm", "t", "--dry-run")
    refused = run("topic", "rm", "t")
    assert run("topic", "ls", "-q").out == "t\n"
    removed = run("topic", "rm", "t", "--yes")

    assert "would remove t: 3 records" in shown.out
    assert "groups g" in shown.out
    assert (refused.code, removed.code) == (4, 0)
    assert "--yes" in refused.err
    assert run("topic", "ls", "-q").out == ""
    assert list((home / ".bus" / "wal").iterdir()) == []
    assert run("topic", "rm", "t", "--yes").code == 3


def test_purge_removes_records_and_keeps_the_offsets_going(run: Run) -> None:
    run("pub", "t", stdin=lines(10))
    run("sub", "t", "--group", "g", "--count", "2", "--wait", "5")

    (shown,) = run("topic", "purge", "t", "--before", "-4", "--dry-run", "--json").rows
    assert len(run("get", "t", "1:").rows) == 10
    assert run("topic", "purge", "t", "--before", "-4").code == 4
    run("topic", "purge", "t", "--before", "-4", "--yes")

    assert (shown["first"], shown["before"], shown["records"], shown["unsettled"]) == (1, 7, 6, 4)
    assert [row["offset"] for row in run("get", "t", "1:").rows] == [7, 8, 9, 10]
    assert run("group", "ls", "--json").rows[0]["lag"] == 4
    rest = run("sub", "t", "--group", "g", "--wait", "0.2").rows
    assert [row["offset"] for row in rest] == [7, 8, 9, 10]
    run("topic", "purge", "t", "--yes")
    assert run("get", "t", "1:").code == 3
    assert run("pub", "t", "1", "--json").rows[0]["offset"] == 11


def test_compact_keeps_the_latest_record_of_each_key(run: Run) -> None:
    for n in range(6):
        run("pub", "t", str(n), "--key", "ab"[n % 2])
    run("pub", "t", "null", "--key", "a")
    run("pub", "t", '"keyless"')

    assert run("topic", "compact", "t", "--dry-run", "--json").rows[0]["records"] == 0
    assert run("topic", "compact", "t", "--dry-run", "--all", "--json").rows[0]["records"] == 6
    assert run("topic", "compact", "t", "--all").code == 4
    done = run("topic", "compact", "t", "--all", "--yes")

    assert done.out == "removed 6 superseded records of t\n"
    assert [row["payload"] for row in run("get", "t", "1:").rows] == [5, "keyless"]
    assert run("get", "t", "1").code == 3
    assert run("tail", "t", "-n", "2").rows[0]["payload"] == 5
    assert run("topic", "ls", "--json").rows[0]["records"] == 2
    assert run("verify", "--json").rows[0] == {"ok": True, "topics": 1, "records": 2}


def test_compact_keeps_what_a_group_has_not_settled(run: Run) -> None:
    run("pub", "t", "--key", "a", stdin=lines(4))
    run("sub", "t", "--group", "g", "--count", "2", "--wait", "5")

    shown = run("topic", "compact", "t", "--all", "--dry-run", "--json").rows[0]["records"]
    run("topic", "compact", "t", "--all", "--yes")

    assert shown == 2
    assert [row["offset"] for row in run("get", "t", "1:").rows] == [3, 4]


def test_compact_keeps_what_the_lake_does_not_have(run: Run) -> None:
    run("topic", "create", "t", "--retain-for-lake")
    run("pub", "t", "--key", "a", stdin=lines(4))

    shown = run("topic", "compact", "t", "--all", "--dry-run", "--json").rows[0]["records"]
    done = run("topic", "compact", "t", "--all", "--yes", "--json").rows[0]["records"]

    assert (shown, done) == (0, 0)
    assert len(run("get", "t", "1:").rows) == 4
