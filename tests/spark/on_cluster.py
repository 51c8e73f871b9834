"""A program that runs some pipelines on a given Spark and prints what came out."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from trunkline.spark.cluster import open_session
from trunkline.spark.jobs import Runner
from trunkline.spark.lake import Lake
from trunkline.spark.pipelines import find


def where_am_i(_: Iterable[int]) -> Iterator[tuple[str, str, str]]:
    import trunkline

    yield os.environ.get("SPARK_EXECUTOR_DIRS", ""), sys.executable, trunkline.__file__


def main(master: str, root: str, place: str) -> None:
    spark = open_session(master, "pipelines")
    wanted, deadline = 1 if master.startswith("local") else 2, time.monotonic() + 60
    places: set[tuple[str, str, str]] = set()
    while len(places) < wanted and time.monotonic() < deadline:
        tasks = spark.sparkContext.parallelize(range(8), 8)
        places |= set(tasks.mapPartitions(where_am_i).collect())
    lake = Lake(place)
    ran = Runner(spark, root, lake).run(find(["lake", "clean", "traffic", "temporal"]))
    said: dict[str, Any] = {
        "errors": {one.name: one.error for one in ran if one.error},
        "published": {one.name: one.published for one in ran},
        "executors": len({executor for executor, *_ in places}),
        "pythons": sorted({python for _, python, _ in places}),
        "packages": sorted({package for *_, package in places}),
    }
    for table in ("events", "clean", "traffic", "temporal"):
        df = lake.read(spark, table)
        shown = sorted(set(df.columns) - {"payload"})
        rows = sorted(str(row) for row in df.selectExpr(*(f"`{n}`" for n in shown)).collect())
        said[f"table {table}"] = rows
    print(json.dumps(said), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
