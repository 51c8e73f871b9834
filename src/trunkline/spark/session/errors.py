"""What an error of Spark comes down to: the one line that this package said, without the rest."""

from __future__ import annotations

import re
import sys
from traceback import walk_tb
from types import TracebackType

from trunkline.errors import TrunklineError

_OURS = re.compile(r"^(?:\w+: )?trunkline\.errors\.\w+: (?P<said>.+)$", re.MULTILINE)
_TRACE = "Traceback (most recent call last):"
_PATH = re.compile(r"^(?:\w+\.)+(?=\w+:)")  # of the kind of error
_STATE = re.compile(r"(?: SQLSTATE: \w+)+$")


def cause_of(error: BaseException) -> str | None:
    """The message of the Trunkline error inside an error of Spark, if there is one."""
    found = _OURS.findall(str(error))
    return found[-1].strip() if found else None


def line_of(error: BaseException) -> str:
    """Any error in one line: what this package said, else what was raised innermost in Python."""
    if isinstance(error, TrunklineError):
        return str(error)
    said = cause_of(error)
    if said is None:
        text = str(error)
        _, trace, inner = text.rpartition(_TRACE)
        lines = [line for line in (inner if trace else text).splitlines() if line.strip()]
        raised = next((line for line in lines if not (trace and line[0].isspace())), repr(error))
        said = _STATE.sub("", _PATH.sub("", raised, 1) if trace else raised)
    return said[:300]


def install_hook() -> None:
    """Let an error that nobody caught begin with what is to be done, not with a stack of Java."""
    before = sys.excepthook
    if getattr(before, "from_trunkline", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        said = cause_of(error)
        if said is None and isinstance(error, TrunklineError) and _is_from_here(trace):
            said = str(error)
        if said is None:
            before(kind, error, trace)
        else:
            sys.stderr.write(f"trunkline: {said}\n")

    hook.from_trunkline = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _is_from_here(trace: TracebackType | None) -> bool:
    """Whether it was raised while Spark was set up, for example because there is no Java."""
    frames = [frame for frame, _ in walk_tb(trace)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__")).startswith("trunkline.spark")
