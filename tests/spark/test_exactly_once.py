"""Killed with -9 at random moments, the JVM and every Python: then each row is there once.

A log grows by one share after the other, and after each a pipeline does all there is to do. The
same is done once in peace and once under fire, where the whole process tree is killed at random
moments, the first ones after a restart included. Tables and topics must be the same in the end.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from trunkline.errors import NotFound
from trunkline.log.folder import Folder, GroupKey
from trunkline.options import GroupOptions, TopicOptions
from trunkline.spark.extents import Catalog
from trunkline.spark.lake import EVENTS, Lake
from trunkline.spark.pipelines import all_pipelines

from .demo import add_demo, begin_demo, demo_event
from .logs import TOPIC, read_log
from .victim import COPIES, SINK

HITS = 2  # kills that one share of the log sees at most, so that all shares see some
NOW = ("seen", "modification_time")  # columns that tell when a run looked
# What differs from run to run in an event that a pipeline published.
PUBLISHED = {"id", "timestamp", "headers", "offset", "partition.date"}
PATIENCE_S = 240.0


class Victim:
    """A process with a session, and everything it starts."""

    def __init__(self, names: str, root: Path, place: Path) -> None:
        program = [sys.executable, "-m", "tests.spark.victim", names, str(root), str(place)]
        self.process = subprocess.Popen(
            program,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd=Path(__file__).parents[2],
        )
        assert self._says("ready", PATIENCE_S)

    def work(self, life_s: float | None = None) -> bool:
        """Whether it did all there was; else it was killed, with all it had started."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        if self._says("done", PATIENCE_S if life_s is None else life_s):
            return True
        assert life_s is not None, "it did not come to its end"
        assert self.process.poll() is None, "it failed by itself"
        self.kill()
        return False

    def _says(self, word: str, within_s: float) -> bool:
        out = self.process.stdout
        assert out is not None
        if not select.select([out], [], [], within_s)[0]:
            return False
        said = out.readline().strip()
        assert said == word, f"it ended with {self.process.wait(60)}"
        return True

    def kill(self) -> None:
        """The pyspark daemon has a process group of its own, so go by the session."""
        while family := in_session(self.process.pid):
            for pid in family:
                os.kill(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.01)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def in_session(leader: int) -> list[int]:
    """The living processes of a session."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path(f"/proc/{entry}/stat").read_text()
            except OSError:
                continue
            state, _, _, session = stat.rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                found.append(int(entry))
    return found


class Trial:
    """A bus that grows, a lake, and who works on them."""

    def __init__(self, folder: Path, names: str, events: int, shares: int) -> None:
        self.names, self.events, self.shares = names, events, shares
        self.root, self.place = folder / "bus", folder / "lake"
        log = begin_demo(self.root)
        log.define(COPIES, TopicOptions(partitions=3))
        log.step(GroupKey(TOPIC, 0, "billing"), lambda group: group.define(GroupOptions(), 60))
        log.close()

    def grow(self, share: int) -> None:
        log = Folder(str(self.root))
        add_demo(
            log, share * self.events // self.shares, (share + 1) * self.events // self.shares, 250
        )
        log.close()

    def in_peace(self) -> list[float]:
        """How long each share took."""
        took = []
        victim = Victim(self.names, self.root, self.place)
        try:
            for share in range(self.shares):
                self.grow(share)
                began = time.monotonic()
                victim.work()
                took.append(time.monotonic() - began)
        finally:
            victim.kill()
        return took

    def under_fire(self, kills: int, took: list[float], moments: random.Random) -> int:
        """How many kills met a process at work."""
        landed = 0
        victim: Victim | None = None
        try:
            for share in range(self.shares):
                self.grow(share)
                hits, done = 0, False
                while not done:
                    cold = victim is None
                    victim = victim or Victim(self.names, self.root, self.place)
                    life_s = moments.uniform(0.0, took[0] if cold else max(took[1:]))
                    spared = hits == HITS or landed == kills
                    done = victim.work(None if spared else life_s)
                    if not done:
                        hits, landed, victim = hits + 1, landed + 1, None
        finally:
            if victim is not None:
                victim.kill()
        return landed

    def tables(self) -> dict[str, Counter[str]]:
        lake = Lake(str(self.place))
        return {f"table {name}": Counter(table_rows(lake, name)) for name in lake.tables()}

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
    from trunkline.spark.java import find_java

    try:
        find_java()
    except NotFound as missing:
        pytest.skip(str(missing))
    shares = kills // HITS + 2
    calm = Trial(tmp_path / "calm", names, events, shares)
    took = calm.in_peace()
    seed = random.randrange(1 << 32)
    storm = Trial(tmp_path / "storm", names, events, shares)
    landed = storm.under_fire(kills, took, random.Random(seed))
    print(f"{names}: {events} events, {landed} kills, shares took {took}, seed {seed}")

    assert landed == kills, f"only {landed} kills met anything, seed {seed}"
    for there, here in ((calm.tables(), storm.tables()), (calm.topics(), storm.topics())):
        assert there.keys() == here.keys()
        for name, rows in there.items():
            extra, lost = here[name] - rows, rows - here[name]
            shown = f"{list(extra)[:2]} and not {list(lost)[:2]}"
            assert not extra + lost, f"{name}, seed {seed}: {shown}"
    made = [demo_event(n) for n in range(events)]
    if "lake" in names.split(","):
        found = [json.loads(row) for row in storm.tables()[f"table {EVENTS}"].elements()]
        ids = Counter(
            row["id"] for row in found if row["partition.topic"] in {e.topic for e in made}
        )
        assert ids == Counter(event.id for event in made)
    if SINK in names.split(","):
        copies = [r.event.id for p in range(3) for r in read_log(str(storm.root), COPIES, p)]
        assert Counter(copies) == Counter(event.id for event in made if event.topic == TOPIC)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("spark")
def test_two_kills_lose_and_repeat_nothing(tmp_path: Path) -> None:
    prove(tmp_path, "lake,temporal", events=5000, kills=2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [SINK, *all_pipelines()])
def test_ten_kills_lose_and_repeat_nothing(tmp_path: Path, name: str) -> None:
    prove(tmp_path, name, events=100_000, kills=10)
