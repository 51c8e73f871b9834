"""A bus that one may only read: what only reads works as ever, what writes says that it cannot."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import trunkline
from trunkline import GroupOptions
from trunkline.cli import main

# Each command once on a copy, so that all is imported and its answer is known, and once on the bus
# itself as somebody who owns nothing.
BOTH = """
import contextlib, io, json, os, sys
from trunkline.cli import main
place, commands = sys.argv[1], json.loads(sys.argv[2])

def run(bus, words):
    out, err = io.StringIO(), io.StringIO()
    sys.stdin = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            words = [word.replace("BUS", bus) for word in words]
            code = main([*words, "--url", f"file:{place}/{bus}"])
        except SystemExit as end:
            code = end.code
    return code, out.getvalue(), err.getvalue()

told = [[run("own", words)] for words in commands]
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
os.chdir("/")
for words, answers in zip(commands, told):
    answers.append(run("bus", words))
print(json.dumps(told))
"""

READS = [
    "topic ls",
    "topic ls --json",
    "topic info orders",
    "group ls",
    "group ls --json",
    "group ls orders.DLQ --json",
    "group info orders billing",
    "group info orders billing --json",
    "tail orders",
    "sub orders --from start --wait 0s",
    "sub orders --group billing --ack none --wait 0s",
    "get orders 1",
    "get orders 1: --json",
    "grep orders 2",
    "dlq ls",
    "dlq ls --closed --json",
    "dlq show orders 1",
    "dlq redrive orders --dry-run",
    "dlq drop orders --dry-run",
    "group seek orders billing --to start --dry-run",
    "group rm orders billing --dry-run",
    "topic purge orders --dry-run",
    "topic compact orders --dry-run",
    "topic rm orders --dry-run",
    "verify",
    "doctor --verify",
    "claims",
]
WRITES = [
    "pub orders 1",
    "pub fresh 1",
    "sub orders --group billing --wait 0s",
    "sub orders --group other --wait 0s",
    "topic create fresh",
    "topic edit orders --compact",
    "topic purge orders --yes",
    "topic compact orders --all --yes",
    "topic rm orders --yes",
    "group seek orders billing --to start",
    "group pause orders billing",
    "group resume orders billing",
    "group rm orders billing --yes",
    "dlq redrive orders",
    "dlq drop orders --yes",
    "claim src/a.py --actor ann",
]

Answer = tuple[int, str, str]


async def fill(url: str) -> None:
    """Settled, refused, and yet to come."""
    async with trunkline.connect(url) as bus:
        await bus.publish_many("orders", [1, 2, 3, 4, 5], key="k")
        await bus.publish("refunds", 1)

        policy = GroupOptions(ordering="none")
        async with bus.subscribe("orders", group="billing", policy=policy) as stream:
            for _ in range(3):
                delivery = await anext(stream)
                await (delivery.term("no") if delivery.offset == 2 else delivery.ack())


@pytest.fixture
def place() -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    with tempfile.TemporaryDirectory() as name:  # not under tmp_path, which is closed to others
        place = Path(name)
        asyncio.run(fill(f"file:{place}/bus"))
        shutil.copytree(place / "bus", place / "own")
        open_to_readers(place)
        yield place


def open_to_readers(place: Path) -> None:
    for path in [place, *place.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)


def as_both(place: Path, commands: list[str]) -> dict[str, list[Answer]]:
    """What the owner of a copy is told, and what a stranger is."""
    words = json.dumps([command.split() for command in commands])
    done = subprocess.run(
        [sys.executable, "-c", BOTH, str(place), words],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(commands, json.loads(done.stdout), strict=True))


def files(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_what_only_reads_works_and_leaves_no_trace(place: Path) -> None:
    before = files(place / "bus")

    for command, (owner, stranger) in as_both(place, READS).items():
        mine = [text.replace(f"{place}/own", f"{place}/bus") for text in owner[1:]]
        assert (command, owner[0], *mine) == (command, *stranger)
        assert owner[0] == 0, owner

    assert files(place / "bus") == before
    assert files(place / "own").keys() == {name.replace("/bus/", "/own/") for name in before}


def test_a_backup_can_be_taken_by_a_user_that_may_only_read(place: Path) -> None:
    (place / "out").mkdir()
    (place / "out").chmod(0o777)

    commands = [f"backup {place}/out/BUS{ending}" for ending in ("", ".tgz")]
    for answers in as_both(place, commands).values():
        assert [code for code, _, _ in answers] == [0, 0], answers

    for saved in ("bus", "bus.tgz"):
        assert main(["restore", f"{place}/out/{saved}", f"{place}/again.{saved}"]) == 0
        again, bus = (files(place / name) for name in (f"again.{saved}", "bus"))
        for name in ("wal/orders.00000001.jsonl", "offsets/orders__billing.json"):
            assert again[f"{place}/again.{saved}/{name}"] == bus[f"{place}/bus/{name}"]


def test_what_must_write_says_so_in_one_line(place: Path) -> None:
    before = files(place / "bus")

    for command, (_, (code, out, err)) in as_both(place, WRITES).items():
        assert (command, code, out, err.count("\n")) == (command, 1, "", 1), err
        assert err.startswith("trunkline: "), err
        assert "Permission denied" in err, err

    assert files(place / "bus") == before


def test_a_bus_without_its_empty_folders_can_be_read(place: Path) -> None:
    """As version control or a copy of the plain files leaves it."""
    for bus in ("bus", "own"):
        for name in ("members", "dlq"):
            shutil.rmtree(place / bus / name)
        for lock in (place / bus / "offsets").glob("*.lock"):
            lock.unlink()

    for command, (owner, stranger) in as_both(place, ["topic ls", "group ls", "doctor"]).items():
        assert (command, stranger[0], stranger[2]) == (command, 0, "")
        assert stranger[1] == owner[1].replace(f"{place}/own", f"{place}/bus")
