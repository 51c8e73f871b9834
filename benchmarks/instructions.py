"""Instructions per event, counted by callgrind: they do not depend on the load of the machine.

::

    python -m benchmarks.instructions                     every work, of this source
    python -m benchmarks.instructions --before /tmp/old   beside the source of another checkout
    python -m benchmarks.instructions --only catch-up

Each work runs twice in a process of its own, with a few events and with more. The difference is
what the events cost; start-up and shut-down cancel. ``git worktree add /tmp/old <commit>`` makes
the other checkout. A broker and its client run in one process, so their work is counted together.

A counted process runs about fifty times slower, and so does its clock. By the usual clock a record
waits longer than 50 ms for its reader, so the inbox takes the reader for a slow one and asks for
fewer records at a time: the count would be of other work, and would change with the load.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

FEW, MORE = 1000, 3000
WARM = 50  # events of a run that is not counted: it compiles the modules
TOPIC, GROUP = "orders", "billing"
LIMIT = 1.05
SLOWER = 50  # by so much a process runs slower under callgrind
_TOTAL = re.compile(r"^(?:summary|totals): (\d+)", re.MULTILINE)

Work = Callable[[str, int], Coroutine[Any, Any, None]]


class _SlowClock(selectors.DefaultSelector):
    """Time as the code sees it: what the process worked and waited, divided by ``SLOWER``."""

    def __init__(self) -> None:
        super().__init__()
        self._waited = 0.0
        self._real = time.monotonic

    def monotonic(self) -> float:
        return (time.process_time() + self._waited) / SLOWER

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        began = self._real()
        try:
            return super().select(None if timeout is None else timeout * SLOWER)
        finally:
            self._waited += self._real() - began


def _run_slowly(work: Coroutine[Any, Any, None]) -> None:
    """Run a work by the slow clock. Nothing of the bus is imported before."""
    clock = _SlowClock()
    time.monotonic = clock.monotonic
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(clock)) as runner:
        runner.run(work)


def _payload(number: int) -> dict[str, Any]:
    return {"id": number, "name": "x" * 300}


async def _publish_64(bus: Any, count: int) -> None:
    async def publisher(share: int) -> None:
        for number in range(share):
            await bus.publish(TOPIC, _payload(number))

    await asyncio.gather(*(publisher(count // 50) for _ in range(50)))


async def _fill(bus: Any, count: int) -> None:
    for start in range(0, count, 500):
        await bus.publish_many(TOPIC, [_payload(start + n) for n in range(min(500, count - start))])


async def _handle_all(bus: Any, count: int, publish: bool) -> None:
    done, handled = asyncio.Event(), 0

    @bus.on(TOPIC, group=GROUP, workers=8)  # type: ignore[untyped-decorator]
    async def handle(event: Any) -> None:
        nonlocal handled
        handled += 1
        if handled == count:
            done.set()

    await bus.start()
    if publish:
        await _publish_64(bus, count)
    await done.wait()
    await bus.stop()


async def publish_64(folder: str, count: int) -> None:
    import trunkline

    async with trunkline.connect(f"file:{folder}") as bus:
        await _publish_64(bus, count)


async def publish_many(folder: str, count: int) -> None:
    import trunkline

    async with trunkline.connect(f"file:{folder}") as bus:
        await _fill(bus, count)


async def catch_up(folder: str, count: int) -> None:
    """The log was filled by another process: its cost is not counted."""
    import trunkline

    async with trunkline.connect(f"file:{folder}") as bus:
        await _handle_all(bus, count, publish=False)


async def end_to_end(folder: str, count: int) -> None:
    import trunkline

    async with trunkline.connect(f"file:{folder}") as bus:
        await _handle_all(bus, count, publish=True)


async def _behind_a_broker(folder: str, work: Callable[[Any], Awaitable[None]]) -> None:
    import trunkline
    from trunkline.broker import server

    # Where the options are defined differs between versions; this module has them in each.
    BrokerOptions = vars(server)["BrokerOptions"]  # noqa: N806
    options = BrokerOptions(url=f"file:{folder}", port=0, metrics_s=0)
    async with server.Broker(options) as broker, trunkline.connect(broker.url) as bus:
        await work(bus)


async def ws_publish(folder: str, count: int) -> None:
    await _behind_a_broker(folder, lambda bus: _publish_64(bus, count))


async def ws_end_to_end(folder: str, count: int) -> None:
    await _behind_a_broker(folder, lambda bus: _handle_all(bus, count, publish=True))


WORKS: dict[str, Work] = {
    "publish-64": publish_64,
    "publish-many": publish_many,
    "catch-up": catch_up,
    "end-to-end": end_to_end,
    "ws-publish": ws_publish,
    "ws-end-to-end": ws_end_to_end,
}


def _count(source: Path, name: str, events: int) -> int:
    """The instructions of one run."""
    with tempfile.TemporaryDirectory() as place:
        env = {**os.environ, "PYTHONPATH": str(source / "src"), "PYTHONHASHSEED": "0"}
        # To compile the modules would be most of what is counted.
        env |= {"PYTHONPYCACHEPREFIX": str(Path(place) / "compiled"), "PYTHONDONTWRITEBYTECODE": ""}
        here = [sys.executable, str(Path(__file__).resolve())]
        folder = str(Path(place) / "bus")
        for path, count in ((f"{folder}.first", WARM), (folder, events)):
            if name == "catch-up":
                fill = [*here, "--do", "publish-many", path, str(count)]
                subprocess.run(fill, env=env, check=True)
        subprocess.run([*here, "--do", name, f"{folder}.first", str(WARM)], env=env, check=True)
        out = Path(place) / "callgrind.out"
        valgrind = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}"]
        run = [*valgrind, *here, "--do", name, folder, str(events)]
        subprocess.run(run, env=env, check=True, capture_output=True, timeout=900)
        found = _TOTAL.search(out.read_text())
        assert found is not None
        return int(found[1])


def _per_event(source: Path, name: str) -> float:
    return (_count(source, name, MORE) - _count(source, name, FEW)) / (MORE - FEW)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="instructions", description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="another checkout to compare with")
    parser.add_argument("--only", choices=WORKS, action="append")
    parser.add_argument("--do", nargs=3, metavar=("WORK", "FOLDER", "EVENTS"))
    options = parser.parse_args(arguments)
    if options.do:
        name, folder, count = options.do
        _run_slowly(WORKS[name](folder, int(count)))
        return 0
    missed = 0
    for name in options.only or WORKS:
        now = _per_event(Path(__file__).parents[1], name)
        if options.before is None:
            print(f"{name:14} {now:10,.0f}", flush=True)
            continue
        before = _per_event(options.before, name)
        missed += now > LIMIT * before
        verdict = "no" if now > LIMIT * before else "yes"
        change = 100 * (now / before - 1)
        print(f"{name:14} {before:10,.0f} {now:10,.0f} {change:+6.1f} % {verdict}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
