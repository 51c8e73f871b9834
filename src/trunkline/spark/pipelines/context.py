"""What every pipeline of a run shares: the session, the log, the lake, and what was asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from trunkline.spark.lake import EVENTS, Lake
from trunkline.spark.lake.lock import hold
from trunkline.spark.pipelines.declare import ACTOR, Output, Pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BATCH_ROWS: Final = 250_000
COPIED_ROWS: Final = 1_000_000  # of a batch that is only written: each makes files of its own


@dataclass
class Context:
    """``root`` is the folder or the address of the log. ``publish`` lets pipelines send events that
    they send only when asked. ``settings`` are parameters of transforms, by pipeline and name;
    ``since`` and ``until`` bound the time of the records that are read. ``sources`` is the lake
    that tables are read from, if it is another one than tables are written to.
    """

    spark: SparkSession
    root: str
    lake: Lake
    publish: bool = False
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    since: str = ""
    until: str = ""
    batch_rows: int = BATCH_ROWS
    copied_rows: int = COPIED_ROWS
    sources: Lake | None = None

    @property
    def source_lake(self) -> Lake:
        return self.sources or self.lake

    def bronze(self, pipeline: Pipeline) -> str:
        """The lake that has older records, empty if there is none."""
        is_copy = pipeline.table == EVENTS and self.sources is None
        return self.source_lake.path if not is_copy and self.source_lake.has(EVENTS) else ""

    def reach(self, pipeline: Pipeline) -> float:
        """How far from a record rows of the table may be that it changes, in seconds."""
        if isinstance(pipeline.reach, str):
            known = pipeline.settings | dict(self.settings.get(pipeline.name, {}))
            return float(known[pipeline.reach])
        return pipeline.reach

    def publishes(self, pipeline: Pipeline) -> bool:
        """A table that is made anew tells nothing again."""
        return self.sources is None and (self.publish or pipeline.publish == "always")

    def transform(
        self,
        pipeline: Pipeline,
        rows: DataFrame,
        table: DataFrame | None,
        history: Callable[[], DataFrame] | None = None,
    ) -> Output:
        """What the pipeline's transform makes of rows; it gets what it has parameters for."""
        known = {"table": table, "bus": self.root, "history": history, "lake": self.lake}
        given = {name: known[name] for name in pipeline.parameters}
        made = pipeline.transform(rows, **given, **self.settings.get(pipeline.name, {}))
        return made if isinstance(made, Output) else Output(made)

    def send(self, name: str, events: DataFrame, app: str, version: int) -> int:
        """Publish the events of a batch, once. Returns how many it has."""
        from pyspark.sql import functions as f

        events = events.withColumn("actor", f.lit(f"{ACTOR}{name}")).persist()
        try:
            count = events.count()
            if count:
                events.write.format("trunkline").mode("append").options(
                    url=self.root, txnAppId=app, txnVersion=str(version)
                ).save()
            return count
        finally:
            events.unpersist()

    def alone(self, pipeline: Pipeline) -> AbstractContextManager[None]:
        """Nobody else runs this pipeline on this lake."""
        return hold(self.lake.storage, pipeline.name)
