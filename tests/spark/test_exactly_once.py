"""Killed with -9 at random moments, the JVM, the Python or both: then each row is there once.

A log grows by one share after the other, and after each a pipeline does all there is to do. The
same is done once in peace and once under fire, where one or all of its processes are killed at
random moments, the first ones after a restart included. Tables and topics must be the same in the
end.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from trunkline.errors import NotFound
from trunkline.folder import Folder
from trunkline.names import GroupKey
from trunkline.options import GroupOptions, TopicOptions
from trunkline.spark.lake import EVENTS, Lake
from trunkline.spark.pipelines import all_pipelines
from trunkline.spark.source.catalogs import FolderCatalog as Catalog

from .demo import add_demo, begin_demo, demo_event
from .logs import TOPIC, read_log
from .victim import COPIES, MERGED, REPLAY, SINK

HITS = 3  # kills that one share of the log sees at most, so that many shares see some
WHO = ("all", "java", "python")  # who is killed; if not all, the rest comes to its end by itself
NOW = ("at", "appended_at")  # columns that tell when a run looked, or when the log was written
RUNS = ("rules", "lag.history")  # tables that have a row for each run
# What differs from run to run in an event that a pipeline published.
PUBLISHED = {
    "id",
    "timestamp",
    "headers",
    "offset",
}
PATIENCE_S = 240.0
ENDING_S = 60.0


class Victim:
    """A process with a session, and everything it starts."""

    def __init__(self, names: str, root: Path, place: Path) -> None:
        program = [sys.executable, "-m", "tests.spark.victim", names, str(root), str(place)]
        self.process = subprocess.Popen(
            program,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a killed JVM makes its Python complain
            text=True,
            start_new_session=True,
            cwd=Path(__file__).parents[2],
        )
        assert self._says("ready", PATIENCE_S)

    def work(self, share: range, life_s: float | None = None, who: str = "all") -> bool:
        """Whether it did all there is, of which ``share`` is new; else it was killed."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{share.start} {share.stop}\n")
        self.process.stdin.flush()
        if self._says("done", PATIENCE_S if life_s is None else life_s):
            return True
        assert life_s is not None, "it did not come to its end"
        assert self.process.poll() is None, "it failed by itself"
        self.kill(who)
        return False

    def _says(self, word: str, within_s: float) -> bool:
        out = self.process.stdout
        assert out is not None
        if not select.select([out], [], [], within_s)[0]:
            return False
        said = out.readline().strip()
        assert said == word, f"it said {said!r}"
        return True

    def kill(self, who: str = "all") -> None:
        """The pyspark daemon has a process group of its own, so go by the session."""
        leader = self.process.pid
        if who != "all":
            java = next(pid for pid, name in in_session(leader).items() if name == "java")
            os.kill(java if who == "java" else leader, signal.SIGKILL)
            deadline = time.monotonic() + ENDING_S
            while in_session(leader) and time.monotonic() < deadline:
                self.process.poll()
                time.sleep(0.01)
        while family := in_session(leader):
            for pid in family:
                with contextlib.suppress(ProcessLookupError):  # it ended by itself since
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.01)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def in_session(leader: int) -> dict[int, str]:
    """The living processes of a session, and their names."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path(f"/proc/{entry}/stat").read_text()
            except OSError:
                continue
            state, _, _, session = stat.rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                found[int(entry)] = stat.partition("(")[2].rpartition(")")[0]
    return found


class Trial:
    """A bus that grows, a lake, and who works on them."""

    def __init__(self, folder: Path, names: str) -> None:
        self.names, self.root, self.place = names, folder / "bus", folder / "lake"
        log = begin_demo(self.root)
        log.define(COPIES, TopicOptions(partitions=3))
        log.step(GroupKey(TOPIC, 0, "billing"), lambda group: group.define(GroupOptions(), 60))
        log.close()

    def grow(self, share: range) -> None:
        log = Folder(str(self.root))
        add_demo(log, share.start, share.stop, 250)
        log.close()

    def in_peace(self, shares: list[range]) -> None:
        victim = Victim(self.names, self.root, self.place)
        try:
            for share in shares:
                self.grow(share)
                victim.work(share)
        finally:
            victim.kill()

    def under_fire(self, events: int, kills: int, seed: int) -> tuple[list[range], Counter[str]]:
        """The shares in which the log grew, and who was killed at work. The last share is what is
        left when there are enough kills.
        """
        moments = random.Random(seed)
        shares: list[range] = []
        landed: Counter[str] = Counter()
        takes_s = {"cold": 10.0, "warm": 3.0}  # a guess, until it is known
        victim: Victim | None = None
        try:
            while not shares or shares[-1].stop < events:
                start = shares[-1].stop if shares else 0
                size = events // (kills + 2) if landed.total() < kills else events
                shares.append(range(start, min(events, start + size)))
                self.grow(shares[-1])
                hits, done = 0, False
                while not done:
                    state = "warm" if victim else "cold"
                    victim = victim or Victim(self.names, self.root, self.place)
                    life_s, who = moments.uniform(0.0, takes_s[state]), moments.choice(WHO)
                    spared = hits == HITS or landed.total() == kills
                    began = time.monotonic()
                    done = victim.work(shares[-1], None if spared else life_s, who)
                    if done:
                        takes_s[state] = time.monotonic() - began
                    else:
                        hits, victim = hits + 1, None
                        landed[who] += 1
        finally:
            if victim is not None:
                victim.kill()
        assert landed.total() == kills, f"only {landed} met anything, seed {seed}"
        return shares, landed

    @cached_property
    def tables(self) -> dict[str, Counter[str]]:
        lake = Lake(str(self.place))
        return {
            f"table {name}": Counter(table_rows(lake, name))
            for name in lake.tables()
            if name not in RUNS
        }

    def topics(self) -> dict[str, Counter[str]]:
        """What was published, by topic; without what the log was made of."""
        catalog = Catalog(str(self.root))
        partitions = catalog.topics()
        catalog.close()
        inputs = {demo_event(n).topic for n in range(400)}
        return {
            f"topic {topic}": Counter(
                plain([e.type, e.key, e.space, e.payload])
                for partition in range(count)
                for e in (record.event for record in read_log(str(self.root), topic, partition))
            )
            for topic, count in partitions.items()
            if topic not in inputs
        }


def table_rows(lake: Lake, name: str) -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from deltalake import DeltaTable

    files = pa.table(DeltaTable(lake.place(name)).get_add_actions(flatten=True)).to_pylist()
    rows = []
    for file in files:
        apart = {k: str(v) for k, v in file.items() if k.startswith("partition.")}
        for row in pq.ParquetFile(os.path.join(lake.place(name), file["path"])).read().to_pylist():
            shown = {k: v for k, v in row.items() if not k.startswith("_") and k not in NOW}
            shown |= apart
            if str(row.get("actor")).startswith("pipeline."):
                shown = {k: v for k, v in shown.items() if k not in PUBLISHED}
            rows.append(plain(shown))
    return rows


def plain(value: Any) -> str:
    """A value as text, the same for the same; sums of floats depend on their order a little."""

    def rounded(part: Any) -> Any:
        match part:
            case float():
                return f"{part:.6g}"
            case dict():
                return {str(k): rounded(v) for k, v in part.items()}
            case list() | tuple():
                return [rounded(v) for v in part]
        return part

    return json.dumps(rounded(value), default=str, sort_keys=True)


def prove(tmp_path: Path, names: str, events: int, kills: int) -> None:
    began = time.monotonic()
    seed = random.randrange(1 << 32)
    storm, calm = Trial(tmp_path / "storm", names), Trial(tmp_path / "calm", names)
    shares, landed = storm.under_fire(events, kills, seed)
    calm.in_peace(shares)
    whole = f"{events} events in {len(shares)} shares, killed at work {dict(landed)}"
    print(f"{names}: {whole}, {time.monotonic() - began:.0f} s, seed {seed}")

    for there, here in ((calm.tables, storm.tables), (calm.topics(), storm.topics())):
        assert there.keys() == here.keys()
        for name, rows in there.items():
            assert not differing(here[name], rows), f"{name}, seed {seed}"
    check_copies(storm, events)


def differing(found: Counter[str], wanted: Counter[str]) -> str:
    """What is too much and what is missing, if anything is; a few of each are enough to see."""
    extra, lost = found - wanted, wanted - found
    if not extra and not lost:
        return ""
    return f"{extra.total()} too many: {list(extra)[:2]}, {lost.total()} lost: {list(lost)[:2]}"


def check_copies(trial: Trial, events: int) -> None:
    """What is a copy of the log, by the log itself."""
    made = [demo_event(n) for n in range(events)]
    names = trial.names.split(",")
    if "lake" in names or MERGED in names:
        topics = {event.topic for event in made}
        found = [json.loads(row) for row in trial.tables[f"table {EVENTS}"].elements()]
        ids = Counter(row["id"] for row in found if row["partition.topic"] in topics)
        assert not differing(ids, Counter(event.id for event in made))
    if SINK in names or REPLAY in names:
        copies = [r.event for p in range(3) for r in read_log(str(trial.root), COPIES, p)]
        ids = Counter(str(e.cause if REPLAY in names else e.id) for e in copies)
        wanted = Counter(event.id for event in made if event.topic == TOPIC)
        assert not differing(ids, wanted)


@pytest.fixture(autouse=True)
def java() -> None:
    from trunkline.spark.session.java import find_java

    try:
        find_java()
    except NotFound as missing:
        pytest.skip(str(missing))


@pytest.mark.timeout(300)
def test_two_kills_lose_and_repeat_nothing(tmp_path: Path) -> None:
    trial = Trial(tmp_path, f"{SINK},consolidation")
    trial.under_fire(2000, kills=2, seed=random.randrange(1 << 32))

    check_copies(trial, 2000)
    rows = [json.loads(row) for row in trial.tables["table consolidation"].elements()]
    acts = {(e.topic, e.idem_key or e.id) for e in map(demo_event, range(2000)) if e.actor}
    assert sum(row["events"] for row in rows) == len(acts)
    told = [r.event.payload["first_id"] for r in read_log(str(trial.root), "hippo")]
    over = [row["first_id"] for row in rows if not row["open"]]
    assert over
    assert Counter(told) == Counter(over)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [SINK, REPLAY, MERGED, *all_pipelines()])
def test_ten_kills_lose_and_repeat_nothing(tmp_path: Path, name: str) -> None:
    prove(tmp_path, name, events=100_000, kills=10)
