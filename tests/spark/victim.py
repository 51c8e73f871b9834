"""A program to be killed: copies a topic by Spark, into another topic or into the lake."""

from __future__ import annotations

import sys

from trunkline.spark import session


def main(kind: str, root: str, place: str) -> None:
    spark = session("victim", master="local[2]", quick=True)
    if kind == "lake":
        from trunkline.spark.jobs import Runner
        from trunkline.spark.lake import Lake
        from trunkline.spark.pipelines import find

        runner = Runner(spark, root, Lake(place))
        query = runner.follow(find(["lake"])[0], once=True)
    else:
        df = (
            spark.readStream.format("trunkline")
            .options(url=root, subscribe="orders", startingOffsets="earliest")
            .options(maxOffsetsPerTrigger="4000")
            .load()
        )
        query = (
            df.select("key", "value", "id")
            .writeStream.format("trunkline")
            .options(url=root, topic="copies", checkpointLocation=place)
            .trigger(availableNow=True)
            .start()
        )
    print("started", flush=True)
    query.awaitTermination()
    print("ended", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
