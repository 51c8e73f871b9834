"""What a power cut may leave of a folder: a recorded workload, and the disks it could become.

``record`` runs a program under strace and lists what it did to the files. ``states`` stops it after
each call and lists what the disk may then hold, as the interface promises it and no more:

- the bytes of a file are durable once the file was synced; until then each write may be there or
  not, in part, or as zeros, whatever became of the others;
- a name (made, renamed, removed) is durable once its folder was synced, and not before.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

CALLS = (
    "openat,write,pwrite64,fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat,"
    "ftruncate,truncate,mkdir,mkdirat,fallocate"
)
_LINE = re.compile(rb"(?:\d+ +)?(\w+)\((.*)\) += (-?\d+)")
_TEXT = re.compile(rb'"((?:\\x[0-9a-f]{2})*)"')
_FD = re.compile(rb"\d+<((?:\\x[0-9a-f]{2})*)>")


class Step(NamedTuple):
    """One call: ``make`` ``write`` ``cut`` ``name`` ``drop`` ``dir`` ``sync`` or ``told``."""

    kind: str
    path: str
    data: bytes = b""
    place: int = 0  # of a write, or the length of a cut; -1 appends
    target: str = ""


def record(
    command: list[str], root: str, told: str, trace: str, cwd: str | None = None
) -> list[Step]:
    """Run a program that works below ``root`` and writes its promises to the file ``told``."""
    subprocess.run(
        [
            "strace",
            "-f",
            "-qq",
            "-y",
            "-xx",
            "-s1000000",
            f"-etrace={CALLS}",
            "-o",
            trace,
            *command,
        ],
        check=True,
        cwd=cwd,
    )
    steps = []
    with open(trace, "rb") as file:
        for line in _joined(file):
            step = _parse(line, root, told)
            if step is not None:
                steps.append(step)
    return steps


def _joined(lines: Iterator[bytes]) -> Iterator[bytes]:
    """Put calls together again that another thread's call was printed into."""
    open_calls: dict[bytes, bytes] = {}
    for line in lines:
        pid = line.split(b" ", 1)[0]
        if b"<unfinished ...>" in line:
            open_calls[pid] = line.partition(b"<unfinished ...>")[0]
        elif b" resumed>" in line:
            yield open_calls.pop(pid) + line.partition(b" resumed>")[2]
        else:
            yield line


def _plain(text: bytes) -> bytes:
    return bytes.fromhex(text.decode().replace("\\x", ""))


def _parse(line: bytes, root: str, told: str) -> Step | None:
    match = _LINE.match(line)
    if match is None or int(match[3]) < 0:
        return None
    call, arguments, result = match[1].decode(), match[2], int(match[3])
    texts = [_plain(text) for text in _TEXT.findall(arguments)]
    held = _FD.match(arguments)
    path = _plain(held[1]).decode() if held else ""
    if call not in ("write", "pwrite64") and texts:
        path = texts[0].decode()
    if path == told and call == "write":
        return Step("told", path, texts[0][:result])
    if not path.startswith(root) or path.endswith(("/reserve", "/members")):
        return None
    last = int(arguments.rsplit(b",", 1)[1]) if call in ("ftruncate", "truncate", "pwrite64") else 0
    match call:
        case "openat" if b"O_CREAT" in arguments:
            return Step("make", path)
        case "write":
            return Step("write", path, texts[0][:result], -1)
        case "pwrite64":
            return Step("write", path, texts[0][:result], last)
        case "fsync" | "fdatasync":
            return Step("sync", path)
        case "ftruncate" | "truncate":
            return Step("cut", path, place=last)
        case "rename" | "renameat" | "renameat2":
            return Step("name", path, target=texts[-1].decode())
        case "unlink" | "unlinkat":
            return Step("drop", path)
        case "mkdir" | "mkdirat":
            return Step("dir", path)
    return None


class Change(NamedTuple):
    """A step as the disk sees it: files by number, so that a name can be lost and not the bytes."""

    kind: str
    file: int = -1
    data: bytes = b""
    place: int = 0
    name: str = ""
    source: str = ""


class State(NamedTuple):
    """A disk after a cut: what was promised by then, and what each file holds."""

    label: str
    told: bytes
    files: dict[str, bytes]


class Tape:
    """The changes so far, and which of them are durable."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.changes: list[Change] = []
        self.durable: set[int] = set()
        self._names: dict[str, int] = {}
        self._sizes: dict[int, int] = {}

    def run(self, step: Step) -> None:
        file = self._names.get(step.path, -1)
        match step.kind:
            case "make" if file < 0:
                file = self._names[step.path] = len(self._sizes)
                self._sizes[file] = 0
                self.changes.append(Change("link", file, name=step.path))
            case "write":
                place = self._sizes[file] if step.place < 0 else step.place
                self._sizes[file] = max(self._sizes[file], place + len(step.data))
                self.changes.append(Change("write", file, step.data, place))
            case "cut":
                self._sizes[file] = step.place
                self.changes.append(Change("cut", file, place=step.place))
            case "name":
                self._names[step.target] = self._names.pop(step.path)
                moved = self._names[step.target]
                self.changes.append(Change("move", moved, name=step.target, source=step.path))
            case "drop":
                self._names.pop(step.path, None)
                self.changes.append(Change("drop", name=step.path))
            case "dir":
                self.changes.append(Change("dir", name=step.path))
            case "sync":
                self._sync(step.path, file)

    def _sync(self, path: str, file: int) -> None:
        for at, change in enumerate(self.changes):
            if file >= 0:
                done = change.kind in ("write", "cut") and change.file == file
            else:
                done = change.kind not in ("write", "cut") and os.path.dirname(change.name) == path
            if done:
                self.durable.add(at)

    def pending(self) -> list[int]:
        return [at for at in range(len(self.changes)) if at not in self.durable]

    def build(self, kept: set[int], instead: dict[int, bytes]) -> dict[str, bytes]:
        """The files of a disk that has these changes, some with other bytes."""
        names: dict[str, int] = {}
        data: dict[int, bytearray] = {}
        folders = {self.root}
        for at in sorted(kept):
            change = self.changes[at]
            match change.kind:
                case "link":
                    names[change.name] = change.file
                case "move":
                    names.pop(change.source, None)
                    names[change.name] = change.file
                case "drop":
                    names.pop(change.name, None)
                case "dir":
                    folders.add(change.name)
                case "cut":
                    held = data.setdefault(change.file, bytearray())
                    del held[change.place :]
                    held.extend(bytes(change.place - len(held)))
                case "write":
                    held = data.setdefault(change.file, bytearray())
                    held.extend(bytes(max(0, change.place - len(held))))
                    new = instead.get(at, change.data)
                    held[change.place : change.place + len(new)] = new
        return {
            name.removeprefix(self.root + "/"): bytes(data.get(file, b""))
            for name, file in names.items()
            if os.path.dirname(name) in folders
        }


def states(steps: list[Step], root: str) -> Iterator[State]:
    """Every distinct state of the enumeration, in the order of the workload."""
    tape = Tape(root)
    told = b""
    seen: set[int] = set()
    for number, step in enumerate(steps):
        if step.kind == "told":
            told += step.data
        else:
            tape.run(step)
        for label, kept, instead in _choices(tape):
            files = tape.build(kept, instead)
            mark = hash((told, frozenset(files.items())))
            if mark not in seen:
                seen.add(mark)
                yield State(f"step {number} ({step.kind} {step.path}): {label}", told, files)


def _choices(tape: Tape) -> Iterator[tuple[str, set[int], dict[int, bytes]]]:
    base, open_ = tape.durable, tape.pending()
    every = base | set(open_)
    yield "nothing more", set(base), {}
    yield "everything", every, {}
    for count in range(1, len(open_)):
        yield f"the first {count}", base | set(open_[:count]), {}
    for at in open_:
        yield f"all but {at}", every - {at}, {}
        yield f"only {at}", base | {at}, {}
        data = tape.changes[at].data
        if tape.changes[at].kind == "write" and data:
            for cut in sorted({1, len(data) // 2, len(data) - 1}):
                yield f"{at} torn at {cut}", set(every), {at: data[:cut]}
            yield f"{at} as zeros", set(every), {at: bytes(len(data))}
