"""A process that a claim ends with, and whether it is still alive."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple, Self


class Process(NamedTuple):
    """``where`` names the machine's boot and the namespace of its process numbers, ``start`` the
    moment the process began: numbers are used again.
    """

    pid: int
    start: str
    where: str

    @classmethod
    def by_pid(cls, pid: int) -> Self | None:
        """The process of that number on this machine; None if there is none."""
        start = _start(pid)
        return None if start is None else cls(pid, start, _here())

    @classmethod
    def of(cls, row: Any) -> Self | None:
        """From what ``to_json`` gave; None for anything else."""
        if not isinstance(row, dict):
            return None
        pid, start, where = row.get("pid"), row.get("start"), row.get("where")
        if isinstance(pid, int) and isinstance(start, str) and isinstance(where, str):
            return cls(pid, start, where)
        return None

    def to_json(self) -> dict[str, Any]:
        return self._asdict()

    def is_gone(self) -> bool:
        """Whether it has ended; False where this machine cannot know."""
        return bool(self.where) and self.where == _here() and _start(self.pid) != self.start


@cache
def _here() -> str:
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    return ""


def _start(pid: int) -> str | None:
    """When the process began, in the kernel's ticks; None if it is not there or is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(") ")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
