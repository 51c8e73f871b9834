"""One program runs on every bus; only the URL differs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.client import running
from kit.mongod import fresh_database
from trunkline.bus.nats.server import Servers

PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "anywhere.py"
SAID = """the last one is a repeat: True
billed [1, 2, 4]
ada: [1]
bob: [2, 4]
dead letter: order 3, a negative price
lag 0
"""

pytestmark = pytest.mark.timeout(120)


def says(url: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), url],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=90,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def nats_url(tmp_path: Path) -> Iterator[str]:
    with Servers(tmp_path / "nats", sync="2m") as servers:
        yield servers.url


@pytest.mark.parametrize("url", ["memory:", "file:.bus"])
def test_in_this_process_and_in_a_folder(tmp_path: Path, url: str) -> None:
    assert says(url, tmp_path) == SAID


async def test_behind_a_broker(tmp_path: Path) -> None:
    async with running(tmp_path / "served") as broker:
        assert says(broker.url, tmp_path) == SAID


def test_on_nats(tmp_path: Path, nats_url: str) -> None:
    assert says(nats_url, tmp_path) == SAID


def test_in_mongodb(tmp_path: Path, mongo_url: str) -> None:
    assert says(fresh_database(mongo_url), tmp_path) == SAID
