"""The NDJSON bus: the contract of its tools, and what they lost."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from trunkline.cli import ndjson as cli
from trunkline.errors import InvalidEvent, InvalidName, InvalidOption, StorageError
from trunkline.files import ndjson
from trunkline.files.ndjson import Consumer, adoption, make_event, publish

from .harness import ENV, TRUNKLINE, Crash, Done, Run

FILES = ("files/ndjson.py", "log/atomic.py")
NOW = "2026-02-16T11:12:30Z"


@pytest.fixture
def log(tmp_path: Path) -> str:
    return str(tmp_path / "state" / "events.ndjson")


@pytest.fixture
def offsets(tmp_path: Path) -> str:
    return str(tmp_path / "offsets")


def emit(log: str, topic: str, **changes: Any) -> None:
    changes.setdefault("ttl_s", 0)
    publish(make_event(topic, "scope", "actor", **changes), log)


def raw(log: str, text: bytes) -> None:
    Path(log).parent.mkdir(exist_ok=True)
    with open(log, "ab") as file:
        file.write(text)


def poll(run: Run, log: str, offsets: str, *words: str) -> dict[str, Any]:
    done = run(
        "ndjson", "poll", "--consumer", "c", "--events-file", log, "--offsets-dir", offsets, *words
    )
    assert done.code == 0, done.err
    result: dict[str, Any] = json.loads(done.out)
    assert done.out.decode() == json.dumps(result, indent=2, sort_keys=True) + "\n"
    return result


def topics(result: dict[str, Any]) -> list[str]:
    return [event["topic"] for event in result["events_returned"]]


def test_publish_writes_one_sorted_ascii_line_and_echoes_it(trunkline_cli: Run, log: str) -> None:
    done = trunkline_cli(
        "ndjson",
        "publish",
        "--topic",
        "coord.claim",
        "--scope",
        "scene/täx.md",
        "--actor",
        "gray and orange",
        "--payload-json",
        '{"path": "x", "intent": "edit"}',
        "--ts",
        "2026-02-16T12:12:00.987+01:00",
        "--events-file",
        log,
    )

    seed = (
        'coord.claim|scene/täx.md|gray and orange|2026-02-16T11:12:00Z|{"intent":"edit","path":"x"}'
    )
    digest = hashlib.sha256(seed.encode()).hexdigest()[:12]
    want = (
        f'{{"actor":"gray and orange","event_id":"evt_20260216T111200Z_{digest}",'
        '"idempotency_key":"coord.claim|scene/t\\u00e4x.md|gray and orange|2026-02-16T11:12:00Z",'
        '"payload":{"intent":"edit","path":"x"},"scope":"scene/t\\u00e4x.md",'
        '"topic":"coord.claim","ts":"2026-02-16T11:12:00Z","ttl_s":600}\n'
    )
    assert (done.code, done.out.decode(), done.err) == (0, want, b"")
    assert Path(log).read_text() == want


def test_publish_takes_overrides(trunkline_cli: Run, log: str) -> None:
    done = trunkline_cli(
        *("ndjson", "publish", "--topic", "t", "--scope", "s", "--actor", "a", "--ttl-s", "0"),
        *("--idempotency-key", "k", "--event-id", "e", "--events-file", log),
    )

    event = json.loads(done.out)
    assert (event["idempotency_key"], event["event_id"], event["ttl_s"]) == ("k", "e", 0)
    assert event["payload"] == {}


@pytest.mark.parametrize(
    ("words", "message", "usage"),
    [
        ((), "--topic, --scope, and --actor are required", True),
        (("--topic", "", "--scope", "s", "--actor", "a"), "are required", True),
        (("--nope",), "Unknown arg: --nope", True),
        (("stray",), "Unknown arg: stray", True),
        (("--topic",), "--topic needs a value", True),
        (("OK", "--ttl-s", "-1"), "--ttl-s must be a non-negative integer", False),
        (("OK", "--ttl-s", "1.5"), "--ttl-s must be a non-negative integer", False),
        (("OK", "--payload-json", "{"), "invalid --payload-json: ", False),
        (("OK", "--payload-json", "[1]"), "--payload-json must decode to a JSON object", False),
        (("OK", "--ts", "2026-02-16T11:12:00"), "timestamp must include timezone", False),
        (("OK", "--ts", "yesterday"), "invalid timestamp", False),
    ],
)
def test_every_publish_error_is_exit_1_and_appends_nothing(
    trunkline_cli: Run, log: str, words: tuple[str, ...], message: str, usage: bool
) -> None:
    good = ("--topic", "t", "--scope", "s", "--actor", "a")
    given = [w for word in words for w in (good if word == "OK" else (word,))]
    done = trunkline_cli("ndjson", "publish", *given, "--events-file", log)
    if words == ("--topic",):
        done = trunkline_cli("ndjson", "publish", "--topic")

    assert (done.code, done.out) == (1, b"")
    assert message in done.err.decode()
    assert (b"Usage: trunkline ndjson publish --topic <topic>" in done.err) is usage
    assert not Path(log).exists()


def test_help_is_on_stdout(trunkline_cli: Run) -> None:
    for verb, start in (("publish", "--topic <topic>"), ("poll", "--consumer <name>")):
        for flag in ("-h", "--help"):
            done = trunkline_cli("ndjson", verb, flag)
            assert (done.code, done.err) == (0, b"")
            assert done.out.decode().startswith(f"Usage: trunkline ndjson {verb} {start}")
    assert trunkline_cli("ndjson").code == 1
    assert trunkline_cli("ndjson", "nope").code == 1


def test_poll_returns_the_result_object_and_writes_the_offset(
    trunkline_cli: Run, log: str, offsets: str
) -> None:
    emit(log, "a", ts=datetime(2026, 2, 16, tzinfo=UTC))
    emit(log, "b")

    result = poll(trunkline_cli, log, offsets, "--topics", " a, ,zz,", "--now-ts", NOW)

    assert sorted(result) == [
        *("consumer", "events_file", "events_returned", "from_line", "next_line", "offset_file"),
        *("to_line", "topics_filter"),
    ]
    assert result["topics_filter"] == ["a", "zz"]
    assert (result["from_line"], result["to_line"], result["next_line"]) == (1, 2, 3)
    assert (result["consumer"], result["events_file"]) == ("c", log)
    offset_file = os.path.join(offsets, "c.json")
    assert result["offset_file"] == offset_file
    event = json.loads(Path(log).read_text().split("\n")[0])
    assert result["events_returned"] == [{**event, "_line": 1}]
    assert Path(offset_file).read_text() == (
        f'{{\n  "consumer": "c",\n  "events_file": "{log}",\n'
        f'  "next_line": 3,\n  "updated_at": "{NOW}"\n}}\n'
    )


def test_paths_are_kept_as_given(trunkline_cli: Run, tmp_path: Path) -> None:
    done = trunkline_cli("ndjson", "poll", "--consumer", "c", "--events-file", "./x//e.ndjson")

    result = json.loads(done.out)
    assert result["events_file"] == "x/e.ndjson"
    assert result["offset_file"] == "state/pubsub/offsets/c.json"
    assert (tmp_path / "x" / "e.ndjson").read_bytes() == b""
    assert (result["from_line"], result["to_line"], result["next_line"]) == (1, 0, 1)


@pytest.mark.parametrize(
    ("words", "message", "usage"),
    [
        ((), "--consumer is required", True),
        (("--what", "x"), "Unknown arg: --what", True),
        (("--consumer", "c", "--max-events", "-1"), "must be a non-negative integer", False),
        (("--consumer", "c", "--now-ts", "2026-01-01T00:00:00"), "timezone", False),
        (("--consumer", "../../x"), "not a consumer name", False),
        (("--consumer", ".hidden"), "not a consumer name", False),
        (("--consumer", "a\nb"), "not a consumer name", False),
        (("--consumer", "x" * 201), "not a consumer name", False),
    ],
)
def test_every_poll_error_is_exit_1(
    trunkline_cli: Run, tmp_path: Path, words: tuple[str, ...], message: str, usage: bool
) -> None:
    before = sorted(tmp_path.rglob("*"))
    done: Done = trunkline_cli("ndjson", "poll", *words)

    assert (done.code, done.out) == (1, b"")
    assert message in done.err.decode()
    assert (b"Usage: trunkline ndjson poll --consumer <name>" in done.err) is usage
    assert sorted(tmp_path.rglob("*")) == before


def test_the_expiry_boundary_is_inclusive(log: str, offsets: str) -> None:
    at = datetime(2026, 2, 16, 11, 0, tzinfo=UTC)
    for ttl_s in (10, 11, 0):
        emit(log, f"ttl{ttl_s}", ts=at, ttl_s=ttl_s)
    for ttl in (b"true", b"-5", b'"9"', b"1.5", b"null"):
        raw(
            log, b'{"topic":"%b","ts":"2026-02-16T11:00:00Z","ttl_s":%b}\n' % (ttl.strip(b'"'), ttl)
        )
    raw(log, b'{"topic":"odd","ts":"then","ttl_s":1}\n{"topic":"bare"}\n')

    found = Consumer("c", log, offsets).poll(now=at + timedelta(seconds=10))

    want = ["ttl11", "ttl0", "-5", "9", "1.5", "null", "odd", "bare"]  # JSON true counts as 1
    assert [event["topic"] for event in found.events] == want


def test_lines_that_hold_no_object_are_passed_and_counted(log: str, offsets: str) -> None:
    raw(
        log,
        b'\n  \nnot json\n[1]\n"x"\n\xff\xfe\n{"topic":"ok","x":"\xe2\x80\xa8\xc2\x85\x0c"}\r\n',
    )

    found = Consumer("c", log, offsets).poll()

    # A raw line separator inside a text does not end a line.
    assert [event["_line"] for event in found.events] == []
    raw(log, b'{"topic":"two","x":"\xe2\x80\xa8\xc2\x85"}\r\n')
    found = Consumer("c", log, offsets).poll()
    assert [(event["_line"], event["x"]) for event in found.events] == [(8, "\u2028\x85")]
    assert found.to_line == 8


@pytest.mark.parametrize(
    ("text", "from_line", "count"),
    [
        ("{", 1, 3),
        ("[]", 1, 3),
        ('{"next_line": "2"}', 1, 3),
        ('{"next_line": -7}', 1, 3),
        ('{"next_line": 3}', 3, 1),
        ('{"next_line": 99}', 99, 0),
    ],
)
def test_an_odd_offset_file_starts_over_and_one_past_the_end_is_pulled_back(
    log: str, offsets: str, text: str, from_line: int, count: int
) -> None:
    for name in "abc":
        emit(log, name)
    os.mkdir(offsets)
    Path(offsets, "c.json").write_text(text)
    reader = Consumer("c", log, offsets)

    found = reader.poll()
    reader.commit(found)

    assert (found.from_line, len(found.events), found.next_line) == (from_line, count, 4)
    assert json.loads(Path(offsets, "c.json").read_text())["next_line"] == 4


def test_max_events_loses_nothing(trunkline_cli: Run, log: str, offsets: str) -> None:
    for number in range(7):
        emit(log, f"t{number}")
        emit(log, "other")
    wanted = ",".join(f"t{number}" for number in range(7))

    assert topics(poll(trunkline_cli, log, offsets, "--max-events", "0")) == []
    seen: list[str] = []
    for _ in range(4):
        result = poll(trunkline_cli, log, offsets, "--max-events", "2", "--topics", wanted)
        assert result["to_line"] == 14
        seen += topics(result)
    assert seen == [f"t{number}" for number in range(7)]


def test_a_half_written_line_is_not_passed(log: str, offsets: str) -> None:
    emit(log, "one")
    raw(log, b'{"topic":"tw')
    reader = Consumer("c", log, offsets)

    found = reader.poll()
    reader.commit(found)
    assert ([e["topic"] for e in found.events], found.to_line, found.next_line) == (["one"], 1, 2)
    raw(log, b'o"}\n')
    assert [event["topic"] for event in reader.poll().events] == ["two"]


def test_a_whole_last_line_without_its_newline_is_read_once(log: str, offsets: str) -> None:
    raw(log, b'{"topic":"one"}\n{"topic":"two"}')
    reader = Consumer("c", log, offsets)
    found = reader.poll()
    reader.commit(found)
    emit(log, "three")

    again = Consumer("c", log, offsets).poll()

    assert [event["topic"] for event in found.events] == ["one", "two"]
    assert [(event["_line"], event["topic"]) for event in again.events] == [(3, "three")]


def test_a_torn_line_of_a_dead_writer_costs_nobody_else(log: str, offsets: str) -> None:
    emit(log, "one")
    raw(log, b'{"topic":"torn","payl')
    emit(log, "two")

    found = Consumer("c", log, offsets).poll()

    assert [(event["_line"], event["topic"]) for event in found.events] == [(1, "one"), (3, "two")]


@pytest.mark.parametrize("how", ["cut", "replaced", "longer", "same start"])
def test_a_log_that_is_not_the_same_any_more_is_read_from_its_start(
    trunkline_cli: Run, log: str, offsets: str, how: str
) -> None:
    for name in ("a", "b", "c"):
        emit(log, name, payload={"pad": "x" * 3000})
    poll(trunkline_cli, log, offsets)
    old = Path(log).read_bytes().splitlines(keepends=True)
    if how == "same start":
        Path(log).write_bytes(old[0] + old[1])
        emit(log, "new", payload={"pad": "y" * 9000})
    else:
        os.unlink(log)
        for name in ("x",) if how == "cut" else ("x", "y", "z"):
            emit(log, name, payload={"pad": "y" * (4000 if how == "longer" else 3000)})

    done = trunkline_cli(
        "ndjson", "poll", "--consumer", "c", "--events-file", log, "--offsets-dir", offsets
    )

    want = {"cut": ["x"], "same start": ["a", "b", "new"]}.get(how, ["x", "y", "z"])
    result = json.loads(done.out)
    assert done.err == b"warning: the log was cut or replaced: reading from line 1\n"
    assert (topics(result), result["from_line"]) == (want, 1)
    assert topics(poll(trunkline_cli, log, offsets)) == []


def test_a_copy_with_the_same_content_is_the_same_log(log: str, offsets: str) -> None:
    emit(log, "a")
    reader = Consumer("c", log, offsets)
    reader.commit(reader.poll())
    data = Path(log).read_bytes()
    os.unlink(log)
    Path(log).write_bytes(data)

    assert not reader.poll().replaced
    assert reader.poll().events == []


def test_reading_on_does_not_read_what_was_read(log: str, offsets: str) -> None:
    emit(log, "a", payload={"pad": "x" * 100_000})
    reader = Consumer("c", log, offsets)
    reader.commit(reader.poll())
    emit(log, "b")

    seen: list[int] = []
    original = ndjson._lines

    def spy(file: Any, mark: Any) -> Any:
        seen.append(mark.byte)
        return original(file, mark)

    ndjson._lines = spy
    try:
        assert [event["topic"] for event in reader.poll().events] == ["b"]
    finally:
        ndjson._lines = original
    assert seen == [Path(log).read_bytes().index(b"\n") + 1]


def test_publishers_never_interleave(log: str) -> None:
    code = f"""
import sys
from trunkline.files.ndjson import make_event, publish
for i in range(25):
    publish(make_event("t", sys.argv[1], "a", {{"i": i, "pad": sys.argv[1] * 20000}}), {log!r})
"""
    writers = [
        subprocess.Popen([sys.executable, "-c", code, str(number)], env=ENV) for number in range(8)
    ]
    raw(log, b'{"topic":"torn')
    assert [process.wait(50) for process in writers] == [0] * 8

    events = [ndjson.decode_line(line) for line in Path(log).read_bytes().splitlines()]
    whole = [event for event in events if event is not None and event["topic"] == "t"]
    assert len(whole) == 200
    for number in range(8):
        mine = [e["payload"] for e in whole if e["scope"] == str(number)]
        assert [p["i"] for p in mine] == list(range(25))
        assert {p["pad"] for p in mine} == {str(number) * 20000}


def test_a_writer_that_waited_for_a_replaced_log_writes_to_the_new_one(log: str) -> None:
    emit(log, "old")
    words = ["--topic", "new", "--scope", "s", "--actor", "a"]
    with ndjson._locked_log(log):
        writer = subprocess.Popen(
            [*TRUNKLINE, "ndjson", "publish", "--events-file", log, *words],
            env=ENV,
            stdout=subprocess.DEVNULL,
        )
        with pytest.raises(subprocess.TimeoutExpired):
            writer.wait(0.8)
        os.unlink(log)
        Path(log).write_text("")
    assert writer.wait(20) == 0

    assert [json.loads(line)["topic"] for line in Path(log).read_text().splitlines()] == ["new"]


def test_two_pollers_of_one_name_share_the_events(log: str, offsets: str) -> None:
    for number in range(40):
        emit(log, f"t{number}")
    command = [*TRUNKLINE, "ndjson", "poll", "--consumer", "c", "--max-events", "5"]
    command += ["--events-file", log, "--offsets-dir", offsets]
    pollers = [subprocess.Popen(command, stdout=subprocess.PIPE, env=ENV) for _ in range(8)]

    seen = [t for p in pollers for t in topics(json.loads(p.communicate(timeout=50)[0]))]

    assert sorted(seen) == sorted(f"t{number}" for number in range(40))


def test_publish_killed_at_every_step(fast_dir: Path, crash: Crash) -> None:
    step = 0
    while True:
        step += 1
        log = str(fast_dir / f"{step}.ndjson")
        emit(log, "before")

        def act(log: str = log) -> None:
            emit(log, "killed")

        killed = crash.at(step, act, FILES)
        emit(log, "after")
        found = [event["topic"] for event in ndjson.replay(log)]
        assert found in (["before", "killed", "after"], ["before", "after"])
        assert killed or found == ["before", "killed", "after"]
        if not killed:
            break
    assert step > 30


@pytest.mark.timeout(180)  # a busy machine forks slowly
def test_poll_killed_at_every_step(fast_dir: Path, crash: Crash) -> None:
    """What was printed may come again; what was not printed does come."""
    log = str(fast_dir / "log")
    for number in range(3):
        emit(log, f"t{number}")

    def act(number: int) -> None:
        sys.stdout = open(fast_dir / f"out{number}", "w")  # noqa: SIM115
        words = ["poll", "--consumer", "c", "--events-file", log, "--max-events", "2"]
        words += ["--offsets-dir", str(fast_dir / f"offsets{number}")]
        assert cli.run(argparse.Namespace(words=words)) == 0

    points = crash.points(lambda: act(0), FILES)
    assert len(points) > 100
    for point in [*points, 10**9]:
        killed = crash.at(point, lambda at=point: act(at), FILES)  # type: ignore[misc]
        offsets, out = fast_dir / f"offsets{point}", fast_dir / f"out{point}"
        printed = topics(json.loads(out.read_text())) if out.read_text() else []
        rest = [event["topic"] for event in Consumer("c", log, str(offsets)).poll().events]
        assert printed in ([], ["t0", "t1"])
        assert rest in (["t0", "t1", "t2"], ["t2"])
        assert printed or rest == ["t0", "t1", "t2"], point
        with Consumer("c", log, str(offsets)).lock():
            left = sorted(p.name for p in offsets.iterdir())
        assert set(left) <= {".c.cursor", ".c.lock", "c.json"}
        assert killed or (printed, rest) == (["t0", "t1"], ["t2"])


def test_a_topic_that_is_no_text_stops_nobody(log: str, offsets: str) -> None:
    raw(log, b'{"topic":["x"]}\n{"topic":{"x":1}}\n{"topic":7}\n')
    emit(log, "x")

    assert [e["_line"] for e in Consumer("c", log, offsets).poll({"x"}).events] == [4]
    assert [e["_line"] for e in ndjson.replay(log, {"x"})] == [4]
    assert len(Consumer("c", log, offsets).poll().events) == 4


def test_tidying_up_leaves_consumers_with_similar_names_alone(log: str, offsets: str) -> None:
    names = ["a", "a.json", "a.json.tmp", "a.cursor.0123abcd"]
    for name in [*names, *names]:
        reader = Consumer(name, log, offsets)
        with reader.lock():
            reader.commit(reader.poll())
    litter = [f"{offsets}/a.json.0123abcd.tmp", f"{offsets}/.a.cursor.0123abcd.tmp"]
    for path in litter:
        Path(path).write_text("{")
    with Consumer("a", log, offsets).lock():
        pass

    found = {state.name: state.polls for state in ndjson.consumers(log, offsets)[1]}
    assert found == dict.fromkeys(names, 2)
    assert not any(os.path.exists(path) for path in litter)


def test_status_shows_the_consumers_of_its_own_file(
    trunkline_cli: Run, log: str, offsets: str
) -> None:
    emit(log, "a")
    poll(trunkline_cli, log, offsets, "--now-ts", NOW)

    shown = trunkline_cli("ndjson", "status", "--events-file", "nosuch", "--offsets-dir", offsets)

    assert shown.out.splitlines()[0] == b"nosuch: 0 lines"
    assert b"next line" not in shown.out


def test_status_and_replay(trunkline_cli: Run, log: str, offsets: str) -> None:
    for name in ("a", "b", "a"):
        emit(log, name)
    poll(trunkline_cli, log, offsets, "--max-events", "1", "--now-ts", NOW)
    where = ("--events-file", log)

    shown = trunkline_cli("ndjson", "status", *where, "--offsets-dir", offsets)
    value = json.loads(
        trunkline_cli("ndjson", "status", *where, "--offsets-dir", offsets, "--json").out
    )
    again = trunkline_cli("ndjson", "replay", *where, "--topics", "a", "--from-line", "2")

    assert shown.out.decode() == (
        f"{log}: 3 lines\nc: next line 2, lag 2, updated {NOW}\n"
        "adoption rule not met: 0 of 3 recurring consumers\n"
    )
    assert value["consumers"] == [{"consumer": "c", "lag": 2, "next_line": 2, "updated_at": NOW}]
    assert [json.loads(line)["_line"] for line in again.out.splitlines()] == [3]
    assert json.loads(Path(offsets, "c.json").read_text())["next_line"] == 2


def test_adoption_needs_three_consumers_that_came_back(log: str, offsets: str) -> None:
    now = datetime(2026, 3, 1, tzinfo=UTC)
    emit(log, "a")

    def visit(name: str, days_ago: float) -> None:
        reader = Consumer(name, log, offsets)
        reader.commit(reader.poll(now=now - timedelta(days=days_ago)))

    for name in ("one", "two"):
        visit(name, 2)
        visit(name, 1)
    visit("once", 1)
    visit("gone", 60)
    visit("gone", 50)
    before = adoption(log, offsets, now=now)
    Path(offsets, "foreign.json").write_text(
        json.dumps({"consumer": "foreign", "next_line": 1, "updated_at": "2026-02-28T00:00:00Z"})
    )
    after = adoption(log, offsets, now=now)

    assert (before.met, before.recurring, before.others) == (
        False,
        ("one", "two"),
        ("gone", "once"),
    )
    assert (after.met, after.recurring) == (True, ("foreign", "one", "two"))
    assert str(after) == "adoption rule met: 3 of 3 recurring consumers (foreign, one, two)"


def test_the_library_raises_typed_errors(log: str, offsets: str) -> None:
    for bad in ("", "..", "a/b", ".x", "a\0b", "a\x1f"):
        with pytest.raises(InvalidName):
            Consumer(bad, log, offsets)
    with pytest.raises(InvalidEvent):
        make_event("t", "s", "")
    with pytest.raises(InvalidEvent):
        make_event("t", "s", "a", [1])  # type: ignore[arg-type]
    with pytest.raises(InvalidEvent):
        make_event("t", "s", "a", {"x": object()})
    with pytest.raises(InvalidEvent):
        make_event("t", "s", "a", ttl_s=-1)
    with pytest.raises(InvalidOption):
        Consumer("c", log, offsets).poll(max_events=-1)
    emit(log, "a")
    _, mark = ndjson.read_batch(log)
    os.unlink(log)
    with pytest.raises(StorageError):
        ndjson.read_batch(log, mark)


def test_the_four_known_topics() -> None:
    assert ndjson.TOPICS == (
        "coord.claim",
        "coord.release",
        "closeout.created",
        "gate.status_changed",
    )


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "read",
    [
        lambda log, offsets: Consumer("c", log, offsets).poll(),
        lambda log, offsets: list(ndjson.replay(log)),
        lambda log, offsets: ndjson.consumers(log, offsets),
        lambda log, offsets: ndjson.fits(log, ndjson.Mark()),
        lambda log, offsets: emit(log, "t"),
    ],
)
def test_a_pipe_in_place_of_the_log_is_refused_and_not_waited_for(
    read: Any, tmp_path: Path, offsets: str
) -> None:
    log = str(tmp_path / "pipe.ndjson")
    os.mkfifo(log)

    with pytest.raises(StorageError, match="not a file"):
        read(log, offsets)


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_an_offset_is_refused_and_not_waited_for(
    tmp_path: Path, offsets: str
) -> None:
    log = str(tmp_path / "log.ndjson")
    consumer = Consumer("c", log, offsets)
    consumer.poll()
    Path(consumer.offset_file).unlink(missing_ok=True)
    os.mkfifo(consumer.offset_file)

    with pytest.raises(StorageError, match="not a file"):
        consumer.poll()
