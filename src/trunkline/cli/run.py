"""``trunkline run module:bus``: the worker processes of an application.

The command itself imports nothing of the application. It starts processes that do, starts a process
again that died, and ends them when it is told to end. A process says by a pipe that its handlers
have begun. While no process has said so, a process that ends with an exit code ends the command:
the next process would fail alike. A process that was killed by a signal is started again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from trunkline.check import check_count
from trunkline.cli import ERROR, OK, leaf
from trunkline.errors import InvalidOption
from trunkline.log.descriptors import raise_file_limit

if TYPE_CHECKING:
    from trunkline.bus import Bus, HandlerInfo
    from trunkline.bus.sync import SyncBus

PROCESSES_MAX = 1024
_CHILD = "TRUNKLINE_RUN_CHILD"  # of a worker process: whether it is the first, and its pipe
_LOOK_S = 0.5
_QUICK_S = 10.0  # a process that lived shorter is started again after a pause
_PAUSE_MAX_S = 30.0
_READY = b"ready\n"
_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages", "venv"})


def register(commands: argparse._SubParsersAction[Any]) -> None:
    parser = leaf(commands, "run", run, "run the handlers of an application, in processes")
    parser.add_argument("app", metavar="MODULE:BUS", help="where the bus is: shop.app:bus")
    parser.add_argument("--processes", type=int, default=1, help="how many processes (1)")
    parser.add_argument(
        "--reload", action="store_true", help="start anew when a Python file below here changes"
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds for handlers to finish before their process is killed (30)",
    )
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default=os.environ.get("TRUNKLINE_LOG_LEVEL", "warning"),
        help="the lowest level that is logged to stderr (warning)",
    )


def run(args: argparse.Namespace) -> int:
    check_count("--processes", args.processes, 1, PROCESSES_MAX)
    if args.grace < 0:
        raise InvalidOption("--grace is a number of seconds, 0 or more", name="grace")
    child = os.environ.pop(_CHILD, None)
    if child is not None:
        first, _, pipe = child.partition(":")
        return _work(args, first == "1", int(pipe))
    return _Supervisor(args).run()


# -- one worker process ----------------------------------------------------------------------------


def find_bus(place: str) -> Bus | SyncBus:
    """The bus at ``module:name``; a function without arguments may return it."""
    from trunkline.bus import Bus
    from trunkline.bus.sync import SyncBus

    module, colon, path = place.partition(":")
    if not (module and colon and path):
        raise InvalidOption(f"not MODULE:BUS: {place!r}", name="app", hint="shop.app:bus")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        hint = "the name of a module that Python finds from here, with dots: shop.app:bus"
        raise InvalidOption(f"there is no module {error.name}", name="app", hint=hint) from None
    for name in path.split("."):
        if not hasattr(found, name):
            raise InvalidOption(f"there is no {path} in {module}", name="app")
        found = getattr(found, name)
    if callable(found) and not isinstance(found, Bus | SyncBus):
        import inspect

        try:
            inspect.signature(found).bind()
        except TypeError as error:
            hint = "a bus, or a function without arguments that returns one"
            raise InvalidOption(
                f"{place} cannot be called: {error}", name="app", hint=hint
            ) from None
        found = found()
    if not isinstance(found, Bus | SyncBus):
        raise InvalidOption(
            f"{place} is no bus but {type(found).__name__}",
            name="app",
            hint="a bus is what trunkline.connect and trunkline.open return",
        )
    return found


def _work(args: argparse.Namespace, is_first: bool, pipe: int) -> int:
    import logging

    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    raise_file_limit()
    bus = find_bus(args.app)
    if is_first and not args.quiet:
        _introduce(args.app, bus)

    def begun() -> None:
        with contextlib.suppress(OSError):  # the command may be gone
            os.write(pipe, _READY)

    from trunkline.bus import Bus

    if isinstance(bus, Bus):
        asyncio.run(_run_bus(bus, begun))
    else:
        begun()
        bus.run()
    return OK


async def _run_bus(bus: Bus, begun: Callable[[], None]) -> None:
    await bus.start()
    running = asyncio.ensure_future(bus.run())  # which raises why a handler cannot begin
    with contextlib.suppress(Exception):
        await bus.ready()
        begun()
    try:
        await running
    finally:
        await bus.close()


def _introduce(app: str, bus: Bus | SyncBus) -> None:
    handlers = bus.handlers()
    for one in handlers:
        print(describe(one), flush=True)
    if not handlers:
        print(
            f"trunkline: warning: {app} has no handler (is the module imported that has @bus.on?)",
            file=sys.stderr,
            flush=True,
        )


def describe(one: HandlerInfo) -> str:
    """A handler in one line."""
    from trunkline.options import changed

    policy = "the group's"
    if one.policy is not None:
        told = (f"{name}={value}" for name, value in changed(one.policy).items())
        policy = " ".join(told) or "default"
    limit = "" if one.timeout_s is None else f"  timeout {one.timeout_s:g} s"
    return (
        f"{one.name}  topic {one.topic}  group {one.group}  workers {one.workers}  "
        f"policy {policy}{limit}"
    )


# -- all of them -----------------------------------------------------------------------------------


class _Worker(NamedTuple):
    process: subprocess.Popen[bytes]
    pipe: int  # it says here that its handlers have begun
    since: float


class _Supervisor:
    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._workers: dict[int, _Worker] = {}
        self._due: dict[int, float] = {}  # when a process is started again
        self._pauses: dict[int, float] = {}
        self._begun: set[int] = set()
        self._can_begin = False  # the handlers began in one process at least
        self._introduced = False  # the handlers were named
        self._told = 0  # signals to end
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_w, False)

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._tell)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_w)
        seen = _sources() if self._args.reload else {}
        self._due = dict.fromkeys(range(self._args.processes), 0.0)
        code = OK
        try:
            while not self._told and code == OK:
                self._start_due()
                self._wait()
                code = self._look()
                if self._args.reload and not self._told:
                    now = _sources()
                    if now != seen:
                        self._reload(sorted({*now.items()} ^ {*seen.items()})[0][0])
                        seen = now
        finally:
            self._end_all()
        return code

    def _tell(self, _number: int, _frame: object) -> None:
        self._told += 1

    def _start_due(self) -> None:
        now = time.monotonic()
        for number in [n for n, due in self._due.items() if due <= now]:
            del self._due[number]
            read, write = os.pipe()
            first = number == 0 and not self._introduced
            self._introduced = self._introduced or first
            env = {**os.environ, _CHILD: f"{int(first)}:{write}"}
            command = [sys.executable, "-m", "trunkline", *sys.argv[1:]]
            process = subprocess.Popen(command, env=env, pass_fds=(write,), start_new_session=True)
            os.close(write)
            self._workers[number] = _Worker(process, read, now)

    def _wait(self) -> None:
        pipes = [one.pipe for n, one in self._workers.items() if n not in self._begun]
        wait_s = _LOOK_S
        if self._due:
            wait_s = min(wait_s, max(0.0, min(self._due.values()) - time.monotonic()))
        ready, _, _ = select.select([self._wake_r, *pipes], [], [], wait_s)
        if self._wake_r in ready:
            os.read(self._wake_r, 4096)
        for number, one in self._workers.items():
            if one.pipe in ready and os.read(one.pipe, 64).startswith(_READY):
                self._note_begun(number)

    def _note_begun(self, number: int) -> None:
        self._begun.add(number)
        self._can_begin = True

    def _look(self) -> int:
        """Start what died again, after a pause if it did not live long. A process that exits ends
        the command if the handlers have not begun in any process: its exit code is returned.
        """
        for number, one in list(self._workers.items()):
            code = one.process.poll()
            if code is None:
                continue
            if os.read(one.pipe, 64).startswith(_READY) if number not in self._begun else False:
                self._note_begun(number)
            if number == 0 and number not in self._begun:
                self._introduced = False
            self._forget(number)
            if self._told:
                continue
            if code >= 0 and not self._can_begin and not self._args.reload:
                return code or ERROR
            lived = time.monotonic() - one.since
            pause = 0.0 if lived >= _QUICK_S else max(1.0, 2 * self._pauses.get(number, 0.0))
            self._pauses[number] = min(pause, _PAUSE_MAX_S)
            self._due[number] = time.monotonic() + self._pauses[number]
            self._say(
                f"process {one.process.pid} {_ended(code)}; a new one starts "
                + (f"in {self._pauses[number]:g} s" if pause else "now")
            )
        return OK

    def _reload(self, path: str) -> None:
        self._say(f"{os.path.relpath(path)} changed: the processes start anew")
        self._end_all(final=False)
        self._pauses.clear()
        self._introduced = False
        self._due = dict.fromkeys(range(self._args.processes), 0.0)

    def _end_all(self, *, final: bool = True) -> None:
        """Let the handlers finish, for as long as ``--grace``. A second signal does not wait."""
        told = self._told
        for one in self._workers.values():
            _signal(one.process, signal.SIGTERM)
        until = time.monotonic() + self._args.grace
        while any(one.process.poll() is None for one in self._workers.values()):
            left = until - time.monotonic()
            if left <= 0 or (final and self._told > max(told, 1)):
                break
            ready, _, _ = select.select([self._wake_r], [], [], min(left, _LOOK_S))
            if ready:
                os.read(self._wake_r, 4096)
        for number, one in list(self._workers.items()):
            if one.process.poll() is None:
                self._say(f"process {one.process.pid} did not end in time: it is killed")
                _signal(one.process, signal.SIGKILL)
            one.process.wait()
            self._forget(number)
        self._due.clear()

    def _forget(self, number: int) -> None:
        os.close(self._workers.pop(number).pipe)
        self._begun.discard(number)

    def _say(self, text: str) -> None:
        print(f"trunkline: {text}", file=sys.stderr, flush=True)


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _sources() -> dict[str, int]:
    """When each Python file below here was changed last."""
    found: dict[str, int] = {}
    for folder, below, names in os.walk(os.getcwd()):
        below[:] = [name for name in below if not name.startswith(".") and name not in _SKIPPED]
        for name in names:
            if name.endswith(".py"):
                path = os.path.join(folder, name)
                with contextlib.suppress(OSError):
                    found[path] = os.stat(path).st_mtime_ns
    return found
