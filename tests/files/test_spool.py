"""The spool as a library, under many processes, and under SIGKILL."""

from __future__ import annotations

import os
import pty
import re
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trunkline.errors import Duplicate, InvalidName, InvalidOption, NoBus, NotFound
from trunkline.files.event_file import default_dedup_key, parse
from trunkline.files.spool import Spool

from .harness import ENV, NBS_BUS, Crash, Run

FILES = ("files/spool.py", "files/event_file.py")

ORIGINAL = r"""
# Another implementation: hidden file, rename, acknowledge by renaming. No lock, no sync.
for i in $(seq 20); do
  us=$(date +%s%6N)
  temp="$1/.tmp-$us-$$.event"
  printf 'source: sh\ntype: t\npriority: high\ntimestamp: x\ndedup-key: sh:t\n' > "$temp"
  mv "$temp" "$1/$us-sh-t$i-$$.event"
done
for name in "$1"/*-sh-t1[0-9]-$$.event; do
  mv "$name" "$1/processed/" 2>/dev/null && echo acked
done
"""


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name.endswith(".event"))


def visible(queue: Path) -> list[str]:
    """Pending and processed, as any reader sees them."""
    found = [row.name for row in Spool(str(queue)).pending()]
    done = queue / "processed"
    return sorted(found + (names(done) if done.exists() else []))


def test_one_process_never_reuses_a_name(queue: Path) -> None:
    spool = Spool(str(queue))
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: spool.publish("a", "t"), range(400)))

    assert len(set(made)) == 400
    assert names(queue) == sorted(made)


def test_two_publishes_in_the_same_microsecond_are_two_files(
    queue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now)
    spool = Spool(str(queue))

    made = [spool.publish("a", "t", "low", str(i)) for i in range(3)]

    assert [spool.get(name).text for name in made] == ["0", "1", "2"]


def test_an_event_is_synced_before_it_shows_and_its_name_after(
    queue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    sync, rename = os.fsync, os.rename  # noqa: TID251

    def fsync(fd: int) -> None:
        log.append("sync " + os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        sync(fd)

    def move(source: bytes, target: bytes) -> None:
        log.append("show")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", move)
    spool = Spool(str(queue))
    name = spool.publish("a", "t", dedup_window_s=60)
    shown = list(log)
    spool.ack(name)

    assert re.fullmatch(r"sync \.tmp-[0-9]+-[0-9]+\.event", shown[0])
    assert shown[1:] == ["show", f"sync {queue.name}"]
    assert log[3:] == ["show", "sync processed", f"sync {queue.name}"]


def test_errors_are_typed(queue: Path, tmp_path: Path) -> None:
    with pytest.raises(NoBus):
        Spool(str(tmp_path / "none"))
    spool = Spool(str(queue))
    for source, kind in (("a b", "t"), ("", "t"), ("a", "x\ty"), ("a", "x/y"), ("a\0", "t")):
        with pytest.raises(InvalidName):
            spool.publish(source, kind)
    with pytest.raises(InvalidOption):
        spool.publish("a", "t", "urgent")
    with pytest.raises(InvalidOption):
        spool.publish("a", "t", dedup_window_s=-1)
    with pytest.raises(InvalidName):
        spool.publish("a", "t", dedup_key="x\npriority: critical")
    with pytest.raises(NotFound):
        spool.ack("1-a-t-1.event")
    assert names(queue) == []


def test_an_event_without_a_key_is_unique(queue: Path) -> None:
    spool = Spool(str(queue))
    spool.publish("a", "t", dedup_key="", dedup_window_s=60)
    name = spool.publish("a", "t", dedup_key="", dedup_window_s=60)

    assert "dedup-key" not in spool.get(name).fields
    spool.publish("a", "t", dedup_key="k", dedup_window_s=60)
    with pytest.raises(Duplicate) as caught:
        spool.publish("b", "u", dedup_key="k", dedup_window_s=60)
    assert caught.value.key == "k"


def test_default_keys_follow_the_convention() -> None:
    assert default_dedup_key("nbs-chat", "chat-message", channel="live") == (
        "nbs-chat:chat-message:live"
    )
    assert default_dedup_key("nbs-chat", "chat-mention", target="bob") == (
        "nbs-chat:chat-mention:bob"
    )
    assert default_dedup_key("w", "heartbeat", channel="x") == "w:heartbeat"


HOSTILE = st.one_of(
    st.binary(max_size=300),
    st.lists(
        st.sampled_from(
            [
                b"source: evil\n",
                b"priority: critical\n",
                b"dedup-key: evil:t\n",
                b"payload: |\n",
                b"---\n",
                b"\r",
                b"\r\n",
                b"\x00",
                b"\x1b[2J",
                b"\x0b\x0c\x1c\x85",
                "\u2028".encode(),
                b"  ",
                b"\n",
                b"x" * 600,
            ]
        ),
        max_size=12,
    ).map(b"".join),
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(payload=HOSTILE)
def test_no_payload_can_change_another_field(queue: Path, payload: bytes) -> None:
    spool = Spool(str(queue))
    name = spool.publish("good", "kind", "low", payload)

    row = next(row for row in spool.pending() if row.name == name)
    body = spool.read(name)
    content = parse(body)
    spool.ack(name)
    assert (row.source, row.type, row.priority) == ("good", "kind", "low")
    assert list(content.fields) == ["source", "type", "priority", "timestamp", "dedup-key"]
    assert content.fields["dedup-key"] == "good:kind"
    assert content.payload == payload.removesuffix(b"\n")
    # What a line-based reader of another program would take for fields at the start of a line.
    starts = [line for line in body.split(b"\n") if line and not line.startswith(b"  ")]
    assert len(starts) == 5 + bool(payload)


def test_a_payload_of_one_mebibyte_arrives_whole(nbs_bus: Run, queue: Path) -> None:
    payload = (b"priority: critical\nsource: evil\n" * 40_000)[: 1024 * 1024]
    name = Spool(str(queue)).publish("good", "kind", "low", payload)

    assert Spool(str(queue)).get(name).payload == payload.removesuffix(b"\n")
    assert nbs_bus("check", queue).out.decode().startswith(f"[low] {name} (")
    assert nbs_bus("read", queue, name).out == (queue / name).read_bytes()


@pytest.mark.timeout(180)  # a busy machine forks slowly
def test_a_hundred_publishers_and_ten_ackers(queue: Path) -> None:
    """Every event is acknowledged exactly once, none is lost, none is seen half-written."""
    stop = queue / "stop"
    acker = f"""
import sys, os
from trunkline.files.spool import Spool
from trunkline.errors import NotFound
spool = Spool({str(queue)!r})
def sweep():
    for row in spool.pending():
        try:
            text = spool.read(row.name)
        except NotFound:
            continue
        if not text.endswith(b"end of the payload\\n"):
            print("torn", row.name)
        try:
            spool.ack(row.name)
        except NotFound:
            continue
        print(row.name, flush=True)
while True:
    last = os.path.exists({str(stop)!r})
    sweep()
    if last:
        break
"""
    ackers = [
        subprocess.Popen([sys.executable, "-c", acker], stdout=subprocess.PIPE, env=ENV)
        for _ in range(10)
    ]
    body = "x" * 5000 + "\nend of the payload"
    publishers = [
        subprocess.Popen(
            [*NBS_BUS, "publish", str(queue), "agent", "note", "normal", body],
            stdout=subprocess.PIPE,
            env=ENV,
        )
        for _ in range(100)
    ]
    published = [process.communicate(timeout=50)[0].decode().strip() for process in publishers]
    assert {process.returncode for process in publishers} == {0}
    stop.touch()
    acked = [
        line for process in ackers for line in process.communicate(timeout=50)[0].decode().split()
    ]

    assert len(set(published)) == 100
    assert sorted(acked) == sorted(published)
    assert names(queue / "processed") == sorted(published)
    assert names(queue) == []


def test_of_racing_duplicates_exactly_one_is_published(queue: Path) -> None:
    racers = [
        subprocess.Popen(
            [*NBS_BUS, "publish", str(queue), "a", "t", "low", "p", "--dedup-window=60"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=ENV,
        )
        for _ in range(30)
    ]

    codes = sorted(process.wait(50) for process in racers)

    assert codes == [0] + [5] * 29
    assert len(names(queue)) == 1
    assert [p.name for p in queue.iterdir() if p.name.startswith(".tmp-")] == []


def test_threads_that_race_for_a_key_leave_one(queue: Path) -> None:
    gate = threading.Barrier(8)
    spool = Spool(str(queue))

    def race(_: int) -> int:
        gate.wait()
        try:
            spool.publish("a", "t", dedup_window_s=60)
        except Duplicate:
            return 0
        return 1

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(race, range(8))) == 1


def test_another_implementation_may_share_the_directory(queue: Path, nbs_bus: Run) -> None:
    (queue / "processed").mkdir()
    others = [
        subprocess.Popen(["sh", "-c", ORIGINAL, "sh", str(queue)], stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    spool = Spool(str(queue))
    mine = [spool.publish("py", "t", dedup_window_s=0) for _ in range(60)]
    acked_there = sum(len(process.communicate()[0].split()) for process in others)

    assert acked_there == 30
    assert len(visible(queue)) == 120
    rows = spool.pending()
    assert [row.source for row in rows] == ["sh"] * 30 + ["py"] * 60
    assert [row.name for row in rows if row.source == "py"] == mine
    done = nbs_bus("publish", queue, "sh", "t", "low", "--dedup-window=600")
    assert done.code == 5  # the key is theirs, in a file they wrote
    assert spool.ack_all() == 90


def test_publish_killed_at_every_step(fast_dir: Path, crash: Crash) -> None:
    step = 0
    while True:
        step += 1
        queue = fast_dir / str(step)
        queue.mkdir()

        def publish(queue: Path = queue) -> None:
            Spool(str(queue)).publish("a", "t", "high", "text\nmore", dedup_window_s=60)

        killed = crash.at(step, publish, FILES)
        rows = Spool(str(queue)).pending()
        assert len(rows) <= 1
        for row in rows:
            assert Spool(str(queue)).get(row.name).text == "text\nmore"
            assert (row.source, row.type, row.priority) == ("a", "t", "high")
        if not killed:
            assert len(rows) == 1
            break
        # Whoever comes next is not held up by what the dead one left.
        if not rows:
            Spool(str(queue)).publish("a", "t", dedup_window_s=60)
        assert len(Spool(str(queue)).pending()) == 1
    assert step > 50


@pytest.mark.parametrize("verb", ["ack", "ack_all", "prune"])
def test_ack_and_prune_killed_at_every_step(fast_dir: Path, crash: Crash, verb: str) -> None:
    step = 0
    while True:
        step += 1
        queue = fast_dir / str(step)
        queue.mkdir()
        spool = Spool(str(queue))
        made = [spool.publish("a", "t", "low", f"{i}" * 100) for i in range(3)]
        if verb == "prune":
            for name in made[:2]:
                spool.ack(name)

        def act(queue: Path = queue, name: str = made[0]) -> None:
            spool = Spool(str(queue))
            if verb == "ack":
                spool.ack(name)
            elif verb == "ack_all":
                spool.ack_all()
            else:
                spool.prune(max_bytes=300)

        killed = crash.at(step, act, FILES)
        found = visible(queue)
        if verb == "prune":
            assert made[2] in names(queue)
            assert len(found) >= 2  # the younger processed one fits
            assert made[1] in found
        else:
            assert found == sorted(made)
        for name in names(queue):
            assert spool.get(name).text.endswith("0" * 100) or spool.get(name).text[0] in "12"
        act() if not (verb == "ack" and made[0] not in names(queue)) else None
        assert len(names(queue)) == {"ack": 2, "ack_all": 0, "prune": 1}[verb]
        if not killed:
            break
    assert step > 15


def test_start_up_costs_next_to_nothing(queue: Path, tmp_path: Path) -> None:
    """nbs-bus check on an empty queue: at most 1.6 times a bare interpreter, and 15 ms."""
    script = tmp_path / "nbs-bus"
    script.write_text(
        "import sys\nfrom trunkline.files.nbs_bus import main\n"
        "if __name__ == '__main__':\n"
        "    sys.argv[0] = sys.argv[0].removesuffix('.exe')\n"
        "    sys.exit(main())\n"
    )
    bare = [sys.executable, "-I", "-S", "-c", "pass"]
    check = [sys.executable, str(script), "check", str(queue)]

    def measure(command: list[str]) -> float:
        start = time.perf_counter()
        subprocess.run(command, env=ENV, check=True)
        return time.perf_counter() - start

    measure(check)
    pairs = [(measure(bare), measure(check)) for _ in range(50)]
    base, took = (statistics.median(column) for column in zip(*pairs, strict=True))

    print(f"bare {base * 1e3:.1f} ms, check {took * 1e3:.1f} ms")
    assert took <= 1.6 * base + 0.015


def test_check_imports_nothing_heavy(queue: Path) -> None:
    code = (
        "import sys; from trunkline.files.nbs_bus import main; main(['check', sys.argv[1]]);"
        "print(*sorted(sys.modules))"
    )
    path = f"import sys; sys.path.insert(0, {ENV['PYTHONPATH']!r});"
    command = [sys.executable, "-I", "-S", "-c", path + code, str(queue)]
    out = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    heavy = {"typing", "json", "datetime", "argparse", "re", "pathlib", "dataclasses", "msgspec"}

    assert heavy.isdisjoint(out.split())
    assert "trunkline.files.spool" in out.split()


def test_check_of_ten_thousand_events_takes_less_than_a_second(nbs_bus: Run, queue: Path) -> None:
    base = time.time_ns() // 1000
    for i in range(10_000):
        priority = ("critical", "high", "normal", "low")[i % 4]
        (queue / f"{base + i}-agent-note-1.event").write_text(
            f"source: agent\ntype: note\npriority: {priority}\ntimestamp: x\n"
            "dedup-key: agent:note\npayload: |\n  text\n"
        )
    nbs_bus("status", queue)

    start = time.perf_counter()
    done = nbs_bus("check", queue)
    took = time.perf_counter() - start

    print(f"check of 10,000: {took * 1e3:.0f} ms")
    assert done.out.count(b"\n") == 10_000
    assert took <= 1.0


def test_publishing_does_not_slow_down_with_processed_events(queue: Path) -> None:
    """Counted in calls to the system, which do not depend on the machine's mood."""
    processed = queue / "processed"
    processed.mkdir()
    spool = Spool(str(queue))

    def calls() -> int:
        count = 0

        def profile(frame: object, event: str, arg: object) -> None:
            nonlocal count
            count += event in ("c_call", "call")

        sys.setprofile(profile)
        spool.publish("a", "t", dedup_window_s=3600)
        sys.setprofile(None)
        spool.ack_all()
        return count

    calls()
    few = calls()
    for i in range(3000):
        (processed / f"{i}-a-t-1.event").write_text("dedup-key: a:t\n")
    assert calls() == few


def test_spool_sees_no_file_of_a_dead_publisher(queue: Path) -> None:
    (queue / f".tmp-{time.time_ns() // 1000}-{os.getpid()}.event").write_text("source: half")

    assert Spool(str(queue)).pending() == []
    assert Spool(str(queue)).status().pending == 0
    assert Spool(str(queue)).ack_all() == 0


def test_a_link_or_a_fifo_in_the_spool_is_no_event(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path / "spool"), create=True)
    name = spool.publish("a", "t", "normal", "text")
    place = tmp_path / "spool" / name
    place.rename(tmp_path / "secret")
    place.symlink_to(tmp_path / "secret")
    with pytest.raises(NotFound):
        spool.read(name)
    place.unlink()
    os.mkfifo(place)
    with pytest.raises(NotFound):
        spool.read(name)


@pytest.mark.timeout(20)
def test_check_neither_waits_for_a_pipe_nor_lets_a_name_steer_the_terminal(
    nbs_bus: Run, tmp_path: Path
) -> None:
    spool = tmp_path / "spool"
    spool.mkdir()
    assert nbs_bus("publish", "spool", "e\x1bvil", "t", "high", "x").code == 0
    os.mkfifo(spool / "4-x-t-1.event")
    ours, theirs = pty.openpty()
    subprocess.run([*NBS_BUS, "check", "spool"], stdout=theirs, cwd=tmp_path, env=ENV, check=True)
    os.close(theirs)

    shown = os.read(ours, 4096)
    os.close(ours)

    assert b"-e\\x1bvil-t-" in shown
    assert b"\x1b" not in shown


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_the_settings_is_not_waited_for(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path / "spool"), create=True)
    spool.publish("a", "t", "normal", "text")
    config = tmp_path / "spool" / "config.yaml"
    config.unlink(missing_ok=True)
    os.mkfifo(config)

    assert Spool(str(tmp_path / "spool")).status().pending == 1
