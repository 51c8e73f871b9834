"""group ls, info, seek, pause, resume and rm, beside a running member and without one."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from .conftest import Run, Start, lines


@pytest.fixture(autouse=True)
def bus(run: Run) -> None:
    run("pub", "t", stdin=lines(10))


def take(run: Run, count: int) -> None:
    run("sub", "t", "--group", "g", "--count", str(count), "--wait", "5")


def test_ls_tells_how_far_each_group_is(run: Run) -> None:
    take(run, 4)
    run("sub", "t", "--group", "h", "--wait", "0.2")

    rows = run("group", "ls", "--json").rows

    assert rows == [
        {
            "topic": "t",
            "partition": 0,
            "group": group,
            "floor": floor,
            "lag": 10 - floor,
            "scheduled": 0,
            "next_due": None,
            "leases": 0,
            "waiting": 0,
            "paused": False,
            "members": 0,
        }
        for group, floor in (("g", 4), ("h", 10))
    ]
    assert run("group", "ls", "-q").out == "g\nh\n"
    assert [row["group"] for row in run("group", "ls", "t", "--group", "h", "--json").rows] == ["h"]
    assert run("group", "ls", "other.*", "--json").rows == []
    assert run("group", "ls").out.split()[:3] == ["topic", "group", "floor"]


@pytest.mark.parametrize(
    ("to", "following"),
    [("start", 1), ("end", 11), ("7", 7), ("-2", 9), ("+2", 3), ("99", 11), ("@-1h", 1)],
)
def test_seek_moves_a_group(run: Run, to: str, following: int) -> None:
    take(run, 4)

    (shown,) = run("group", "seek", "t", "g", "--to", to, "--dry-run", "--json").rows
    assert run("group", "ls", "--json").rows[0]["floor"] == 4
    (moved,) = run("group", "seek", "t", "g", "--to", to, "--json").rows

    assert shown | {"dry_run": False} == moved
    assert (moved["from"], moved["to"]) == (5, following)
    rest = run("sub", "t", "--group", "g", "--wait", "0.2").rows
    assert [row["offset"] for row in rest] == list(range(following, 11))


def test_a_place_outside_of_the_log_is_told(run: Run) -> None:
    take(run, 4)
    for to, where in (("99", 11), ("0", 1)):
        done = run("group", "seek", "t", "g", "--to", to, "--json")
        assert (done.code, done.rows[0]["to"]) == (0, where)
        assert f"t/0 holds 1 to 10: not to {to}, to {where}" in done.err
    assert run("group", "seek", "t", "g", "--to", "11").err == ""


def test_what_is_not_there_is_not_found(run: Run) -> None:
    for words in (("info",), ("seek", "--to", "1"), ("pause",), ("resume",), ("rm", "--yes")):
        assert run("group", words[0], "t", "nope", *words[1:]).code == 3
    assert run("group", "seek", "t", "g").code == 4
    assert run("group", "seek", "t", "g", "--to", "1:2").code == 4


def test_a_paused_group_gets_nothing_until_it_is_resumed(run: Run) -> None:
    take(run, 2)

    run("group", "pause", "t", "g")
    paused = run("sub", "t", "--group", "g", "--wait", "0.2").rows
    run("group", "resume", "t", "g")
    resumed = run("sub", "t", "--group", "g", "--wait", "0.2").rows

    assert paused == []
    assert [row["offset"] for row in resumed] == list(range(3, 11))


def test_a_running_member_is_paused_moved_and_resumed_from_outside(run: Run, start: Start) -> None:
    member = start("sub", "t", "--group", "g")
    assert member.stdout is not None

    def received(count: int) -> list[int]:
        assert member.stdout is not None
        return [json.loads(member.stdout.readline())["offset"] for _ in range(count)]

    assert received(10) == list(range(1, 11))

    run("group", "pause", "t", "g")
    run("pub", "t", "11")
    run("group", "seek", "t", "g", "--to", "9")
    run("group", "resume", "t", "g")

    assert received(3) == [9, 10, 11]


def test_info_shows_what_a_living_member_holds(run: Run, home: Path) -> None:
    from trunkline.folder import Folder
    from trunkline.names import GroupKey

    take(run, 2)
    folder = Folder(str(home / ".bus"))
    key = GroupKey("t", 0, "g")
    member = folder.join()

    def lease(group: object) -> None:
        from trunkline.group import Group

        assert isinstance(group, Group)
        group.offer(3)
        group.take(member, now=folder.clock.monotonic(), wall=0.0, limit=1)

    folder.step(key, lease)
    (held,) = run("group", "info", "t", "g", "--json").rows
    text = run("group", "info", "t", "g").out
    folder.close()
    (freed,) = run("group", "info", "t", "g", "--json").rows

    assert (held["leases"], held["members"]) == (1, 1)
    (row,) = held["held"]
    assert (row["offset"], row["attempt"], row["member"]) == (3, 1, member)
    assert 20 < row["seconds_left"] <= 30
    assert "max_retries=5" in text
    assert member in text
    assert (freed["leases"], freed["held"]) == (0, [])


def test_rm_forgets_a_group(run: Run, home: Path) -> None:
    take(run, 5)

    shown = run("group", "rm", "t", "g", "--dry-run")
    refused = run("group", "rm", "t", "g")
    assert run("group", "ls", "-q").out == "g\n"
    run("group", "rm", "t", "g", "--yes")

    assert (shown.code, refused.code) == (0, 4)
    assert list((home / ".bus" / "offsets").iterdir()) == []


def test_a_pattern_reaches_a_group_on_every_topic(run: Run) -> None:
    run("pub", "a.x", "1")
    run("pub", "a.y", "1")
    run("sub", "a.*", "--group", "g", "--wait", "0.2")

    done = run("group", "seek", "a.*", "g", "--to", "start", "--json")

    assert [(row["topic"], row["from"], row["to"]) for row in done.rows] == [
        ("a.x", 2, 1),
        ("a.y", 2, 1),
    ]


def test_a_damaged_group_is_told_and_seek_begins_it_anew(run: Run, home: Path) -> None:
    take(run, 5)
    for path in (home / ".bus" / "offsets").iterdir():
        path.write_bytes(b"{}\n{}\n")

    listed = run("group", "ls")
    found = run("doctor", "--json")
    done = run("group", "seek", "t", "g", "--to", "4", "--json")

    assert (listed.code, "damaged" in listed.err) == (1, True)
    assert (found.code, "trunkline group seek t g --to" in found.rows[0]["remedy"]) == (1, True)
    assert done.code == 0
    assert done.rows[0]["from"] is None
    assert "default policy" in done.err
    assert run("sub", "t", "--group", "g", "--count", "1").rows[0]["offset"] == 4
    kept = sorted(path.name for path in (home / ".bus" / "quarantine").iterdir())
    assert kept == ["t__g.journal", "t__g.json"]


@pytest.mark.parametrize("ending", ["json", "json.bak", "journal"])
def test_verify_names_a_damaged_file_that_others_stand_in_for(
    run: Run, home: Path, ending: str
) -> None:
    take(run, 2)
    take(run, 3)
    path = home / f".bus/offsets/t__g.{ending}"
    data = path.read_bytes()
    middle = len(data) // 2
    path.write_bytes(data[:middle] + b"\xed\xa0\x80" + data[middle + 3 :])

    found = run("verify", "--json")

    assert found.code == 0  # the group can be read, and no record is damaged
    assert found.rows[0]["path"] == f"offsets/t__g.{ending}"
    assert "the checksum does not fit" in found.rows[0]["problem"]
    (told,) = run("doctor", "--json").rows
    assert (told["level"], told["code"]) == ("warning", "group_file")
    assert told["where"].startswith(f"offsets/t__g.{ending}:")
    assert run("group", "ls", "--json").rows[0]["floor"] == 5


def test_a_group_that_cannot_be_read_is_not_taken_for_none(run: Run, home: Path) -> None:
    run("pub", "t", "1")
    for group in ("a", "b"):
        run("sub", "t", "--group", group, "--count", "1", "--wait", "5s")
    for name in ("json", "json.bak", "journal"):
        (home / f".bus/offsets/t__a.{name}").write_text("garbage\n")

    one = run("group", "ls", "--group", "a")
    assert (one.code, one.out) == (1, "")
    assert "t__a.json is damaged" in one.err
    assert [row["group"] for row in run("group", "ls", "--json").rows] == ["b"]


def test_edit_changes_the_policy_and_keeps_the_place(run: Run) -> None:
    run("topic", "create", "many", "--partitions", "3")
    run("pub", "many", stdin=lines(9))
    run("sub", "many", "--group", "g", "--count", "4", "--wait", "5")
    before = run("group", "info", "many", "g", "--json").rows

    shown = run("group", "edit", "many", "g", "--max-retries", "2", "--dry-run", "--json").rows
    assert run("group", "info", "many", "g", "--json").rows == before
    words = ("--max-retries", "2", "--ack-timeout-s", "2m", "--backoff-mult", "1.5")
    done = run("group", "edit", "many", "g", *words, "--ordering", "none", "--json").rows
    after = run("group", "info", "many", "g", "--json").rows

    wanted = {"max_retries": 2, "ack_timeout_s": 120.0, "backoff_mult": 1.5, "ordering": "none"}
    assert [row["options"]["max_retries"] for row in shown] == [2, 2, 2]
    assert [row["dry_run"] for row in (*shown, *done)] == [True] * 3 + [False] * 3
    assert after == [row | {"options": row["options"] | wanted} for row in before]
    assert [row["options"] for row in done] == [row["options"] for row in after]
    text = run("group", "edit", "many", "g", "-p", "1", "--unset", "ordering", "--max-retries=3")
    assert text.out == "changed g on many/1: max_retries 2 -> 3, ordering none -> key\n"
    again = run("group", "edit", "many", "g", "-p", "1", "--max-retries", "3")
    assert (again.code, again.out) == (0, "g on many/1 has this policy already\n")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("", 4, "nothing to change"),
        ("--max-retries -1", 4, "max-retries"),
        ("--max-retries x", 4, "not a whole number"),
        ("--max-retries 1.5", 4, "not a whole number"),
        ("--backoff-mult nan", 4, "is not a"),
        ("--backoff-mult 0.5", 4, "backoff_mult"),
        ("--ack-timeout-s 0", 4, "ack_timeout_s"),
        ("--ack-timeout-s soon", 4, "not a duration"),
        ("--ordering fifo", 4, "there are key, partition, none"),
        ("--partitions 3", 4, "did you mean --partition?"),
        ("max_retries=3", 4, "unrecognized"),
        ("--unset partitions", 4, "there is no option partitions"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(run: Run, words: str, code: int, said: str) -> None:
    take(run, 1)
    before = run("group", "info", "t", "g", "--json").rows
    done = run("group", "edit", "t", "g", *words.split())
    assert (done.code, done.out) == (code, "")
    assert said in done.err
    assert run("group", "info", "t", "g", "--json").rows == before


def test_a_group_that_is_not_there_is_not_edited(run: Run) -> None:
    done = run("group", "edit", "t", "nobody", "--max-retries", "1")
    assert (done.code, "there is no group nobody on t" in done.err) == (3, True)
    take(run, 1)
    done = run("group", "pause", "t", "g", "-p", "4")
    assert (done.code, "group g on t has no partition 4" in done.err) == (3, True)


async def test_an_edit_beside_running_members_counts_for_them(run: Run, home: Path) -> None:
    """They need not begin again; who comes with the policy of before is told what to do."""
    import trunkline
    from trunkline import GroupOptions
    from trunkline.delivery.deadletters import Letter
    from trunkline.errors import Conflict

    first = GroupOptions(max_retries=50, backoff_base_s=0.0, lookahead=64)
    async with trunkline.connect(f"file:{home / '.bus'}", poll_s=0.02) as bus:
        stream = bus.subscribe("t", group="g", policy=first, max_inflight=1)
        async with stream, asyncio.timeout(60):
            delivery = await anext(stream)
            assert delivery.offset == 1
            done = await asyncio.to_thread(run, "group", "edit", "t", "g", "--max-retries", "1")
            assert done.code == 0
            await delivery.nack()
            delivery = await anext(stream)
            assert (delivery.offset, delivery.attempt) == (1, 2)
            await delivery.nack()
            assert (await anext(stream)).offset == 2, "the first ran out of tries"
            with pytest.raises(Conflict, match="group g on t has another policy") as told:
                async with bus.subscribe("t", group="g", policy=first):
                    pass
            assert "trunkline group edit t g --max-retries 50" in told.value.hint
            letters: list[Letter] = []
            while not letters:  # it is written while the next record is handed out
                letters = [letter async for letter in bus.dead_letters("t").letters()]
                await asyncio.sleep(0.01)
            assert [(one.origin, one.attempts) for one in letters] == [(1, 2)]


def test_a_name_that_no_group_can_have_is_refused(run: Run) -> None:
    assert run("group", "ls", "--group", "a__b").code == 4
    assert run("group", "ls", "--group", "nobody").code == 0


def test_a_partition_that_is_added_has_the_policy_of_the_group(run: Run) -> None:
    take(run, 1)
    run("group", "edit", "t", "g", "--max-retries", "1", "--ordering", "none")
    run("group", "pause", "t", "g")
    run("topic", "edit", "t", "--partitions", "2")
    run("sub", "t", "--group", "g", "--wait", "0.1")
    first, added = run("group", "info", "t", "g", "--json").rows
    assert (added["partition"], added["paused"]) == (1, True)
    assert added["options"] == first["options"]


async def test_idle_members_are_listed_with_their_process(run: Run, home: Path) -> None:
    import trunkline

    async with trunkline.connect(f"file:{home / '.bus'}") as bus:
        await bus.publish("t", 1)
        async with bus.subscribe("t", group="g") as one, bus.subscribe(">", group="g"):
            await (await anext(one)).ack()  # writes the file of what is in hand
            (row,) = (await asyncio.to_thread(run, "group", "info", "t", "g", "--json")).rows
            shown = await asyncio.to_thread(run, "group", "info", "t", "g")
            listed = await asyncio.to_thread(run, "group", "ls")
            health = await asyncio.to_thread(run, "doctor")
        assert "members died" not in health.out
        assert row["members"] == 2
        assert [one["pid"] for one in row["subscribed"]] == [os.getpid()] * 2
        assert {*row["subscribed"][0]} >= {"host", "since", "in_flight", "last_delivery"}
        assert str(os.getpid()) in shown.out
        assert listed.out.split()[-1] == "2"
    gone = await asyncio.to_thread(run, "group", "info", "t", "g")
    assert "no process is subscribed" in gone.out
