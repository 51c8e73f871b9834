"""Erase from the lake what was erased from the log: rows of tables and summaries."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from trunkline.spark.lake.erase import ErasedOwner, erase_owners
from trunkline.spark.pipelines.declare import table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from trunkline.spark.lake import Lake

_SCHEMA = "owner string, scope string, at string, table string, rows bigint, offset bigint"


@table(
    "erasure",
    about="deletes the rows of erased subjects and spaces; what it deleted, and where",
    topics="system.erasure",
    columns="topic,value,offset,type",
    reads_published=True,
    chart=("table", "rows"),
)
def transform(df: DataFrame, lake: Lake) -> DataFrame:
    """Each ``subject.erased`` event names its owner by a digest. The rows of the owner go from
    every table of the lake with the columns ``space`` and ``subject``. A batch that is done again
    finds nothing more to delete.
    """
    told: list[tuple[ErasedOwner, dict[str, Any], int]] = []
    for row in df.where("type = 'subject.erased'").select("value", "offset").collect():
        payload = json.loads(row["value"])
        owner = ErasedOwner(payload["owner"], payload["scope"] == "space")
        told.append((owner, payload, row["offset"]))
    gone = erase_owners(lake, {owner for owner, _, _ in told}) if told else {}
    rows = [
        (owner.digest, payload["scope"], payload["at"], name, counts[owner], offset)
        for owner, payload, offset in told
        for name, counts in gone.items()
    ]
    return df.sparkSession.createDataFrame(rows, _SCHEMA)
