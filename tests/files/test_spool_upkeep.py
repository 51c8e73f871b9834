"""What a spool does by itself: news of its configuration, retention; and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from trunkline.files.spool import Spool

from .harness import ENV, TRUNKLINE, Run


def types(queue: Path) -> list[str]:
    return [name.split("-", 2)[2] for name in sorted(os.listdir(queue)) if name.endswith(".event")]


def test_status_shows_when_something_last_happened(nbs_bus: Run, queue: Path) -> None:
    assert b"Last activity" not in nbs_bus("status", queue).out
    nbs_bus("publish", queue, "a", "t", "low")
    shown = nbs_bus("status", queue).out.decode().splitlines()[-1]
    moment = datetime.fromisoformat(shown.removeprefix("Last activity: "))
    assert abs((datetime.now(UTC) - moment).total_seconds()) < 60
    assert nbs_bus("ack-all", queue).code == 0
    assert b"Last activity: " in nbs_bus("status", queue).out


def test_a_change_of_the_configuration_is_published_once(nbs_bus: Run, queue: Path) -> None:
    nbs_bus("check", queue)
    assert os.listdir(queue) == []  # a spool without a configuration stays as it is
    (queue / "config.yaml").write_text("dedup-window: 60\n")
    nbs_bus("check", queue)
    assert types(queue) == []  # the first look only takes note
    (queue / "config.yaml").write_text("dedup-window: 90\n")
    for _ in range(3):
        nbs_bus("check", queue)
    found = [one for one in Spool(str(queue)).pending() if one.type == "config-change"]
    assert [one.source for one in found] == ["nbs-bus"]
    assert b"dedup-window: 90" in Spool(str(queue)).read(found[0].name)
    (queue / "config.yaml").unlink()
    nbs_bus("publish", queue, "a", "t", "low")
    assert sum("config-change" in name for name in types(queue)) == 2


def test_a_watcher_notices_a_change(queue: Path) -> None:
    (queue / "config.yaml").write_text("ack-timeout: 5\n")
    spool = Spool(str(queue))
    spool.notice_config()
    timer = threading.Timer(0.1, lambda: (queue / "config.yaml").write_text("ack-timeout: 6\n"))
    timer.start()
    found = spool.wait(timeout_s=30)
    timer.join()
    assert [one.type for one in found] == ["config-change"]


def test_retention_runs_by_itself_where_it_is_configured(nbs_bus: Run, queue: Path) -> None:
    for _ in range(5):
        nbs_bus("publish", queue, "a", "t", "low", "x" * 500)
    nbs_bus("ack-all", queue)
    assert len(os.listdir(queue / "processed")) == 5  # nothing is said of retention
    (queue / "config.yaml").write_text("retention-max-bytes: 2000\n")
    name = nbs_bus("publish", queue, "a", "t", "low", "x" * 500).out.decode().strip()
    nbs_bus("ack", queue, name)
    left = list((queue / "processed").iterdir())
    assert sum(path.stat().st_size for path in left) <= 2000
    assert any(path.name == name for path in left)  # the oldest go


def test_a_payload_comes_from_stdin(trunkline_cli: Run, queue: Path) -> None:
    large = "x" * 300_000  # more than one argument may hold
    words = ["spool", "publish", str(queue), "a", "t", "low"]
    done = subprocess.run(
        [*TRUNKLINE, *words, "-"], input=large.encode(), capture_output=True, env=ENV, timeout=60
    )
    assert done.returncode == 0, done.stderr
    spool = Spool(str(queue))
    assert spool.get(done.stdout.decode().strip()).payload == large.encode()
    assert trunkline_cli(*words, "--", "--- a/file").code == 0
    assert sorted(spool.get(one.name).payload for one in spool.pending())[0] == b"--- a/file"


@pytest.mark.parametrize(
    "words",
    [
        "publish {} a t low --- --dedup=5",
        "check {} --json",
        "status {} --verbose",
        "prune {} --all",
    ],
)
def test_an_option_that_is_none_is_refused(trunkline_cli: Run, queue: Path, words: str) -> None:
    done = trunkline_cli("spool", *words.format(queue).split())
    assert (done.code, b"unknown option" in done.err) == (4, True)
    assert types(queue) == []


def test_a_list_is_cut_at_a_limit(trunkline_cli: Run, queue: Path) -> None:
    for n in range(5):
        trunkline_cli("spool", "publish", queue, "a", f"t{n}", "low")
    done = trunkline_cli("spool", "check", queue, "--limit=2")
    assert (done.out.count(b"\n"), done.err) == (2, b"3 more events are pending\n")


# -- NDJSON ------------------------------------------------------------------------------------


def publish(cli: Run, count: int) -> None:
    for n in range(count):
        payload = json.dumps({"n": n, "text": "x" * 200})
        words = ("--topic", "t", "--scope", f"s{n}", "--actor", "me", "--payload-json", payload)
        assert cli("ndjson", "publish", *words).code == 0


def test_a_poll_waits_for_the_first_event(trunkline_cli: Run) -> None:
    publish(trunkline_cli, 1)
    assert trunkline_cli("ndjson", "poll", "--consumer", "c").code == 0
    timer = threading.Timer(0.5, lambda: publish(trunkline_cli, 1))
    timer.start()
    done = trunkline_cli("ndjson", "poll", "--consumer", "c", "--wait", "50s")
    timer.join()
    assert len(json.loads(done.out)["events_returned"]) == 1
    nothing = trunkline_cli("ndjson", "poll", "--consumer", "c", "--wait", "300ms")
    assert json.loads(nothing.out)["events_returned"] == []


def test_a_poll_keeps_to_its_budget_and_loses_nothing(trunkline_cli: Run) -> None:
    publish(trunkline_cli, 8)
    seen = []
    for _ in range(10):
        done = trunkline_cli("ndjson", "poll", "--consumer", "c", "--budget", "2500")
        events = json.loads(done.out)["events_returned"]
        assert len(done.out) <= 2500 or len(events) == 1
        seen += [event["payload"]["n"] for event in events]
    assert seen == list(range(8))


def test_a_user_that_may_read_the_log_may_read_an_offset(
    trunkline_cli: Run, tmp_path: Path
) -> None:
    publish(trunkline_cli, 1)
    (tmp_path / "state/pubsub/events_v0.ndjson").chmod(0o644)
    trunkline_cli("ndjson", "poll", "--consumer", "c")
    offsets = [path for path in (tmp_path / "state/pubsub/offsets").iterdir() if path.is_file()]
    assert any(path.stat().st_mode & 0o044 == 0o044 for path in offsets if path.suffix == ".json")
    (tmp_path / "state/pubsub/events_v0.ndjson").chmod(0o600)
    trunkline_cli("ndjson", "poll", "--consumer", "c")
    assert all(path.stat().st_mode & 0o044 == 0 for path in offsets if path.suffix == ".json")
