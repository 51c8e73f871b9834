"""nbs-bus: outputs, exit codes and files, byte for byte."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trunkline.files import nbs_bus as program
from trunkline.files.spool import Spool

from .harness import ENV, NBS_BUS, Run

NAME = re.compile(rb"\A([0-9]{16})-(.+)-([0-9]+)\.event\n\Z")


def put(queue: Path, name: str, text: str) -> str:
    (queue / name).write_text(text)
    return name


def event(source: str = "a", kind: str = "t", priority: str = "normal") -> str:
    return f"source: {source}\ntype: {kind}\npriority: {priority}\n"


def files(queue: Path) -> list[str]:
    return sorted(p.name for p in queue.iterdir() if p.name.endswith(".event"))


def ago(seconds: float) -> int:
    return time.time_ns() // 1000 - int(seconds * 1_000_000)


def test_publish_writes_the_file_and_prints_its_name(nbs_bus: Run, queue: Path) -> None:
    before = time.time_ns() // 1000
    done = nbs_bus(
        "publish", queue, "parser-worker", "task-complete", "high", "Task done.\n467/467 pass.\n"
    )

    match = NAME.match(done.out)
    assert match is not None
    assert (done.code, done.err, match[2]) == (0, b"", b"parser-worker-task-complete")
    assert before <= int(match[1]) <= time.time_ns() // 1000
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(int(match[1]) // 1_000_000))
    text = (queue / done.out.decode().strip()).read_text()
    assert re.sub(r"timestamp: .*", f"timestamp: {at}", text) == (
        "source: parser-worker\ntype: task-complete\npriority: high\n"
        f"timestamp: {at}\n"
        "dedup-key: parser-worker:task-complete\n"
        "payload: |\n  Task done.\n  467/467 pass.\n"
    )
    assert re.search(r"^timestamp: \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$", text, re.M)
    assert sorted(p.name for p in queue.iterdir())[1] == "processed"
    assert len(list(queue.iterdir())) == 2


@pytest.mark.parametrize("words", [(), ("",), ("--dedup-window=0",), ("--x", "late"), ("--", "p")])
def test_a_payload_is_only_the_fifth_word_that_is_no_option(
    nbs_bus: Run, queue: Path, words: tuple[str, ...]
) -> None:
    done = nbs_bus("publish", queue, "a", "t", "low", *words)

    assert done.code == 0
    assert b"payload" not in (queue / done.out.decode().strip()).read_bytes()


@pytest.mark.parametrize(
    ("words", "code", "err"),
    [
        (
            ("D", "a", "t"),
            4,
            "Usage: nbs-bus publish <dir> <source> <type> <priority> [payload] [--dedup-window=N]",
        ),
        (("/none", "", "", "x"), 4, "Error: source must not be empty"),
        (("/none", "a", "", "x"), 4, "Error: type must not be empty"),
        (("/none", "a b", "t", "x"), 4, "Error: source must not contain whitespace: 'a b'"),
        (("/none", "a", "t\n", "x"), 4, "Error: type must not contain whitespace: 't\n'"),
        (("/none", "a", "t", "x"), 2, "Error: events directory not found: /none"),
        (("/dev/null", "a", "t", "x"), 2, "Error: not a directory: /dev/null"),
        (
            ("D", "a", "t", "HIGH", "p", "--dedup-window=x"),
            4,
            "Error: invalid priority 'HIGH' (use: critical, high, normal, low)",
        ),
        (
            ("D", "a/b", "t", "low", "p", "--dedup-window=-1"),
            4,
            "Error: invalid --dedup-window value: -1",
        ),
        (("D", "a", "t", "low", "--dedup-window=1x"), 4, "Error: invalid --dedup-window value: 1x"),
        (
            ("D", "a", "t", "low", "--dedup-window=9223372036854"),
            0,
            None,
        ),
        (
            ("D", "a", "t", "low", "--dedup-window=9223372036855"),
            4,
            "Error: --dedup-window value too large (overflow): 9223372036855",
        ),
        (
            ("D", "a", "t", "low", "--dedup-window=9223372036854775808"),
            4,
            "Error: invalid --dedup-window value: 9223372036854775808",
        ),
        (("D", "a", "t", "low", "--dedup-window="), 0, None),
        (("D", "a", "t", "low", "--dedup-window= +7"), 0, None),
        (
            ("D", "a/b", "t", "low"),
            1,
            "Error: failed to finalise event file: No such file or directory",
        ),
        (
            ("D", "a", "../t", "low"),
            1,
            "Error: failed to finalise event file: No such file or directory",
        ),
        (
            ("D", "a" * 300, "t", "low"),
            1,
            "Error: failed to finalise event file: File name too long",
        ),
    ],
)
def test_publish_checks_in_the_original_order(
    nbs_bus: Run, queue: Path, words: tuple[str, ...], code: int, err: str | None
) -> None:
    done = nbs_bus("publish", *(str(queue) if word == "D" else word for word in words))

    assert (done.code, done.err) == (code, b"" if err is None else f"{err}\n".encode())
    if code:
        assert done.out == b""
        assert [p for p in queue.iterdir() if p.name != "processed"] == []


def test_bytes_that_are_no_text_arrive_as_they_are(nbs_bus: Run, queue: Path) -> None:
    done = nbs_bus("publish", queue, b"s\xff", b"t\xc3", "low", b"\x01\xfe\x80")

    assert done.code == 0
    name = done.out.rstrip(b"\n")
    assert b"-s\xff-t\xc3-" in name
    body = (Path(os.fsdecode(os.fsencode(queue) + b"/" + name))).read_bytes()
    assert body.startswith(b"source: s\xff\ntype: t\xc3\n")
    assert body.endswith(b"payload: |\n  \x01\xfe\x80\n")


def test_check_lists_by_priority_then_age_with_floored_ages(nbs_bus: Run, queue: Path) -> None:
    rows = [
        (-100, "low", "0s"),
        (61, "normal", "1m"),
        (3570, "normal", "59m"),
        (3601, "high", "1h"),
        (86_401, "critical", "1d"),
        (-100, "critical", "0s"),
    ]
    names = [put(queue, f"{ago(s)}-a-t-1.event", event(priority=p)) for s, p, _ in rows]
    put(queue, "x-a-t-1.event", event())
    put(queue, f"{ago(1)}.event", event())
    put(queue, f"{ago(1)}-a-t-1.yaml", event())
    put(queue, f".tmp-{ago(1)}-1.event", event())
    put(queue, ".lock", "")
    (queue / f"{ago(1)}-dir-1.event").mkdir()

    done = nbs_bus("check", queue)

    order = (4, 5, 3, 2, 1, 0)
    want = "".join(f"[{rows[i][1]}] {names[i]} ({rows[i][2]} ago)\n" for i in order)
    assert (done.code, done.out.decode(), done.err) == (0, want, b"")


@pytest.mark.parametrize(
    ("seconds", "want"),
    [
        (-5, b"0s ago"),
        (0.999, b"0s ago"),
        (59.9, b"59s ago"),
        (60, b"1m ago"),
        (3599.9, b"59m ago"),
        (3600, b"1h ago"),
        (86_399, b"23h ago"),
        (86_400, b"1d ago"),
        (8_640_000, b"100d ago"),
    ],
)
def test_ages_are_floored(seconds: float, want: bytes) -> None:
    assert program.age(int(seconds * 1_000_000)) == want


def test_check_of_an_empty_queue_prints_nothing(nbs_bus: Run, queue: Path) -> None:
    assert (nbs_bus("check", queue).code, nbs_bus("check", queue).out) == (0, b"")
    assert nbs_bus("check").err == b"Usage: nbs-bus check <dir> [--handle=<name>]\n"
    assert nbs_bus("check").code == 4
    assert nbs_bus("check", queue / "no").code == 2


def test_handle_selects_by_source_and_empty_means_all(nbs_bus: Run, queue: Path) -> None:
    one = put(queue, f"{ago(-50)}-x-1.event", event("doc"))
    two = put(queue, f"{ago(-51)}-y-1.event", event("parser", priority="strange"))
    bare = put(queue, f"{ago(-52)}-z-1.event", "")

    assert nbs_bus("check", queue, "--handle=doc").out.decode() == f"[normal] {one} (0s ago)\n"
    names = re.findall(r"\] (\S+) \(", nbs_bus("check", queue, "--handle=").out.decode())
    assert names == [one, two, bare]
    assert nbs_bus("ack-all", queue, "--handle=parser").out == b"Acknowledged 1 event\n"
    assert nbs_bus("ack-all", queue).out == b"Acknowledged 2 events\n"
    assert nbs_bus("ack-all", queue).out == b"Acknowledged 0 events\n"


def test_read_and_ack(nbs_bus: Run, queue: Path) -> None:
    body = "source: a\nno newline at the end"
    name = put(queue, f"{ago(0)}-a-t-1.event", body)

    assert nbs_bus("read", queue, name).out.decode() == body
    first, second = nbs_bus("ack", queue, name), nbs_bus("ack", queue, name)
    assert (first.code, first.out, first.err) == (0, b"", b"")
    assert (second.code, second.err) == (3, f"Error: event not found: {name}\n".encode())
    assert (queue / "processed" / name).read_text() == body
    assert nbs_bus("read", queue, name).code == 3


@pytest.mark.parametrize("verb", ["read", "ack"])
@pytest.mark.parametrize("name", ["", ".", "..", "../x.event", "processed/x.event"])
def test_a_name_that_is_a_path_is_refused(nbs_bus: Run, queue: Path, verb: str, name: str) -> None:
    done = nbs_bus(verb, queue, name)

    want = f"Error: invalid event filename (path traversal): {name}\n"
    assert (done.code, done.out, done.err.decode()) == (1, b"", want)


def test_hidden_files_are_no_events(nbs_bus: Run, queue: Path) -> None:
    put(queue, ".lock", "")
    for verb in ("read", "ack"):
        assert nbs_bus(verb, queue, ".lock").code == 3
    assert (queue / ".lock").exists()


def test_prune_deletes_the_oldest_until_the_rest_fits(nbs_bus: Run, queue: Path) -> None:
    assert nbs_bus("prune", queue).out == b"Pruned 0 events (no processed directory)\n"
    processed = queue / "processed"
    processed.mkdir()
    pending = put(queue, "1-a-t-1.event", "x" * 4096)
    for us in (10, 9, 100):
        put(processed, f"{us}-a-t-1.event", "x" * 1024)
    put(processed, "notes.txt", "x" * 9999)

    assert nbs_bus("prune", queue, "--max-bytes=3072").out == (
        b"Pruned 0 events (3.0 KB / 3.0 KB limit)\n"
    )
    assert nbs_bus("prune", queue, "--max-bytes=3071").out == (
        b"Pruned 1 event (2.0 KB remaining, 3.0 KB limit)\n"
    )
    assert files(processed) == ["10-a-t-1.event", "100-a-t-1.event"]
    (queue / "config.yaml").write_text("retention-max-bytes: 1\n")
    assert nbs_bus("prune", queue).out == b"Pruned 2 events (0.0 KB remaining, 0.0 KB limit)\n"
    assert files(queue) == [pending]
    assert (processed / "notes.txt").exists()


@pytest.mark.parametrize("value", ["0", "-1", "x", "", "1.5", "9223372036854775808"])
def test_prune_takes_a_positive_limit(nbs_bus: Run, queue: Path, value: str) -> None:
    done = nbs_bus("prune", queue, f"--max-bytes={value}")

    assert (done.code, done.out) == (4, b"")
    assert done.err.decode() == f"Error: invalid --max-bytes value: {value}\n"


def test_prune_removes_what_dead_publishers_left(nbs_bus: Run, queue: Path) -> None:
    put(queue, f".tmp-{ago(4000)}-1.event", "half")
    put(queue, f".tmp-{ago(10)}-1.event", "half")

    nbs_bus("prune", queue)

    assert len([p for p in queue.iterdir() if p.name.startswith(".tmp-")]) == 1


def test_status(nbs_bus: Run, queue: Path) -> None:
    assert nbs_bus("status", queue).out == b"Pending: 0 total\nProcessed: 0 events (0.0 KB)\n"
    oldest = ago(1000)
    put(queue, f"{oldest}-a-t-1.event", event(priority="critical"))
    put(queue, f"{ago(500)}-a-t-1.event", event(priority="low"))
    put(queue, f"{ago(0)}-a-t-1.event", event())
    (queue / "processed").mkdir()
    put(queue / "processed", "junk.event", "x" * 512)
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(oldest // 1_000_000))
    want = (
        "Pending: 3 total (critical=1, high=0, normal=1, low=1)\n"
        f"Oldest pending: {stamp}\nProcessed: 1 events (0.5 KB)\n"
    )
    newest = max(p.stat().st_mtime for p in (queue / "processed", *queue.glob("*.event")))
    last = f"Last activity: {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(newest))}\n"

    # The original's lines come first, each under its own number; the line it lacks comes last.
    assert nbs_bus("status", queue).out.decode() == want + last
    for timeout, line in ((100, "2 stale events"), (700, "1 stale event"), (9999, "")):
        (queue / "config.yaml").write_text(f"ack-timeout: {timeout}\n")
        warning = f"WARNING: {line} (unacked > {timeout}s)\n" if line else ""
        assert nbs_bus("status", queue).out.decode() == want + warning + last


def test_help_and_unknown_commands_use_stderr(nbs_bus: Run) -> None:
    usage = program.USAGE
    helped, bare = nbs_bus("help"), nbs_bus()

    assert (helped.code, helped.out, helped.err) == (0, b"", usage)
    assert (bare.code, bare.out, bare.err) == (4, b"", usage)
    for word in ("--help", "-h", "--what"):  # the original knows "help" alone
        wrong = nbs_bus(word)
        said = f"Error: unknown command: {word}\n".encode() + usage
        assert (wrong.code, wrong.out, wrong.err) == (4, b"", said)
    assert usage.startswith(b"Usage: nbs-bus <command> [args...]\n")
    for verb, words in (("read", "<dir> <event-file>"), ("status", "<dir>")):
        done = nbs_bus(verb)
        assert (done.code, done.err.decode()) == (4, f"Usage: nbs-bus {verb} {words}\n")


def test_a_duplicate_within_the_window_is_dropped(nbs_bus: Run, queue: Path) -> None:
    assert nbs_bus("publish", queue, "a", "t", "low").code == 0
    assert nbs_bus("publish", queue, "a", "t", "low").code == 0  # off unless asked for
    done = nbs_bus("publish", queue, "a", "t", "high", "p", "--dedup-window=60")

    assert (done.code, done.out) == (5, b"")
    assert done.err == b"Dedup: event a:t dropped (duplicate within window)\n"
    assert len(files(queue)) == 2
    assert nbs_bus("publish", queue, "a", "u", "low", "--dedup-window=60").code == 0
    (queue / "config.yaml").write_text("dedup-window:60")
    assert nbs_bus("publish", queue, "a", "t", "low").code == 5
    assert nbs_bus("publish", queue, "a", "t", "low", "--dedup-window=0").code == 0
    nbs_bus("ack-all", queue)
    assert nbs_bus("publish", queue, "a", "t", "low").code == 0  # processed ones do not count


def test_the_window_counts_from_the_name_and_the_key_from_the_content(
    nbs_bus: Run, queue: Path
) -> None:
    put(queue, f"{ago(100)}-x-y-1.event", "dedup-key: a:t\n")

    assert nbs_bus("publish", queue, "a", "t", "low", "--dedup-window=99").code == 0
    (queue / files(queue)[1]).unlink()
    assert nbs_bus("publish", queue, "a", "t", "low", "--dedup-window=101").code == 5


@pytest.mark.parametrize(
    ("text", "window"),
    [
        (b"dedup-window: 7", 7),
        (b"dedup-window:7\r\n", 7),
        (b"# dedup-window: 7\n", 0),
        (b" dedup-window: 7\n", 0),
        (b"dedup-window : 7\n", 7),
        (b"dedup-window: 7s\ndedup-window:\n", 0),
        (b"dedup-window: -1\n", 0),
        (b"dedup-window: 9223372036855\n", 0),
        (b"dedup-window: 3\n\xff\x00\x01: 9\ndedup-window: x\n", 3),
        (b"x" * 600 + b"\ndedup-window: 8\n", 8),
        (b"dedup-window: 5" + b" " * 600 + b"\n", 0),
        (b"unknown: 1\nretention-max-bytes: 0\n", 0),
    ],
)
def test_config_is_read_line_by_line(queue: Path, text: bytes, window: int) -> None:
    (queue / "config.yaml").write_bytes(text)

    config = Spool(str(queue)).config()

    assert (config.dedup_window_s, config.retention_max_bytes) == (window, 16_777_216)
    assert (config.notify, config.poll_s) == ("inotifywait", 5)


def test_config_has_notify_and_poll_interval(queue: Path) -> None:
    (queue / "config.yaml").write_text("notify: poll\npoll-interval: 2\n")

    config = Spool(str(queue)).config()

    assert (config.notify, config.poll_s) == ("poll", 2)


def test_without_publishing_rights_it_is_a_general_error(nbs_bus: Run, queue: Path) -> None:
    (queue / "processed").write_text("in the way")
    name = put(queue, f"{ago(0)}-a-t-1.event", event())

    done = nbs_bus("ack", queue, name)

    assert (done.code, done.err) == (1, b"Error: cannot acknowledge event: Not a directory\n")


def test_each_step_of_publishing_fails_in_its_own_words(
    queue: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["publish", str(queue), "a", "t", "high", "x"]
    for name, said in (
        ("mkdir", "cannot create processed directory"),
        ("open", "cannot create event file"),
        ("fsync", "failed to flush event file"),
        ("rename", "failed to finalise event file"),
    ):

        def fail(*args: object, name: str = name) -> None:
            paths = {"fsync": (), "rename": (args[0], None, args[-1])}.get(name, args[:1])
            raise OSError(errno.EACCES, "", *paths)

        with monkeypatch.context() as patched:
            patched.setattr(os, name, fail)
            assert program.main(words) == 1
        assert capfd.readouterr() == ("", f"Error: {said}: Permission denied\n")
    assert [path.name for path in queue.iterdir()] == ["processed"]


@pytest.mark.parametrize("notify", ["inotifywait", "poll"])
def test_watch_blocks_until_an_event_arrives(
    queue: Path, nbs_bus: Run, processes: list[subprocess.Popen[bytes]], notify: str
) -> None:
    (queue / "config.yaml").write_text(f"notify: {notify}\npoll-interval: 1\n")
    watch = subprocess.Popen(
        [*NBS_BUS, "watch", str(queue), "--handle=doc"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENV,
    )
    processes.append(watch)
    nbs_bus("publish", queue, "other", "t", "low")
    with pytest.raises(subprocess.TimeoutExpired):
        watch.wait(0.7)
    name = nbs_bus("publish", queue, "doc", "t", "high").out.decode().strip()

    out, err = watch.communicate(timeout=10)

    assert re.fullmatch(rf"\[high\] {name} \([0-9]+s ago\)\n", out.decode())
    assert (watch.returncode, err) == (0, b"")


def test_inotify_wakes_a_watcher_long_before_the_next_poll(queue: Path) -> None:
    spool = Spool(str(queue))
    times: list[float] = []
    for _ in range(3):
        code = (
            "import sys, time; from trunkline.files.spool import Spool; time.sleep(0.35);"
            f"Spool({str(queue)!r}).publish('a', 't')"
        )
        child = subprocess.Popen([sys.executable, "-c", code], env=ENV)
        assert spool.wait(timeout_s=10)
        us = spool.pending()[0].timestamp_us
        times.append(time.time_ns() / 1000 - us)
        child.wait()
        spool.ack_all()

    assert min(times) < 300_000  # the safety poll is a second, poll-interval five


def test_watch_gives_up_after_its_timeout(nbs_bus: Run, queue: Path) -> None:
    done = nbs_bus("watch", queue, "--timeout=0.2")
    wrong = nbs_bus("watch", queue, "--timeout=soon")

    assert (done.code, done.out, done.err) == (3, b"", b"")
    assert (wrong.code, wrong.err) == (4, b"Error: invalid --timeout value: soon\n")


def test_status_tells_the_oldest_event_whatever_its_time(nbs_bus: Run, queue: Path) -> None:
    put(queue, "1794780438871720-a-t-1.event", event())
    put(queue, "0-a-t-1.event", event())

    assert b"\nOldest pending: 1970-01-01T00:00:00Z\n" in nbs_bus("status", queue).out


def test_processed_is_made_when_there_is_something_to_move(nbs_bus: Run, queue: Path) -> None:
    assert nbs_bus("ack-all", queue).out == b"Acknowledged 0 events\n"
    assert list(queue.iterdir()) == []
    assert nbs_bus("publish", queue, "a/b", "t", "low").code == 1
    assert [p.name for p in queue.iterdir()] == ["processed"]
