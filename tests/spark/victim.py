"""A program to be killed. For each line it is given it does all there is to do, and says so."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from trunkline.spark import session
from trunkline.spark.jobs import Runner
from trunkline.spark.lake import Lake
from trunkline.spark.pipelines import find

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SINK = "sink"  # a query from topic to topic, which is no pipeline
COPIES = "copies"


def main(names: str, root: str, place: str) -> None:
    spark = session("victim", master="local[2]", quick=True)
    works = [copying(spark, root, place) if n == SINK else running(spark, n, root, place)
             for n in names.split(",")]  # fmt: skip
    print("ready", flush=True)
    for _ in sys.stdin:
        for work in works:
            work()
        print("done", flush=True)


def running(spark: SparkSession, name: str, root: str, place: str) -> Callable[[], None]:
    runner, pipelines = Runner(spark, root, Lake(place)), find([name])

    def work() -> None:
        (outcome,) = runner.run(pipelines)
        if outcome.error:
            sys.exit(f"{name}: {outcome.error}")

    return work


def copying(spark: SparkSession, root: str, place: str) -> Callable[[], None]:
    def work() -> None:
        df = (
            spark.readStream.format("trunkline")
            .options(url=root, subscribe="orders", startingOffsets="earliest")
            .option("maxOffsetsPerTrigger", "2000")
            .load()
        )
        query = (
            df.select("key", "value", "id", "type")
            .writeStream.format("trunkline")
            .options(url=root, topic=COPIES, checkpointLocation=f"{place}/check")
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    return work


if __name__ == "__main__":
    main(*sys.argv[1:])
