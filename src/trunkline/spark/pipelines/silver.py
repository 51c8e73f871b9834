"""Folds of silver: pipelines with ``source="clean"`` that get ``df`` and ``table``.

Their batches are ranges of offsets, as those of the log, up to where ``clean`` has come. Their rows
are the rows of the table ``clean`` in such a range. So they do not depend on how ``clean`` was cut
into batches, or on how its files were merged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from trunkline.errors import Conflict
from trunkline.spark.lake import row_bounds
from trunkline.spark.pipelines.batch import PipelineRun
from trunkline.spark.pipelines.declare import SILVER
from trunkline.spark.pipelines.progress import Progress
from trunkline.spark.pipelines.records import LogRun
from trunkline.spark.source.catalogs import Catalog
from trunkline.spark.source.offsets import Place

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_SPANS: Final = "topic string, partition int, _start bigint, _end bigint"


class SilverRun(LogRun):
    """One run of pipelines that are made of what ``clean`` passed."""

    def _locate(self, catalog: Catalog, member: PipelineRun) -> None:
        """Where a pipeline is. It goes no further than ``clean`` has."""
        known = member.plan.start if member.is_open else member.plan.end
        if "version" in known:
            member.problem = Conflict(
                f"table {member.pipeline.table} follows the versions of its source",
                hint=f"trunkline pipeline run {member.pipeline.name} --rebuild",
                name=member.pipeline.table,
            )
            return
        super()._locate(catalog, member)
        passed = self._passed()
        if passed is None:
            if member.is_behind:
                member.problem = Conflict(
                    f"there is no table {SILVER} to make {member.pipeline.name} of",
                    hint=f"trunkline pipeline run {SILVER}",
                    name=SILVER,
                )
            return
        first: dict[str, int] = {}
        if not self.context.since:  # retention may have removed what silver still has
            for one in row_bounds(self.context.source_lake, SILVER):
                first[one.topic] = min(one.first, first.get(one.topic, one.first))
        for topic, parts in member.place.items():
            for part, at in parts.items():
                begin = at if part in known.get(topic, {}) else min(at, first.get(topic, at))
                end = min(member.target[topic][part], passed.get(topic, {}).get(part, begin))
                parts[part], member.target[topic][part] = begin, max(begin, end)

    def _passed(self) -> Place | None:
        """How far ``clean`` is; None if there is no such table yet."""
        lake = self.context.source_lake
        plan = Progress(lake, SILVER).load(SILVER)
        if plan is None or not lake.has(SILVER):
            return None
        done = lake.version(SILVER, plan.app) >= plan.version
        return plan.end if done else plan.start

    def _read(self, start: Place | None, end: Place, names: list[str], **_: Any) -> DataFrame:
        """The rows of ``clean`` in a range of offsets. There are no damaged ones."""
        from pyspark.sql import functions as f

        lake, spark = self.context.source_lake, self.context.spark
        spans: dict[str, list[tuple[str, int, int, int]]] = {}
        for topic, parts in end.items():
            for part, last in parts.items():
                low = start[topic][part] if start is not None else 0
                spans.setdefault(topic, []).append((topic, int(part), low, last))
        files, is_exact = [], True
        for one in row_bounds(lake, SILVER):
            mine = spans.get(one.topic, [])
            if any(low <= one.last and one.first < high for _, _, low, high in mine):
                files.append(one.path)
                inside = all(low <= one.first and one.last < high for _, _, low, high in mine)
                is_exact = is_exact and inside
        rows = lake.read(spark, SILVER, files=files, whole=True)
        if not is_exact:
            edges = spark.createDataFrame([one for mine in spans.values() for one in mine], _SPANS)
            rows = rows.join(f.broadcast(edges), ["topic", "partition"])
            rows = rows.where("offset >= _start AND offset < _end")
        return rows.select(*[name for name in names if name in rows.columns])
