"""The bridge: nothing lost, nothing doubled, nothing in circles, whenever it is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from files.harness import ENV, TRUNKLINE, Run, kill_points, killed_at, memory_dir, runner
from trunkline.bus import sync
from trunkline.errors import Corrupt, InvalidEvent, InvalidOption, LockTimeout, NoBus
from trunkline.event import Event
from trunkline.files import ndjson
from trunkline.files.forms import (
    ORIGIN,
    VIA,
    Parcel,
    from_line,
    from_spool,
    to_line,
    to_spool,
    topic_for,
)
from trunkline.files.spool import Spool
from trunkline.patterns import bridge as module
from trunkline.patterns.bridge import (
    Bridge,
    Carried,
    SpoolPlace,
    open_bridge,
    open_sink,
    open_source,
)

KINDS = ("spool", "ndjson", "file")
FILES = (
    "trunkline/patterns/bridge.py",
    "files/forms.py",
    "files/spool.py",
    "files/ndjson.py",
    "files/event_file.py",
)


@pytest.fixture
def cli(tmp_path: Path) -> Run:
    return runner(TRUNKLINE, tmp_path)


def fill(url: str, count: int, start: int = 0) -> list[str]:
    """Publish events and return what identifies them: the payloads."""
    kind, _, place = url.partition(":")
    texts = [f"event {number}\nsecond: line" for number in range(start, start + count)]
    if kind == "spool":
        spool = Spool(place, create=True)
        for number, text in enumerate(texts):
            spool.publish("agent", f"kind{number % 2}", "high", text)
    elif kind == "ndjson":
        for number, text in enumerate(texts):
            event = ndjson.make_event(f"topic.{number % 2}", "scope", "agent", {"text": text})
            ndjson.publish(event, place)
    else:
        with sync.open(url) as bus:
            for number, text in enumerate(texts):
                bus.publish(f"topic.{number % 2}", {"text": text}, actor="agent", priority="high")
    return texts


def content(url: str) -> list[str]:
    """The payload texts of everything at a place, sorted."""
    kind, _, place = url.partition(":")
    found: list[Any] = []
    if kind == "spool":
        folder = Path(place)
        files = [*folder.glob("[0-9]*.event"), *(folder / "processed").glob("[0-9]*.event")]
        found = [from_spool(file.name, file.read_bytes()).payload for file in files]
    elif kind == "ndjson":
        found = [from_line(event).payload for event in ndjson.replay(place)]
    else:
        with sync.open(url) as bus:
            for topic in bus.topics():
                found += [record.event.payload for record in bus.read(topic)]
    return sorted(item["text"] if isinstance(item, dict) else item for item in found)


def carry(source: str, sink: str, *topics: str) -> Carried:
    with open_bridge(source, sink, topics) as bridge:
        return bridge.run()


@pytest.mark.parametrize("start", KINDS)
@pytest.mark.parametrize("end", KINDS)
def test_every_pair_of_places(tmp_path: Path, start: str, end: str) -> None:
    source, sink = f"{start}:{tmp_path / 'a'}", f"{end}:{tmp_path / 'b'}"
    texts = fill(source, 5)

    assert carry(source, sink).copied == 5
    assert content(sink) == sorted(texts)
    assert carry(source, sink) == Carried()
    texts += fill(source, 3, start=5)
    assert carry(source, sink).copied == 3
    assert content(sink) == sorted(texts)


def prove_kills(start: str, end: str, points_max: int) -> None:
    with memory_dir() as folder:
        kill_at_points(folder, start, end, points_max)


def kill_at_points(folder: Path, start: str, end: str, points_max: int) -> None:
    source = f"{start}:{folder / 'source'}"
    texts = sorted(fill(source, 3))
    open_source(source).close()  # give the place its name, as any earlier run would have

    def act(sink: str) -> Callable[[], None]:
        def run() -> None:
            # Small batches: so that it is killed between two of them as well.
            bridge = Bridge(open_source(source), open_sink(sink), batch=2)
            bridge.run()
            bridge.close()

        return run

    def check(sink: str) -> None:
        carry(source, sink)
        assert content(sink) == texts

    whole = f"{end}:{folder / 'sink0'}"
    points = kill_points(act(whole), FILES)
    check(whole)
    assert len(points) > 60
    for point in points[:: len(points) // points_max + 1]:
        sink = f"{end}:{folder / f'sink{point}'}"
        assert killed_at(point, act(sink), FILES)
        if point % 2:
            killed_at(point, act(sink), FILES)  # and once more on the way back
        check(sink)


@pytest.mark.parametrize("end", KINDS)
@pytest.mark.parametrize("start", KINDS)
def test_killed_at_any_line_it_loses_and_doubles_nothing(start: str, end: str) -> None:
    prove_kills(start, end, points_max=12)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("end", KINDS)
@pytest.mark.parametrize("start", KINDS)
def test_killed_at_every_line_it_loses_and_doubles_nothing(start: str, end: str) -> None:
    prove_kills(start, end, points_max=10_000)


def test_what_goes_round_stops_where_it_began(tmp_path: Path) -> None:
    places = [f"spool:{tmp_path / 'a'}", f"file:{tmp_path / 'b'}", f"ndjson:{tmp_path / 'c'}"]
    texts = [text for n, place in enumerate(places) for text in fill(place, 2, start=10 * n)]
    for _ in range(3):
        for source in places:
            for sink in places:
                if source != sink:
                    carry(source, sink)

    for place in places:
        assert content(place) == sorted(texts)


def test_the_origin_is_kept_over_several_places(tmp_path: Path) -> None:
    Spool(str(tmp_path / "a"), create=True).publish("bob", "task-complete", "critical", "done\n")
    carry(f"spool:{tmp_path / 'a'}", f"file:{tmp_path / 'b'}")
    carry(f"file:{tmp_path / 'b'}", f"ndjson:{tmp_path / 'c'}")
    carry(f"ndjson:{tmp_path / 'c'}", f"spool:{tmp_path / 'd'}")
    carry(f"spool:{tmp_path / 'd'}", f"file:{tmp_path / 'e'}")

    with sync.open(f"file:{tmp_path / 'e'}") as bus:
        event = bus.read("task-complete")[0].event
    name = Spool(str(tmp_path / "a")).pending()[0].name
    ids = [SpoolPlace(str(tmp_path / p)).place for p in "ad"]
    assert event.headers[ORIGIN] == f"{ids[0]}/{name}"
    via = event.headers[VIA].split(",")
    assert (via[0], via[-1], len(via)) == (ids[0], ids[1], 4)
    assert (event.actor, event.type, event.priority, event.payload) == (
        "bob",
        "task-complete",
        "critical",
        "done",
    )
    assert event.id == name
    assert int(event.ts.timestamp() * 1e6) == pytest.approx(int(name.split("-")[0]), abs=1)


def test_only_the_chosen_topics(tmp_path: Path) -> None:
    source = f"file:{tmp_path / 'a'}"
    with sync.open(source) as bus:
        for topic in ("orders.eu", "orders.us", "mail", "mail.DLQ", "system.x"):
            letter = {"dlq-reason": "rejected"} if topic.endswith(".DLQ") else {}
            bus.publish(topic, {"text": topic}, headers=letter)

    assert carry(source, f"ndjson:{tmp_path / 'b'}", "orders.*", "mail.DLQ").copied == 3
    assert content(f"ndjson:{tmp_path / 'b'}") == ["mail.DLQ", "orders.eu", "orders.us"]
    # Another choice is another bridge, and all is everything but dead letters and system topics.
    counts = carry(source, f"ndjson:{tmp_path / 'b'}")
    assert (counts.copied, counts.already, counts.filtered) == (1, 2, 2)


def test_an_event_that_was_acknowledged_early_is_carried_all_the_same(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path / "a"), create=True)
    late = spool.publish("x", "t", "low", "late")
    os.rename(tmp_path / "a" / late, tmp_path / late)  # noqa: TID251 -- a publisher that hangs
    spool.ack(spool.publish("x", "t", "low", "acked"))
    url, sink = f"spool:{tmp_path / 'a'}", f"file:{tmp_path / 'b'}"
    assert carry(url, sink).copied == 1
    os.rename(tmp_path / late, tmp_path / "a" / late)  # noqa: TID251

    assert carry(url, sink).copied == 1
    assert content(sink) == ["acked", "late"]
    assert [row.name for row in spool.pending()] == [late]


def test_ack_takes_what_was_carried_from_the_queue(cli: Run, tmp_path: Path) -> None:
    fill(f"spool:{tmp_path / 'a'}", 3)
    done = cli("bridge", "spool:a", "file:b", "--ack")

    assert done.out == b"copied 3 events\n"
    assert Spool(str(tmp_path / "a")).pending() == []
    assert len(list((tmp_path / "a" / "processed").iterdir())) == 3


def test_a_replaced_ndjson_file_is_read_again_without_doubling(tmp_path: Path) -> None:
    source, sink = f"ndjson:{tmp_path / 'a'}", f"file:{tmp_path / 'b'}"
    texts = fill(source, 4)
    carry(source, sink)
    lines = (tmp_path / "a").read_bytes().splitlines(keepends=True)
    (tmp_path / "a").write_bytes(b"".join(lines[:2]))
    texts += fill(source, 2, start=20)

    counts = carry(source, sink)

    assert (counts.copied, counts.already) == (2, 2)
    assert content(sink) == sorted(texts)


@pytest.mark.parametrize("end", KINDS)
def test_lost_notes_cost_a_comparison_and_no_double(tmp_path: Path, end: str) -> None:
    source, sink = f"spool:{tmp_path / 'a'}", f"{end}:{tmp_path / 'b'}"
    texts = fill(source, 4)
    carry(source, sink)
    for journal in tmp_path.rglob("*.journal"):
        journal.unlink()

    assert carry(source, sink).already == 4
    assert content(sink) == sorted(texts)


def test_a_torn_note_was_not_made(tmp_path: Path) -> None:
    source, sink = f"ndjson:{tmp_path / 'a'}", f"ndjson:{tmp_path / 'b'}"
    texts = fill(source, 2)
    carry(source, sink)
    texts += fill(source, 1, start=7)
    carry(source, sink)
    journal = next(tmp_path.glob(".b.bridge-*.journal"))
    journal.write_bytes(journal.read_bytes()[:-5])

    assert carry(source, sink).already == 1
    assert carry(source, sink) == Carried()
    assert content(sink) == sorted(texts)


@pytest.mark.parametrize("note", [b"{", b"[" * 100_000, b'"\xff"', b"[]", b"{}"])
def test_damaged_notes_are_named_and_the_way_out_is_told(tmp_path: Path, note: bytes) -> None:
    source, sink = f"ndjson:{tmp_path / 'a'}", f"ndjson:{tmp_path / 'b'}"
    fill(source, 2)
    carry(source, sink)
    journal = next(tmp_path.glob(".b.bridge-*.journal"))
    journal.write_bytes(note + b"\n")

    with pytest.raises(Corrupt, match="the notes of a bridge are damaged") as caught:
        carry(source, sink)
    assert "remove the file" in caught.value.hint


def test_two_of_the_same_bridge_do_not_run_at_once(tmp_path: Path) -> None:
    source, sink = f"ndjson:{tmp_path / 'a'}", f"ndjson:{tmp_path / 'b'}"
    fill(source, 1)
    with open_bridge(source, sink), pytest.raises(LockTimeout), open_bridge(source, sink):
        pass


@pytest.mark.parametrize("start", KINDS)
@pytest.mark.parametrize("end", KINDS)
def test_bridges_with_topics_in_common_double_nothing(tmp_path: Path, start: str, end: str) -> None:
    """One is ahead, now this and now that; each begins anew at times; both meet every event."""
    source, sink = (f"{kind}:{tmp_path}/{n}" for n, kind in enumerate((start, end)))
    choices = ((), ("topic.*", "kind0", "kind1"))
    told: list[str] = []
    for turn in range(4):
        told += fill(source, 3, len(told))
        with (
            open_bridge(source, sink, choices[turn % 2]) as ahead,
            open_bridge(source, sink, choices[1 - turn % 2]) as behind,
        ):
            for bridge in (ahead, behind, ahead):
                bridge.step()
                told += fill(source, 2, len(told))
            behind.step()
    with open_bridge(source, sink) as one, open_bridge(source, sink, choices[1]) as other:
        one.run()
        other.run()
    assert content(sink) == sorted(told)


def test_what_a_bus_cannot_hold_stops_the_bridge_or_is_passed_over(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path / "a"), create=True)
    spool.publish("x", "t", "low", "first")
    spool.publish("x", "t", "low", "y" * (1 << 20))
    spool.publish("x", "t", "low", "last")
    source, sink = f"spool:{tmp_path / 'a'}", f"file:{tmp_path / 'b'}"

    with pytest.raises(InvalidEvent) as caught:
        carry(source, sink)
    assert "1048" in str(caught.value)
    for _ in range(2):
        with pytest.raises(InvalidEvent):
            carry(source, sink)
        assert content(sink) == ["first"]
    assert carry(source, f"ndjson:{tmp_path / 'c'}").copied == 3
    with open_bridge(source, sink, skip_invalid=True) as bridge:
        assert bridge.run().invalid == 1
    assert content(sink) == ["first", "last"]


def test_bad_urls(cli: Run, tmp_path: Path) -> None:
    for url in ("file:", "http://x", "plain"):
        with pytest.raises(InvalidOption):
            open_source(url)
    for url in (f"spool:{tmp_path / 'no'}", f"ndjson:{tmp_path / 'no'}", f"file:{tmp_path / 'no'}"):
        with pytest.raises(NoBus):
            open_source(url)
    fill(f"spool:{tmp_path / 'a'}", 1)
    with (
        pytest.raises(InvalidOption),
        open_bridge(f"spool:{tmp_path / 'a'}", f"spool:{tmp_path}/a"),
    ):
        pass
    assert cli("bridge", "spool:a", "what:b").code == 4
    assert cli("bridge", "spool:none", "file:b").code == 2


def test_the_command_line_follows(cli: Run, tmp_path: Path) -> None:
    texts = fill(f"spool:{tmp_path / 'a'}", 2)
    first = json.loads(cli("bridge", "spool:a", "ndjson:b", "--json").out)
    assert (first["copied"], first["source"], first["sink"]) == (2, "spool:a", "ndjson:b")
    process = subprocess.Popen(
        [*TRUNKLINE, "bridge", "spool:a", "ndjson:b", "--follow", "--json"],
        cwd=tmp_path,
        env=ENV,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    texts += fill(f"spool:{tmp_path / 'a'}", 1, start=30)
    try:
        assert json.loads(process.stdout.readline())["copied"] == 1
        texts += fill(f"spool:{tmp_path / 'a'}", 1, start=40)
        assert json.loads(process.stdout.readline())["copied"] == 2
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
    finally:
        process.kill()
        process.stdout.close()
        process.wait()
    assert content(f"ndjson:{tmp_path / 'b'}") == sorted(texts)


def test_a_following_bridge_killed_again_and_again(tmp_path: Path) -> None:
    """Not at chosen lines: at any time, while the source grows."""
    source, sink = f"spool:{tmp_path / 'a'}", f"file:{tmp_path / 'b'}"
    texts = fill(source, 5)
    command = [*TRUNKLINE, "bridge", source, sink, "--follow"]
    for round_ in range(6):
        process = subprocess.Popen(command, env=ENV, stdout=subprocess.DEVNULL)
        texts += fill(source, 5, start=100 * (round_ + 1))
        time.sleep(0.15 + 0.05 * round_)
        process.kill()
        process.wait()

    carry(source, sink)

    assert content(sink) == sorted(texts)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
EVENTS = st.builds(
    Event,
    id=TEXT.filter(bool),
    ts=st.integers(1, 7_000_000_000_000_000).map(
        lambda us: datetime(1971, 1, 1, tzinfo=UTC) + timedelta(microseconds=us)
    ),
    topic=st.sampled_from(["a", "a.b-c", "x_y"]),
    type=st.none() | TEXT.filter(bool),
    actor=st.none() | TEXT.filter(bool),
    subject=st.none() | TEXT.filter(bool),
    key=st.none() | TEXT,
    idem_key=st.none() | TEXT.filter(bool),
    ttl_s=st.none() | st.floats(0.5, 1e6),
    priority=st.sampled_from(["critical", "high", "normal", "low"]),
    band=st.sampled_from(["GREEN", "RED"]),
    cause=st.none() | TEXT,
    headers=st.dictionaries(
        TEXT.filter(lambda t: not t.startswith("trunkline-")), TEXT, max_size=3
    ),
    payload=JSON,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(EVENTS)
def test_an_event_comes_back_as_it_left(event: Event) -> None:
    item = Parcel(event, "place/1", "place")

    line = from_line(json.loads(json.dumps(to_line(item))))
    file = from_spool("1-x.event", to_spool(item))

    for back in (line, file):
        headers = {k: v for k, v in back.headers.items() if k not in (ORIGIN, VIA)}
        changed = {"headers": headers}
        assert back.headers[ORIGIN] == "place/1"
        for name in Event.__struct_fields__:
            assert changed.get(name, getattr(back, name)) == getattr(event, name), name


def test_bytes_that_are_no_text_come_back_too(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path / "a"), create=True)
    name = spool.publish(b"s\xff", b"t\xfe", "low", b"\xff\x00\n")
    carry(f"spool:{tmp_path / 'a'}", f"file:{tmp_path / 'b'}")
    carry(f"file:{tmp_path / 'b'}", f"spool:{tmp_path / 'c'}")

    row = Spool(str(tmp_path / "c")).pending()[0]
    assert Spool(str(tmp_path / "c")).get(row.name).payload == spool.get(name).payload


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("coord.claim", "coord.claim"),
        ("a b/c", "a-b-c"),
        ("a__b", "a_b"),
        ("..", "event"),
        (".x..y.", "x.y"),
        ("é" * 300, "-" * 200),
    ],
)
def test_any_text_has_a_topic(text: str, want: str) -> None:
    assert topic_for(text) == want


def test_foreign_lines_are_carried_with_what_they_have(tmp_path: Path) -> None:
    rows: list[Any] = [{}, {"topic": 5}, {"topic": "a b", "ts": "x", "ttl_s": True, "headers": 7}]
    rows += [{"headers": {"trunkline-event": "{", "trunkline-via": 5}, "payload": [1]}]
    rows += [{"headers": {"trunkline-event": '{"ts": 5, "topic": 7, "priority": "x"}'}}]
    (tmp_path / "a").write_text("".join(json.dumps(row) + "\n" for row in rows) + "junk\n")

    assert carry(f"ndjson:{tmp_path / 'a'}", f"file:{tmp_path / 'b'}").copied == 5
    assert module.BATCH > 5


def test_events_that_are_meant_to_break_it_are_carried(tmp_path: Path) -> None:
    deep = "[" * 100_000
    spool = tmp_path / "a"
    spool.mkdir()
    # The time of another program: in nanoseconds, which nbs-bus check shows like any other.
    (spool / "1794780438871720000-x-t-1.event").write_text("source: x\ntype: t\n")
    (spool / "2-x-t-1.event").write_text(f"source: x\ntype: t\nheaders: {deep}\n")
    noted = json.dumps({"trunkline-event": deep})
    (spool / "3-x-t-1.event").write_text(f"source: x\ntype: t\nheaders: {noted}\n")
    os.mkfifo(spool / "4-x-t-1.event")
    log = tmp_path / "b"
    lines = [{"topic": "\ud800"}, {"topic": ["t"]}, {"headers": {"trunkline-event": deep}}]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))

    for kind in KINDS:
        assert carry(f"spool:{spool}", f"{kind}:{tmp_path / f'spool-{kind}'}").copied == 3
        assert carry(f"ndjson:{log}", f"{kind}:{tmp_path / f'ndjson-{kind}'}").copied == 3
