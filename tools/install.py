"""pip install into a virtual environment, with one line of progress: seconds, megabytes, and the
package that pip is at.

    python tools/install.py .venv '-e' '.[cli]'

It needs nothing but Python. What pip has to say is shown whole only if pip fails.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path

TOLD_S = 10.0  # without a terminal, a line every so often
SHOWN_S = 0.5
TAIL = 30
CONSTRAINTS = "constraints.txt"
AT = re.compile(
    r"^\s*(Collecting|Downloading|Using cached|Building wheel for|Installing collected)"
)


def main(arguments: Sequence[str]) -> int:
    if len(arguments) < 2:
        sys.stderr.write("usage: install.py VENV PIP-ARGUMENT...\n")
        return 2
    place = Path(arguments[0])
    python = place / "bin" / "python"
    if not python.exists():
        venv.create(place, with_pip=True)
    return install(python, arguments[1:])


def install(python: Path, wanted: Sequence[str]) -> int:
    """Run pip and show where it is. Its scratch files are in the environment, to be counted."""
    scratch = python.parent.parent / "tmp"
    scratch.mkdir(exist_ok=True)
    pins = {"PIP_CONSTRAINT": CONSTRAINTS, "PIP_BUILD_CONSTRAINT": CONSTRAINTS}
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check"]
    # What is never imported need not be compiled.
    command += ["--progress-bar", "off", "--no-compile", "-c", CONSTRAINTS, *wanted]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **pins, "TMPDIR": str(scratch.resolve())},
    )
    said: list[str] = []
    started = time.monotonic()
    before = size(python.parent.parent)
    try:
        for line, at in progress(process, said):
            show(line, at - started, size(python.parent.parent) - before)
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        return 130
    code = process.wait()
    if code:
        sys.stderr.write("\n" + "".join(said[-TAIL:]))
        return code
    grown = (size(python.parent.parent) - before) / 1e6
    end(f"installed in {time.monotonic() - started:.0f} s, {grown:,.0f} MB")
    return 0


def progress(process: subprocess.Popen[str], said: list[str]) -> Iterator[tuple[str, float]]:
    """What pip is at, every now and then, until it ends."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    latest, told = "starting pip", time.monotonic()
    pause = SHOWN_S if sys.stdout.isatty() else TOLD_S
    while True:
        with contextlib.suppress(queue.Empty):
            line = lines.get(timeout=0.2)
            if line is None:
                return
            said.append(line)
            if AT.match(line):
                latest = " ".join(line.split())
        if time.monotonic() - told >= pause:
            told = time.monotonic()
            yield latest, told


def size(folder: Path) -> int:
    """The bytes of all files below, as far as they stay long enough to be counted."""
    total, ahead = 0, [str(folder)]
    while ahead:
        with contextlib.suppress(OSError), os.scandir(ahead.pop()) as found:
            for entry in found:
                with contextlib.suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        ahead.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_size
    return total


def show(line: str, seconds: float, grown: int) -> None:
    text = f"  {seconds:3.0f} s  {max(0, grown) / 1e6:5,.0f} MB  {line}"
    if sys.stdout.isatty():
        width = os.get_terminal_size().columns
        sys.stdout.write(f"\r\x1b[K{text[: width - 1]}")
    else:
        sys.stdout.write(f"{text[:100]}\n")
    sys.stdout.flush()


def end(text: str) -> None:
    sys.stdout.write(f"\r\x1b[K  {text}\n" if sys.stdout.isatty() else f"  {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
