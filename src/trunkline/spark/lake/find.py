"""Find one record in the tables of a lake. No Spark is needed."""

from __future__ import annotations

import os

from trunkline.check import load_extra
from trunkline.errors import NotFound
from trunkline.spark.lake.erase import tables_of

_PLACE = {"topic", "partition", "offset"}


def rows_of(lake: str, topic: str, partition: int, offset: int) -> dict[str, int]:
    """How many rows of which table have the place of this record, for tables that name places."""
    deltalake = load_extra("deltalake", "spark")
    tables = tables_of(lake)
    if not tables:
        raise NotFound(f"there is no table in {lake}", path=lake)
    found: dict[str, int] = {}
    for place in tables:
        table = deltalake.DeltaTable(place)
        if {field.name for field in table.schema().fields} >= _PLACE:
            wanted = [("topic", "=", topic), ("partition", "=", partition), ("offset", "=", offset)]
            count = table.to_pyarrow_table(columns=["offset"], filters=wanted).num_rows
            if count:
                found[os.path.relpath(place, lake)] = count
    return found
