"""A program that runs some pipelines on a given Spark and prints what came out."""

from __future__ import annotations

import json
import sys
from typing import Any

from trunkline.spark import session
from trunkline.spark.cluster import cluster_settings
from trunkline.spark.jobs import Runner
from trunkline.spark.lake import Lake
from trunkline.spark.pipelines import find


def main(master: str, root: str, place: str) -> None:
    settings = {} if master.startswith("local") else cluster_settings()
    spark = session("pipelines", master=master, config=settings, quick=True)
    lake = Lake(place)
    ran = Runner(spark, root, lake).run(find(["lake", "clean", "traffic"]))
    said: dict[str, Any] = {one.name: [one.rows, one.error] for one in ran}
    for table in ("events", "clean", "traffic"):
        df = lake.read(spark, table)
        rows = sorted(str(row) for row in df.select(*sorted(df.columns)).collect())
        said[f"table {table}"] = rows
    print(json.dumps(said), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
