"""``trunkline init``, ``verify`` and ``bench``: a bus folder as a whole."""

from __future__ import annotations

import argparse
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from trunkline.cli import ERROR, OK, Commands, leaf
from trunkline.cli.arguments import bus_path, bus_url, duration, open_folder, pick_topics
from trunkline.cli.render import Printer, Progress, amount, progress
from trunkline.errors import (
    Corrupt,
    InvalidOption,
    LockTimeout,
    StorageError,
    TrunklineError,
    UnsupportedFormat,
)
from trunkline.folder import Folder, upkeep
from trunkline.folder.upkeep import Finding
from trunkline.folder.verify import verify_group
from trunkline.log import atomic
from trunkline.names import GroupKey

_EVENT_BYTES = 400


def register(commands: Commands[Any]) -> None:
    leaf(commands, "init", run_init, "make a bus folder")

    verify = leaf(commands, "verify", run_verify, "check every byte of a bus folder")
    verify.add_argument(
        "topics", metavar="TOPIC", nargs="*", help="only these, * and > allowed (all)"
    )
    verify.add_argument(
        "--public-key", metavar="KEY", help="check the signatures of 'trunkline seal'"
    )
    verify.add_argument(
        "--against", metavar="OLD", help="checkpoints that were kept elsewhere: a file or a folder"
    )

    bench = leaf(commands, "bench", run_bench, "measure this machine, where the bus is")
    bench.add_argument("--seconds", type=duration, default=1.0, help="for each of three rounds")


def run_init(args: argparse.Namespace) -> int:
    path = os.path.abspath(bus_path(bus_url(args)))
    there = os.path.exists(os.path.join(path, "bus.json"))
    with closing(open_folder(args, create=True)) as folder:
        row = {"path": path, "id": folder.id, "created": not there}
        Printer(args).row(row, f"{'there is a bus at' if there else 'made a bus at'} {path}")
    return OK


# -- verify ------------------------------------------------------------------------------------


def run_verify(args: argparse.Namespace) -> int:
    with closing(open_folder(args)) as folder:
        topics: dict[str, int] = {}
        for pattern in args.topics:
            topics |= pick_topics(folder, pattern)
        if not args.topics:
            topics = {name: options.partitions for name, options in folder.topics().items()}
        with progress(args, "verifying") as step:
            found = list(verify_topics(folder, topics, step))
            found += _verify_signed(args, folder, list(topics) if args.topics else None)
        severe = any(finding.severe for finding in found)
        logs = [(t, n) for t, count in topics.items() for n in range(count) if not severe]
        records = sum(folder.reader(*log).count() for log in logs)
    out = Printer(args)
    rows = [finding._asdict() for finding in found]
    if found:
        out.table(rows, ("path", "position", "problem", "severe"))
    if not severe:
        row = {"ok": True, "topics": len(topics), "records": records}
        said = "no record is damaged" if found else "no damage"
        out.row(row, f"{amount(len(topics), 'topic')}, {amount(records, 'record')}: {said}")
    return ERROR if severe else OK


def _verify_signed(
    args: argparse.Namespace, folder: Folder, topics: list[str] | None
) -> list[Finding]:
    """What is not as it was signed, where a public key is given."""
    if args.public_key is None:
        if args.against is not None:
            raise InvalidOption("--against needs --public-key", name="against")
        return []
    from trunkline.crypto.note import Verifier, read_key
    from trunkline.guard.notary import read_checkpoints, verify_folder, verify_notes

    verifier = Verifier(read_key(args.public_key))
    against = read_checkpoints(args.against, verifier) if args.against else []
    found = list(verify_folder(folder, verifier, topics, against))
    if args.against and topics is None:
        found += verify_notes(folder, args.against, verifier)
    return [
        Finding(f"{one.topic}/{one.partition}", one.offset, one.problem, one.severe)
        for one in found
    ]


def verify_topics(
    folder: Folder, topics: dict[str, int], step: Progress | None = None
) -> Iterator[Finding]:
    """What is wrong with these topics and their groups."""
    partitions = [(topic, n) for topic, count in sorted(topics.items()) for n in range(count)]
    for done, (topic, partition) in enumerate(partitions):
        yield from _verify_partition(folder, topic, partition)
        if step is not None:
            step(done + 1, len(partitions))
    for key in folder.groups():
        if key.topic in topics:
            try:
                yield from verify_group_files(folder, key)
            except Corrupt as error:
                path = os.path.relpath(error.path, folder.path)
                yield Finding(path, error.position, error.message)
            except StorageError as error:
                place = f"{key.topic}/{key.partition} {key.group}"
                severe = is_wrong(error)
                said = error.message if severe else f"not looked at: {error.message}"
                yield Finding(place, 0, said, severe)


def verify_group_files(folder: Folder, key: GroupKey) -> list[Finding]:
    """Damage to the files of a group that can be read all the same."""
    return folder.look(key, lambda _: list(verify_group(folder.path, key)))


def is_wrong(error: StorageError) -> bool:
    """Whether something is wrong with a file, a link in its place for example; else somebody, or
    the system, or a newer format keeps us from looking at it.
    """
    return not (isinstance(error, LockTimeout | UnsupportedFormat) or "errno" in error.fields)


def _verify_partition(folder: Folder, topic: str, partition: int) -> list[Finding]:
    """Once more from the start where a file was removed or replaced meanwhile."""
    for _ in range(5):
        try:
            return list(upkeep.verify(folder, topic, partition))
        except FileNotFoundError:
            continue
        except (ValueError, OSError, TrunklineError) as error:
            if not isinstance(error, Corrupt):
                return [Finding(f"{topic}/{partition}", 0, str(error))]
            path = os.path.relpath(error.path, folder.path)
            return [Finding(path, error.position, str(error))]
    return [Finding(f"{topic}/{partition}", 0, "its files keep changing: try again", severe=False)]


# -- bench -------------------------------------------------------------------------------------


def run_bench(args: argparse.Namespace) -> int:
    import asyncio

    place = os.path.dirname(os.path.abspath(bus_path(bus_url(args))))
    while not os.path.isdir(place):
        place = os.path.dirname(place)
    place = os.path.join(place, f"bench.{secrets.token_hex(4)}.tmp")
    atomic.make_dir(place)
    try:
        rows = [_bench_sync(place, args.seconds)]
        rows += asyncio.run(_bench_publish(place, args.seconds))
    finally:
        import shutil

        shutil.rmtree(place, ignore_errors=True)
    Printer(args).table(rows, ("name", "events_per_s", "p50_ms", "p95_ms"))
    return OK


def _row(name: str, count: int, seconds: float, took: list[float]) -> dict[str, Any]:
    import statistics

    cuts = statistics.quantiles(took, n=20) if len(took) > 1 else took * 19
    return {
        "name": name,
        "events_per_s": round(count / seconds),
        "p50_ms": round(cuts[9] * 1000, 3),
        "p95_ms": round(cuts[18] * 1000, 3),
    }


def _bench_sync(place: str, seconds: float) -> dict[str, Any]:
    """How long the device takes for one event and its sync, with nothing in between."""
    fd = atomic.create_file(os.path.join(place, "probe"))
    took: list[float] = []
    begun = time.perf_counter()
    try:
        while (start := time.perf_counter()) - begun < seconds or not took:
            atomic.write_all(fd, b"x" * _EVENT_BYTES)
            atomic.sync(fd)
            took.append(time.perf_counter() - start)
    finally:
        os.close(fd)
    return _row("write and fdatasync", len(took), time.perf_counter() - begun, took)


async def _bench_publish(place: str, seconds: float) -> list[dict[str, Any]]:
    import asyncio

    from trunkline.bus.connect import connect

    payload = {"text": "x" * (_EVENT_BYTES - 150)}
    rows = []
    async with connect(f"file:{place}/bus") as bus:
        took: list[float] = []

        async def publisher(until: float) -> None:
            while not took or time.perf_counter() < until:
                start = time.perf_counter()
                await bus.publish("bench", payload)
                took.append(time.perf_counter() - start)

        begun = time.perf_counter()
        await asyncio.gather(*(publisher(begun + seconds) for _ in range(64)))
        rows.append(_row("publish, 64 at once", len(took), time.perf_counter() - begun, took))

        took = []
        begun = time.perf_counter()
        while (start := time.perf_counter()) - begun < seconds or not took:
            await bus.publish_many("batches", [payload] * 500)
            took.append(time.perf_counter() - start)
        spent = time.perf_counter() - begun
        rows.append(_row("publish_many, 500 a batch", 500 * len(took), spent, took))
    return rows
