"""Killed with -9 at random moments, the JVM and every Python: then each row is there once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from trunkline.log.folder import Folder
from trunkline.options import TopicOptions
from trunkline.spark.lake import EVENTS, Lake

from .logs import TOPIC, append, make_event, read_log

RECORDS = 100_000
KILLS = 10


def fill(root: Path) -> str:
    folder = Folder(str(root))
    folder.define(TOPIC, TopicOptions(partitions=2))
    folder.define("copies", TopicOptions(partitions=3))
    for start in range(0, RECORDS, 1000):
        events = [make_event(n, key=f"k{n % 97}") for n in range(start, start + 1000)]
        append(folder, events, start // 1000 % 2)
    folder.close()
    return str(root)


def run(kind: str, root: str, place: str, life_s: float | None) -> bool:
    """Whether it came to its end; else everything it had started was killed."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("victim.py")), kind, root, place],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "started\n"
        if life_s is None:
            return process.wait(300) == 0
        try:
            return process.wait(life_s) == 0
        except subprocess.TimeoutExpired:
            return False
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            time.sleep(0.2)
        process.stdout.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["sink", "lake"])
def test_every_row_is_there_once_after_ten_kills(tmp_path: Path, kind: str) -> None:
    root = fill(tmp_path / "bus")
    place = str(tmp_path / ("lake" if kind == "lake" else "check"))
    seed = random.randrange(1 << 32)
    moments = random.Random(seed)
    for _ in range(KILLS):
        if run(kind, root, place, moments.uniform(0.2, 6.0)):
            break
    assert run(kind, root, place, None)

    if kind == "sink":
        found = Counter(r.event.id for p in range(3) for r in read_log(root, "copies", p))
    else:
        import pyarrow.parquet as pq
        from deltalake import DeltaTable

        files = DeltaTable(Lake(place).place(EVENTS)).file_uris()
        found = Counter(
            one for file in files for one in pq.ParquetFile(file).read(["id"])["id"].to_pylist()
        )
    assert len(found) == RECORDS, f"seed {seed}"
    assert set(found.values()) == {1}, f"seed {seed}"
