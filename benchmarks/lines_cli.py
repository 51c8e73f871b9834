"""How long a command takes to start: its CPU time beside that of ``python -c pass``.

Where that takes 12 ms, 8.3 times as much are 100 ms. The command finds what a core install has, and
its bytecode is there. CPU time is taken and not the clock: other work on the machine does not
count. The best of the turns is kept.
"""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
from pathlib import Path

from benchmarks.harness import Pair, Run, line

_SOURCE = str(Path(__file__).parents[1] / "src")
_CORE = f"""
import sys
class Core:
    def find_spec(self, name, path=None, target=None):
        if name == "typing_extensions":
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Core())
sys.path.insert(0, {_SOURCE!r})
from trunkline.cli import main
raise SystemExit(main(sys.argv[1:]))
"""
_COMMANDS = {
    "claim": "claim b.py --actor me",
    "claims": "claims",
    "guard": "claims guard",
    "sub": "sub orders --from start --count 1",
    "sub-group": "sub orders --group g --wait 0.01",
    "bridge": "bridge file:.bus ndjson:copy.ndjson",
    "token": "token ls",
    "doctor": "doctor",
    "dlq": "dlq ls",
}
_WHERE = "get orders 1: --where payload=1"


def _cpu_ms(words: list[str], folder: Path) -> float:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TRUNKLINE_", "PYTHON"))}
    env["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    return 1000 * (user + system)


async def _bus(folder: Path) -> None:
    def build() -> None:
        subprocess.run(["git", "init", "-q", "."], cwd=folder, check=True)
        for words in ("pub orders 1", "claim a.py --actor other"):
            _cpu_ms(["-c", _CORE, *words.split()], folder)

    await asyncio.to_thread(build)


async def _beside_nothing(run: Run, command: str) -> Pair:
    folder = await run.once("cli", _bus)
    words = ["-c", _CORE, *command.split()]

    def measure() -> Pair:
        _cpu_ms(words, folder)  # writes the bytecode
        turns = [
            (_cpu_ms(words, folder), _cpu_ms(["-c", "pass"], folder)) for _ in range(run.rounds)
        ]
        return Pair(min(ours for ours, _ in turns), min(theirs for _, theirs in turns))

    return await asyncio.to_thread(measure)


def _add(name: str, command: str, goal: str) -> None:
    @line(f"cli-{name}", against="python -c pass", unit="ms of CPU", goal=goal)
    async def start(run: Run) -> Pair:
        return await _beside_nothing(run, command)


for _name, _command in _COMMANDS.items():
    _add(_name, _command, "<= 8.3")
_add("where", _WHERE, "<= 12.5")
