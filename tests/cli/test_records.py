"""pub, grep and get."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from .conftest import ENV, PROGRAM, Run, lines


def test_pub_makes_the_bus_and_prints_the_receipt(run: Run, home: Path) -> None:
    done = run("pub", "orders", '{"id":1}', "--key", "c42")

    (record,) = run("get", "orders", "1").rows
    assert done.code == 0
    assert done.out == f"orders/0@1 {record['id']}\n"
    assert (record["key"], record["payload"]) == ("c42", {"id": 1})
    assert (home / ".bus" / "wal" / "orders.00000001.jsonl").exists()


def test_pub_takes_its_payload_before_or_after_the_options(run: Run) -> None:
    run("pub", "orders", "1", "--key", "a")
    run("pub", "orders", "--key", "a", "2")
    run("pub", "--key", "a", "orders", "-3")
    run("pub", "orders", "--key", "a", "-", stdin="4\n")

    assert [row["payload"] for row in run("get", "orders", "1:").rows] == [1, 2, -3, 4]


def test_pub_sets_every_field_of_an_event(run: Run) -> None:
    run(
        *("pub", "orders", '{"id":1}', "--key", "k", "--type", "t", "--actor", "a", "--space"),
        *("s:1", "--subject", "u", "--idem-key", "i", "--trace", "00-1", "--ttl", "10m"),
        *("--priority", "high", "--at", "2030-01-02T03:04:05Z", "--header", "a: b:c", "-H", "d:"),
        *("--band", "RED", "--cap", "x", "--cap", "y", "--cause", "z"),
    )

    (record,) = run("get", "orders", "1").rows

    for name in ("topic", "partition", "offset", "id", "ts"):
        del record[name]
    assert record == {
        "key": "k",
        "type": "t",
        "actor": "a",
        "space": "s:1",
        "subject": "u",
        "idem_key": "i",
        "trace": "00-1",
        "ttl_s": 600,
        "priority": "high",
        "not_before": "2030-01-02T03:04:05Z",
        "headers": {"a": "b:c", "d": ""},
        "band": "RED",
        "caps": ["x", "y"],
        "cause": "z",
        "payload": {"id": 1},
    }


def test_a_delay_counts_from_now(run: Run) -> None:
    before = datetime.now(UTC)
    run("pub", "orders", "1", "--delay", "2h")

    (record,) = run("get", "orders", "1").rows

    late = datetime.fromisoformat(record["not_before"]) - before
    assert timedelta(hours=2) <= late < timedelta(hours=2, minutes=1)


def test_the_actor_comes_from_the_environment(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUNKLINE_ACTOR", "robot")
    run("pub", "orders", "1")
    run("pub", "orders", "1", "--actor", "me")

    assert [row["actor"] for row in run("get", "orders", "1:").rows] == ["robot", "me"]


def test_each_line_of_stdin_is_an_event(run: Run) -> None:
    done = run("pub", "orders", stdin='{"n":1}\n\n[2]\r\n"three"')

    assert done.out == "published 3 events orders/0@1-3\n"
    payloads = [row["payload"] for row in run("get", "orders", "1:").rows]
    assert payloads == [{"n": 1}, [2], "three"]


def test_text_is_published_as_it_is(run: Run) -> None:
    run("pub", "notes", "not json", "--text")
    run("pub", "notes", "--text", stdin="a line\n{}\n")

    assert [row["payload"] for row in run("get", "notes", "1:").rows] == [
        "not json",
        "a line",
        "{}",
    ]


def test_a_line_that_is_no_json_ends_it_and_tells_what_was_published(run: Run) -> None:
    done = run("pub", "orders", stdin='1\n2\n{"x\n4\n')

    assert done.code == 4
    assert "line 3: the payload is not JSON" in done.err
    assert "2 events before it were published (--text publishes plain text)" in done.err
    assert [row["payload"] for row in run("get", "orders", "1:").rows] == [1, 2]


def test_many_lines_are_published_in_batches(program: Run, home: Path) -> None:
    done = program("pub", "orders", "--json", stdin=lines(20_000))

    assert [row["offset"] for row in done.rows] == list(range(1, 20_001))
    text = (home / ".bus" / "wal" / "orders.00000001.jsonl").read_text()
    assert 1 <= text.count('"commit"') < 200


def test_a_line_is_published_when_it_comes_and_not_when_the_pipe_ends(run: Run, home: Path) -> None:
    command = [*PROGRAM, "pub", "orders", "--json"]
    with subprocess.Popen(
        command, stdin=-1, stdout=-1, cwd=home, env={**ENV, "PYTHONUNBUFFERED": "1"}
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"1\n")
        process.stdin.flush()
        first = json.loads(process.stdout.readline())
        assert [row["payload"] for row in run("get", "orders", "1:").rows] == [1]
        process.stdin.close()
    assert first["offset"] == 1
    assert process.returncode == 0


def test_count_repeats_a_payload(run: Run) -> None:
    done = run("pub", "orders", "1", "--count", "2500")

    assert done.out == "published 2500 events orders/0@1-2500\n"
    assert run("topic", "ls", "--json").rows[0]["records"] == 2500


def test_quiet_prints_nothing(run: Run) -> None:
    assert run("pub", "orders", "1", "-q").out == ""


def test_a_duplicate_has_its_own_exit_code_and_the_first_ones_offset(run: Run) -> None:
    run("init")
    run("topic", "create", "orders", "--dedup-window-s", "1h")
    first = run("pub", "orders", "1", "--idem-key", "a")
    run("pub", "orders", "2")

    again = run("pub", "orders", "1", "--idem-key", "a", "--json")

    (stored,) = run("get", "orders", "1").rows
    assert (first.code, again.code) == (0, 5)
    assert [(row["offset"], row["duplicate"]) for row in again.rows] == [(1, True)]
    assert again.rows[0]["id"] == stored["id"]
    assert run("pub", "orders", "1", "--idem-key", "a").out == "orders/0@1 duplicate\n"
    assert first.err == again.err == ""


def test_lines_of_one_idempotency_key_are_all_told_to_be_the_first(run: Run) -> None:
    run("init")
    run("topic", "create", "orders", "--dedup-window-s", "1h")

    done = run("pub", "orders", "--idem-key", "a", "--json", stdin=lines(3))

    assert done.code == 5
    assert [(row["offset"], row["duplicate"]) for row in done.rows] == [
        (1, False),
        (1, True),
        (1, True),
    ]
    assert len({row["id"] for row in done.rows}) == 1


def test_a_duplicate_of_what_was_purged_has_no_id(run: Run) -> None:
    run("init")
    run("topic", "create", "orders", "--dedup-window-s", "1h")
    run("pub", "orders", "1", "--idem-key", "a")
    run("pub", "orders", stdin=lines(1))
    run("topic", "purge", "orders", "--before", "2", "--yes")

    again = run("pub", "orders", "1", "--idem-key", "a", "--json")

    assert again.code == 5
    assert (again.rows[0]["offset"], again.rows[0]["id"]) == (1, None)


def test_an_idempotency_key_that_has_no_effect_is_told(run: Run) -> None:
    run("init")
    run("topic", "create", "orders", "--dedup-window-s", "0")
    done = run("pub", "orders", "1", "--idem-key", "a")

    assert done.code == 0
    assert "--dedup-window-s" in done.err


def test_events_without_a_key_are_spread_and_those_with_one_stay_together(run: Run) -> None:
    run("init")
    run("topic", "create", "orders", "--partitions", "4")
    spread = run("pub", "orders", "--json", stdin=lines(40)).rows
    keyed = run("pub", "orders", "--json", "--key", "k", stdin=lines(40)).rows

    assert [sum(row["partition"] == n for row in spread) for n in range(4)] == [10] * 4
    assert len({row["partition"] for row in keyed}) == 1


@pytest.mark.parametrize(
    "words",
    [
        ("orders", "{"),
        ("or ders", "1"),
        ("../x", "1"),
        ("orders", "1", "--header", "x"),
        ("orders", "1", "--priority", "urgent"),
        ("orders", "1", "--at", "soon"),
        ("orders", "1", "--delay", "1", "--at", "2030-01-01"),
        ("orders", "1", "--space", "a b"),
        ("orders", "1", "--key", "x" * 2000),
        ("orders", "[" * 100 + "]" * 100),
        ("orders", "1", "--count", "0"),
        ("orders", "1", "--delay", "99999999999999d"),
        ("orders", '"' + "x" * 2_000_000 + '"'),
        ("orders", "1", "2"),
        ("orders", "1", "--bogus"),
    ],
)
def test_bad_input_is_refused_before_a_folder_is_made(
    run: Run, home: Path, words: tuple[str, ...]
) -> None:
    done = run("pub", *words)

    assert done.code == 4
    assert done.err.startswith("trunkline: ")
    assert done.err.count("\n") == 1
    assert not (home / ".bus").exists()


def test_grep_finds_text_in_every_part_of_an_event(run: Run) -> None:
    run("pub", "a.orders", '{"name":"Ada"}', "--key", "needle")
    run("pub", "a.orders", '{"name":"needle"}')
    run("pub", "b.orders", "1", "--header", "x:needle")
    run("pub", "b.orders", "1")

    found = run("grep", ">", "needle")

    assert [(row["topic"], row["offset"]) for row in found.rows] == [
        ("a.orders", 1),
        ("a.orders", 2),
        ("b.orders", 1),
    ]
    assert len(run("grep", "a.*", "NEEDLE", "-i").rows) == 2
    assert run("grep", "b.orders", "Ada").code == 3


def test_grep_takes_an_expression_or_plain_text(run: Run) -> None:
    run("pub", "t", '"a.c"')
    run("pub", "t", '"abc"')

    assert [row["offset"] for row in run("grep", "t", "a.c").rows] == [1, 2]
    assert [row["offset"] for row in run("grep", "t", "-F", "a.c").rows] == [1]
    assert run("grep", "t", "(").code == 4


def test_grep_takes_a_condition_a_range_and_a_count(run: Run) -> None:
    run("pub", "t", stdin=lines(20))

    def offsets(*words: str) -> list[int]:
        return [row["offset"] for row in run("grep", "t", *words).rows]

    assert offsets("--where", "payload.n > 17") == [18, 19, 20]
    assert offsets("--where", "offset in (3, 4)") == [3, 4]
    assert offsets("--where", "payload.n > 3", "--from", "2:7") == [4, 5, 6]
    assert offsets("--where", "payload.n > 3", "--from", "-3", "--to", "20") == [18, 19]
    assert offsets('"n":1', "--count", "2") == [1, 10]
    assert offsets('"n":1', "--from", "@-1h", "--where", "payload.n > 18") == [19]
    assert run("grep", "t").code == 4
    assert run("grep", "t", "--where", "payload.n >").code == 4
    said = run("grep", "t", "--where", "payload.n = 1 and").err
    assert "a value is missing behind the operator, at character 15 near 'and'" in said


def test_a_time_is_written_in_one_way(run: Run) -> None:
    run("pub", "t", "1")
    (record,) = run("get", "t", "1", "--json").rows
    assert run("get", "t", "1", "--format", "%d").out == record["ts"] + "\n"
    (topic,) = run("topic", "info", "t", "--json").rows
    assert topic["partitions"][0]["last"] == record["ts"]


def test_get_says_that_a_record_was_compacted_away(run: Run) -> None:
    run("pub", "t", "--key", "k", stdin=lines(3))
    run("topic", "compact", "t", "--all", "--yes")

    done = run("get", "t", "1")
    assert (done.code, "has no record 1 (compaction removed it, or" in done.err) == (3, True)


def test_get_tells_apart_what_is_gone_and_what_never_was(run: Run) -> None:
    run("pub", "t", stdin=lines(5))
    run("topic", "purge", "t", "--before", "3", "--yes")

    assert "begins at offset 3" in run("get", "t", "1").err
    assert "has no record 9 (it holds 3 to 5)" in run("get", "t", "9").err
    assert "has no record -9 (it holds 3 to 5)" in run("get", "t", "-9").err
    assert [run("get", "t", place).code for place in ("1", "3", "6", "end")] == [3, 0, 3, 3]
    assert run("get", "nope", "1").code == 3
    assert run("get", "t", "1", "-p", "7").code == 3


def test_get_does_not_take_the_first_for_one_before_it(run: Run) -> None:
    run("pub", "t", stdin=lines(3))
    assert [row["offset"] for row in run("get", "t", "-3").rows] == [1]
    done = run("get", "t", "-4")
    assert (done.code, done.out) == (3, "")
    assert "it holds 1 to 3" in done.err
    assert len(run("get", "t", "-4:").rows) == 3


def test_a_range_that_ends_before_it_begins_is_told(run: Run) -> None:
    run("pub", "t", stdin=lines(5))
    for words in (("get", "t", "4:2"), ("grep", "t", "x", "--from", "4", "--to", "2")):
        done = run(*words)
        assert (done.code, done.out) == (4, "")
        assert "it ends before it begins" in done.err
        assert "from A up to B" in done.err


def test_get_asks_which_partition_an_offset_is_in(run: Run) -> None:
    run("init")
    run("topic", "create", "t", "--partitions", "3")
    run("pub", "t", stdin=lines(9))

    assert run("get", "t", "1").code == 4
    assert run("get", "t", "1", "--partition", "2").rows[0]["partition"] == 2
    assert len(run("get", "t", "1:").rows) == 9


def test_a_format_says_what_is_printed(run: Run) -> None:
    run("pub", "t", '{"a":"b"}', "--key", "k", "--header", "h:v", "--type", "y")
    run("pub", "t", '"text"')

    first = run("get", "t", "1", "--format", r"%t|%p|%o|%k|%v|%h|%s|%y|%%\t.")
    second = run("get", "t", "2", "--format", r"%v %s %k\n")
    (record,) = run("get", "t", "1").rows

    assert first.out == 't|0|1|k|{"a":"b"}|{"h":"v"}|{"a":"b"}|y|%\t.\n'
    assert second.out == '"text" text \n'
    assert run("get", "t", "1", "--format", "%i").out == record["id"] + "\n"
    assert run("get", "t", "1", "--format", "%z").code == 4


def test_a_folder_is_read_by_jq_and_grep_as_the_command_reads_it(run: Run, home: Path) -> None:
    run("pub", "t", '{"name":"Grüße"}')

    line = (home / ".bus" / "wal" / "t.00000001.jsonl").read_text("utf-8")

    assert json.loads(line)["payload"] == {"name": "Grüße"}
    assert run("grep", "t", "Grüße").rows[0]["payload"] == json.loads(line)["payload"]


def test_what_is_wrong_with_a_payload_is_told_in_words_of_ours(run: Run) -> None:
    said = {text: run("pub", "t", text).err for text in ("", "[1", '{"a":NaN}', "1 2")}

    ends = "trunkline: the payload is not JSON: it ends in the middle (--text publishes plain text)"
    assert said["[1"] == said[""] == f"{ends}\n"
    assert "is not JSON: invalid character at byte 5, in '{\"a\":NaN}'" in said['{"a":NaN}']
    assert "malformed" not in "".join(said.values())


def test_a_header_that_is_given_twice_is_refused(run: Run) -> None:
    done = run("pub", "t", "1", "-H", "a:b", "-H", "a:c")

    assert (done.code, "given twice" in done.err) == (4, True)


def test_a_publish_that_failed_is_not_summed_up(run: Run, home: Path) -> None:
    run("init")
    (home / ".bus" / "topics.json").write_text("{")

    done = run("pub", "t", "1")

    assert (done.code, done.out) == (1, "")


def test_offsets_count_from_1(run: Run) -> None:
    run("pub", "t", stdin=lines(3))
    run("topic", "purge", "t", "--before", "3", "--yes")

    assert "(they count from 1)" in run("get", "t", "0").err
    assert "(retention or a purge removed it)" in run("get", "t", "2").err


def test_a_dead_letter_is_not_made_by_hand(run: Run, home: Path) -> None:
    for words, stdin in ((("pub", "t.DLQ", "1"), ""), (("pub", "t.DLQ"), lines(2))):
        done = run(*words, stdin=stdin)
        assert (done.code, done.out) == (4, "")
        assert "not a dead letter" in done.err
    assert not (home / ".bus").exists()


def test_a_line_without_end_is_not_read_to_its_end(home: Path) -> None:
    del home
    with open("/dev/zero", "rb") as zeros:
        done = subprocess.run(
            [*PROGRAM, "pub", "t"],
            stdin=zeros,
            capture_output=True,
            env=ENV,
            timeout=40,
            check=False,
        )
    assert done.returncode == 4
    assert b"line 1: it is longer than 1048576 bytes" in done.stderr


def test_a_count_beyond_any_number_of_records_is_refused(run: Run) -> None:
    run("pub", "t", "1")
    assert run("grep", "t", "1", "--count", "9" * 18).code == 0
    assert run("grep", "t", "1", "--count", "9" * 19).code == 4
