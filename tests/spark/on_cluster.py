"""A program that runs every pipeline on a given Spark, writes to the log, and prints what came out.
It is given the master, the URL of the bus and the place of the lake.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from trunkline.spark.lake import Lake
from trunkline.spark.pipelines import find
from trunkline.spark.pipelines.run import Runner
from trunkline.spark.session.cluster import open_session

# What depends on the moment of the run, or of the append.
MOMENTS = {"at", "payload", "appended_at", "run", "seen"}


def where_am_i(_: Iterable[int]) -> Iterator[tuple[str, str, str]]:
    import trunkline

    yield os.environ.get("SPARK_EXECUTOR_DIRS", ""), sys.executable, trunkline.__file__


def main(master: str, url: str, place: str) -> None:
    spark = open_session(master, "pipelines")
    wanted, deadline = 1 if master.startswith("local") else 2, time.monotonic() + 60
    places: set[tuple[str, str, str]] = set()
    while len(places) < wanted and time.monotonic() < deadline:
        tasks = spark.sparkContext.parallelize(range(8), 8)
        places |= set(tasks.mapPartitions(where_am_i).collect())
    lake = Lake(place)
    ran = Runner(spark, url, lake).run(find([]))
    said: dict[str, Any] = {
        "errors": {one.name: one.error for one in ran if one.error},
        "published": {one.name: one.published for one in ran},
        "executors": len({executor for executor, *_ in places}),
        "pythons": sorted({python for _, python, _ in places}),
        "packages": sorted({package for *_, package in places}),
    }
    for table in lake.tables():
        if table in ("lag", "lag.history"):  # the group of the lake is shown in a folder alone
            continue
        df = lake.read(spark, table)
        shown = sorted(set(df.columns) - MOMENTS)
        rows = sorted(str(row) for row in df.selectExpr(*(f"`{n}`" for n in shown)).collect())
        said[f"table {table}"] = rows
    copy = lake.read(spark, "events").where("NOT startswith(topic, 'system.')")
    for _ in range(2):  # the second time nothing is written
        copy.selectExpr("key", "value", "'copies' AS topic").write.format("trunkline").mode(
            "append"
        ).options(url=url, txnAppId="copy", txnVersion="1").save()
    read = spark.read.format("trunkline").options(url=url, subscribe="copies").load()
    said["table of copies"] = sorted(str(row.value) for row in read.select("value").collect())
    print(json.dumps(said), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
