"""Runs the lines, prints one table, writes ``benchmarks/results/latest.json``.

``--only`` (or ``ONLY=``) takes a line's name, or the start of several; the other lines of the file
stay as they were. ``--quick`` shows that everything runs, in seconds: its numbers mean nothing and
are not written unless ``--out`` names a file.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import platform
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from time import perf_counter, sleep

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.harness import (
    Line,
    MissingPeerError,
    Pair,
    Result,
    Run,
    Steal,
    SyncProbe,
    lines_named,
    percentile,
    remove,
)

HERE = Path(__file__).parent
LATEST = HERE / "results" / "latest.json"
_MODULES = (
    "publish",
    "deliver",
    "peers",
    "keys",
    "growth",
    "broker",
    "guard",
    "nats",
    "mongo",
    "cli",
    "operation",
    "spark",
    "pipelines",
)
for _module in _MODULES:
    import_module(f"benchmarks.lines_{_module}")  # adds its lines, in this order


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    chosen = lines_named(options.only)
    if options.list:
        for line in chosen:
            print(f"{line.name:24} {line.goal:8} against {line.against}")
        return 0
    if not chosen:
        known = ", ".join(line.name for line in lines_named(None))
        print(f"no line starts with {options.only!r}; known: {known}", file=sys.stderr)
        return 4
    base = Path(os.environ.get("TRUNKLINE_BENCH_DIR", HERE / ".scratch"))
    base.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, _end)  # so that peers stop and files go
    run = Run(Run(base, options.quick).fresh(), options.quick)
    try:
        for text in _machine(run):
            print(text, flush=True)
        results, failed = _measure(run, chosen)
    finally:
        remove(run.folder)
    _show(results, options.quick)
    out = options.out or (None if options.quick else LATEST)
    if out:
        save(out, results)
    return 1 if failed else 0


def _end(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench", description="Trunkline beside its peers.")
    parser.add_argument("--only", default=os.environ.get("ONLY") or None, metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="seconds in all; numbers mean nothing")
    parser.add_argument("--out", type=Path, help="write the results to this file")
    parser.add_argument("--list", action="store_true", help="name the lines and end")
    return parser


def _measure(run: Run, chosen: Sequence[Line]) -> tuple[list[Result], list[str]]:
    results: list[Result] = []
    failed: list[str] = []
    for line in chosen:
        gc.collect()
        started, steal = perf_counter(), Steal()
        try:
            result = line.judge(asyncio.run(_one(line, run)))
        except MissingPeerError as missing:
            print(f"{line.name:24} skipped: {missing} is not installed", flush=True)
        except Exception:
            failed.append(line.name)
            print(f"{line.name:24} failed\n{traceback.format_exc()}", flush=True)
        else:
            results.append(result)
            took = f"{perf_counter() - started:.0f} s, {steal.share():.0%} of it stolen by the host"
            print(f"{line.name:24} {_row_text(result)}  [{took}]", flush=True)
    return results, failed


async def _one(line: Line, run: Run) -> Pair:
    return await line.measure(run)


def save(path: Path, results: Sequence[Result]) -> None:
    """Put the results in the file, in the place of those of the same name; the rest stays."""
    before = msgspec.json.decode(path.read_bytes(), type=list[Result]) if path.exists() else []
    merged = {result.name: result for result in before} | {
        result.name: result for result in results
    }
    order = {line.name: place for place, line in enumerate(lines_named(None))}
    kept = sorted(merged.values(), key=lambda result: order.get(result.name, len(order)))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(kept)) + b"\n")


def _machine(run: Run) -> list[str]:
    kind = _file_system(run.folder)
    probe = SyncProbe(run.folder)
    probe.burst(run.count(2000, 50))
    probe.close()
    system = f"{platform.system()} {platform.release()}"
    p50, p95 = probe.p(0.5) * 1000, probe.p(0.95) * 1000
    late = list(_lateness(run.count(1000, 50)))
    late_p95, latest = percentile(late, 0.95) * 1000, max(late) * 1000
    return [
        f"{os.cpu_count()} cores · Python {platform.python_version()} · {system} · {kind}",
        f"append one event and fdatasync: p50 {p50:.3f} ms · p95 {p95:.3f} ms",
        f"a sleep of 1 ms ends late by: p95 {late_p95:.2f} ms · at most {latest:.1f} ms",
    ]


def _lateness(count: int) -> Iterator[float]:
    """How long this process waits for a core when it could run: what others take from it."""
    for _ in range(count):
        started = perf_counter()
        sleep(0.001)
        yield perf_counter() - started - 0.001


def _file_system(folder: Path) -> str:
    """The kind of file system; one in memory would make every sync free."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for text in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        left, _, right = text.partition(" - ")
        if left.split()[2] == number:
            kind = right.split()[0]
            if kind in ("tmpfs", "ramfs"):
                raise SystemExit(f"{folder} is in memory: set TRUNKLINE_BENCH_DIR to a disk")
            return kind
    return "unknown file system"


def _cells(result: Result) -> tuple[str, ...]:
    return (
        _number(result.ours),
        _number(result.theirs),
        result.unit,
        f"{result.ratio:.3g}",
        result.goal,
        "yes" if result.met else "NO",
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _row_text(result: Result) -> str:
    ours, theirs, unit, ratio, goal, met = _cells(result)
    return f"{ours} beside {theirs} {unit} ({result.against}): {ratio}, goal {goal}: {met}"


def _show(results: Sequence[Result], quick: bool) -> None:
    title = "Trunkline bench" + (" (quick: the numbers mean nothing)" if quick else "")
    heads = ("name", "ours", "against", "theirs", "unit", "ratio", "goal", "met")
    rows = []
    for result in results:
        ours, *rest = _cells(result)
        rows.append((result.name, ours, result.against, *rest))
    table = Table(title=title)
    for head in heads:
        table.add_column(head, justify="right" if head in ("ours", "theirs", "ratio") else "left")
    for row, result in zip(rows, results, strict=True):
        table.add_row(*row, style=None if result.met else "red")
    Console(width=None if sys.stdout.isatty() else 130).print(table)


if __name__ == "__main__":
    sys.exit(main())
