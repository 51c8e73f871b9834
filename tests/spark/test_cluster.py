"""A real master and two workers give what one process gives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

from trunkline.spark.cluster import Cluster

from .logs import make_log


def results(master: str, root: str, place: Path) -> dict[str, Any]:
    program = Path(__file__).with_name("on_cluster.py")
    done = subprocess.run(
        [sys.executable, str(program), master, root, str(place)],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_workers_give_what_one_process_gives(tmp_path: Path) -> None:
    root = make_log(tmp_path / "bus", 2000, partitions=2)
    alone = results("local[2]", root, tmp_path / "alone")

    with Cluster(str(tmp_path / "cluster"), workers=2, port=17177) as cluster:
        together = results(cluster.url, root, tmp_path / "together")

    assert alone["lake"] == [2000, ""]
    assert len(alone["table events"]) == 2000
    assert together == alone
