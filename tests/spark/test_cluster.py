"""A real master and two workers give what one process gives."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

pytest.importorskip("pyspark")

import trunkline
from trunkline.errors import InvalidOption, TrunklineError
from trunkline.spark.session.cluster import Cluster, open_session

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


def free_port() -> int:
    """One whose neighbours, the pages of master and workers, are most likely free as well."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1]) % 20_000 + 20_000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_workers_give_what_one_process_gives(tmp_path: Path) -> None:
    root = make_log(tmp_path / "bus", 2000, partitions=2)
    copy = shutil.copytree(root, tmp_path / "copy")
    alone = results("local[2]", root, tmp_path / "alone")

    with Cluster(str(tmp_path / "cluster"), workers=2, port=free_port()) as cluster:
        together = results(cluster.url, str(copy), tmp_path / "together")

    assert together["executors"] == 2
    assert together["pythons"] == [sys.executable]
    assert together["packages"] == [trunkline.__file__]
    assert alone["errors"] == together["errors"] == {}
    assert len(alone["table events"]) == len(alone["table clean"]) == 2000
    assert together["published"] == alone["published"]
    for table in ("events", "clean", "traffic", "temporal"):
        assert together[f"table {table}"] == alone[f"table {table}"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cluster_comes_up_by_command_and_goes_with_it(tmp_path: Path) -> None:
    words = ["spark", "cluster", "up", "--workers", "1", "--port", str(free_port()), "--json"]
    command = [sys.executable, "-m", "trunkline.cli", *words, "--folder", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        told = json.loads(process.stdout.readline())
        with urlopen(f"{told['page']}/json/", timeout=20) as answer:
            state = json.load(answer)
        assert (state["url"], len(state["workers"])) == (told["master"], 1)
    finally:
        process.terminate()
        assert process.wait(60) == 0
        process.stdout.close()
    with pytest.raises(OSError, match="refused"):
        urlopen(told["page"], timeout=5)


def test_an_address_that_cannot_be_right_is_told_at_once() -> None:
    with pytest.raises(InvalidOption, match="'sprak://x:1' is no Spark"):
        open_session("sprak://x:1")
    with pytest.raises(TrunklineError, match=r"no Spark answers at spark://127\.0\.0\.1:1"):
        open_session("spark://127.0.0.1:1")


@pytest.mark.timeout(120)
def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with (
            pytest.raises(TrunklineError, match="a part of the cluster ended"),
            Cluster(str(tmp_path), workers=1, port=taken.getsockname()[1]),
        ):
            pass
