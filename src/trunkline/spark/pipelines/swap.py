"""Tables that were made anew take the place of the old ones.

They are made in a lake of their own, ``_rebuild/<pipeline>``. When all of them are there, the
progress file names the plan they are at: from then on they count. Each is swapped in by one commit.
A swap that died is finished by the next run of the pipeline; a rebuild that died before is removed.
"""

from __future__ import annotations

from trunkline.spark.lake import Lake
from trunkline.spark.pipelines.declare import Pipeline
from trunkline.spark.pipelines.progress import Plan, Progress, new_app
from trunkline.spark.pipelines.rules import QUARANTINE, RULES

_FOLDER = "_rebuild"


def shadow_of(lake: Lake, pipeline: Pipeline) -> Lake:
    """The lake in which the tables of a pipeline are made anew."""
    return Lake(lake.storage.url(_FOLDER, pipeline.name))


def announce(lake: Lake, pipeline: Pipeline) -> None:
    """The tables in the shadow are whole, and are to take the place of the old ones."""
    made = Progress(shadow_of(lake, pipeline), pipeline.name).load(pipeline.table)
    if made is not None:
        progress = Progress(lake, pipeline.name)
        before = progress.load(pipeline.table)
        progress.save(before or Plan(app=new_app(pipeline.name)), rebuilt=made)


def settle(lake: Lake, pipeline: Pipeline) -> None:
    """Swap in what was announced; remove what was not."""
    place = f"{_FOLDER}/{pipeline.name}"
    progress = Progress(lake, pipeline.name)
    made = progress.rebuilt()
    if made is not None:
        shadow = shadow_of(lake, pipeline)
        for name in sorted(shadow.tables(), key=lambda one: one == pipeline.table):
            column = "".join(side_partitions(name))
            app, version = made.app, made.version
            lake.swap(name, f"{place}/{name}", app=app, version=version, column=column)
        progress.save(made)
    lake.drop(place)


def side_partitions(table: str) -> tuple[str, ...]:
    """The columns that a side table is partitioned by."""
    return ("pipeline",) if table in (QUARANTINE, RULES) else ()
