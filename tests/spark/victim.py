"""A program to be killed. For each line it is given it does all there is to do, and says so. A line
names the events that are new: the first, and the one behind the last.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from trunkline.spark import session
from trunkline.spark.lake import Lake
from trunkline.spark.lake.optimize import optimize
from trunkline.spark.pipelines import batch, find
from trunkline.spark.pipelines.run import Runner, replay

from .logs import START, TOPIC

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SINK = "sink"  # a query from topic to topic, which is no pipeline
REPLAY = "replay"  # the share's records once more, which is no pipeline either
MERGED = "merged"  # the pipeline lake, which merges its files behind every batch
COPIES = "copies"
Work = Callable[[int, int], None]


def main(names: str, root: str, place: str) -> None:
    spark = session("victim", master="local[2]", quick=True)
    works = [make_work(spark, name, root, place) for name in names.split(",")]
    print("ready", flush=True)
    for line in sys.stdin:
        start, end = map(int, line.split())
        for work in works:
            work(start, end)
        print("done", flush=True)


def make_work(spark: SparkSession, name: str, root: str, place: str) -> Work:
    if name == SINK:
        return copying(spark, root, place)
    if name == REPLAY:
        return replaying(spark, root)
    if name == MERGED:
        batch.OPTIMIZE_EVERY = 1  # type: ignore[misc]
        batch.optimize = partial(optimize, many=2)  # type: ignore[attr-defined]
        name = "lake"
    return running(spark, name, root, place)


def running(spark: SparkSession, name: str, root: str, place: str) -> Work:
    runner, pipelines = Runner(spark, root, Lake(place), publish=True), find([name])

    def work(start: int, end: int) -> None:
        for outcome in runner.run(pipelines):
            if outcome.error:
                sys.exit(f"{name}: {outcome.error}")

    return work


def replaying(spark: SparkSession, root: str) -> Work:
    def work(start: int, end: int) -> None:
        span = {"startingTimestamp": moment(start), "endingTimestamp": moment(end)}
        target = {"url": root, "topic": COPIES, "txnAppId": REPLAY, "txnVersion": str(end)}
        replay(spark, {"url": root, "subscribe": TOPIC} | span, target)

    return work


def moment(number: int) -> str:
    return (START + timedelta(seconds=number)).isoformat()


def copying(spark: SparkSession, root: str, place: str) -> Work:
    def work(start: int, end: int) -> None:
        df = (
            spark.readStream.format("trunkline")
            .options(url=root, subscribe=TOPIC, startingOffsets="earliest")
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
