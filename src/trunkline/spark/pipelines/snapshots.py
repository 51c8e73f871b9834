"""Pipelines of what the bus is now: its groups, or its segments."""

from __future__ import annotations

from typing import Any, Final

from trunkline.folder import Folder
from trunkline.options import StoreOptions
from trunkline.spark.lake import EVERYTHING
from trunkline.spark.pipelines.context import Context
from trunkline.spark.pipelines.declare import Output, Pipeline
from trunkline.spark.source.catalogs import FolderCatalog, is_remote, open_catalog, open_remote
from trunkline.spark.source.options import token_of

_GROUPS: Final = (
    "topic string, partition int, `group` string, floor bigint, first bigint, next bigint, "
    "lag bigint"
)
_SEGMENTS: Final = "root string, token string, topic string, partition int, segment bigint"
_TASKS: Final = 64


def take_snapshot(context: Context, pipeline: Pipeline, version: int) -> None:
    """Make the pipeline's table anew of what is there now."""
    if pipeline.source == "groups":
        df = context.spark.createDataFrame(_groups(context.root), _GROUPS)
    else:
        rows = _segments(context.root)
        df = context.spark.createDataFrame(rows, _SEGMENTS)
        df = df.repartition(max(1, min(len(rows), _TASKS)))
    made = pipeline.transform(df)
    output = made if isinstance(made, Output) else Output(made)
    app, lake = f"{pipeline.name}:snapshot", context.lake
    lake.sweep(app, [*output.side_tables, pipeline.table])  # of one that was killed
    for name, side in output.side_tables.items():
        lake.write(name, side, app=app, version=version)
    lake.write(pipeline.table, output.table, app=app, version=version, replacing=EVERYTHING)


def _segments(root: str) -> list[tuple[Any, ...]]:
    """The segments of a folder; of a log on a server, which shows none, its partitions."""
    token = token_of({})
    catalog = open_catalog(root, token)
    try:
        places = [(t, p) for t, count in catalog.topics().items() for p in range(count)]
        if not isinstance(catalog, FolderCatalog):
            return [(root, token, *place, 0) for place in places]
        return [
            (root, "", *place, number)
            for place in places
            for number in [s.number for s in catalog.reader(*place).files()] or [0]
        ]
    finally:
        catalog.close()


def _groups(root: str) -> list[tuple[Any, ...]]:
    if is_remote(root):
        return _remote_groups(root)
    folder = Folder(root, StoreOptions(create=False, reserve_bytes=0))
    try:
        rows = []
        for key in folder.groups():
            group = folder.group(key)
            first, end = folder.bounds(key.topic, key.partition)
            rows.append((*key, group.floor, first, end, group.lag(end, first)))
        return rows
    finally:
        folder.close()


def _remote_groups(root: str) -> list[tuple[Any, ...]]:
    log = open_remote(root, token_of({}))
    try:
        with log.open_bus() as bus:
            return [
                (one.topic, one.partition, one.group, one.floor,
                 *bus.bounds(one.topic, one.partition), one.lag)
                for one in bus.groups()
            ]  # fmt: skip
    finally:
        log.close()
