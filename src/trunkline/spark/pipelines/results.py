"""How runs of pipelines ended, as the lake keeps it in ``_runs.json``."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from trunkline.spark.pipelines.rules import QUARANTINE
from trunkline.spark.session.errors import line_of

if TYPE_CHECKING:
    from trunkline.spark.lake import Lake
    from trunkline.spark.pipelines.declare import Pipeline

_FILE = "_runs.json"


class RunResult(msgspec.Struct, frozen=True):
    """How one run of a pipeline ended: the rows its table has now, and the events it read."""

    name: str
    rows: int
    seconds: float
    at: str
    version: int
    published: int = 0
    error: str = ""
    events: int = 0
    set_aside: int = 0  # its rows in the table ``refused``
    refused: str = ""
    new_columns: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # what a person should know, one line each


def read_outcomes(lake: Lake) -> list[RunResult]:
    """How each pipeline ended when it last ran."""
    data = lake.storage.read(_FILE)
    return msgspec.json.decode(data, type=list[RunResult]) if data is not None else []


def keep_outcome(lake: Lake, outcome: RunResult) -> RunResult:
    known = {one.name: one for one in read_outcomes(lake)} | {outcome.name: outcome}
    lake.storage.replace(_FILE, msgspec.json.encode(list(known.values())) + b"\n")
    return outcome


def result_of(
    lake: Lake,
    pipeline: Pipeline,
    seconds: float,
    problem: BaseException | None = None,
    **facts: Any,
) -> RunResult:
    """The result of a run that ended now, kept in the lake."""
    return keep_outcome(
        lake,
        RunResult(
            name=pipeline.name,
            rows=lake.rows(pipeline.table),
            seconds=round(seconds, 2),
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            version=facts.pop("version", -1),
            error=line_of(problem) if problem is not None else "",
            **aside_of(lake, pipeline),
            **facts,
        ),
    )


def aside_of(lake: Lake, pipeline: Pipeline) -> dict[str, Any]:
    """How many rows the pipeline set aside, and in which table they are."""
    count = lake.rows(QUARANTINE, pipeline=pipeline.name)
    return {"set_aside": count, "refused": QUARANTINE if count else ""}
