"""What follows what: transitions between types of events, and those that surprise."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from trunkline.spark.pipelines.declare import Output, table, together

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

START = "(start)"  # in the place of a type, before an actor's first event
ORDER = ("timestamp", "topic", "partition", "offset")


@table(
    "sequences",
    about="transitions between event types per actor; rare ones are surprising",
    columns="topic,partition,offset,actor,type,timestamp",
    source="clean",
    sink="replace",
    reads_once=True,
    publish="asked",
    chart=("step", "times"),
)
def transform(
    df: DataFrame,
    table: DataFrame | None = None,
    history: Callable[[], DataFrame] | None = None,
    surprising_bits: float = 5.0,
) -> Output:
    """``surprise`` is how many bits it takes to say that this followed, over all actors. The order
    is ``timestamp, topic, partition, offset``. An actor one of whose records came late is counted
    anew from all of its records.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    rows = steps_of(df)
    kept = None
    cached = []
    if table is not None:
        stands = table.groupBy("actor").agg(f.max("_last").alias("stands"))
        first = rows.groupBy("actor").agg(f.min("place").alias("first"))
        came = first.join(stands, "actor", "left")
        late = came.where("stands IS NOT NULL AND first < stands.place").select("actor")
        late = late.persist()
        cached.append(late)
        some = history is not None and not late.isEmpty()
        if some:
            assert history is not None
            again = steps_of(history()).join(f.broadcast(late), "actor", "left_semi")
            rows = rows.join(f.broadcast(late), "actor", "left_anti")
            table = table.join(f.broadcast(late), "actor", "left_anti")
            rows = rows.join(stands, "actor", "left").unionByName(
                again.withColumn("stands", f.lit(None).cast(stands.schema["stands"].dataType))
            )
        else:
            rows = rows.join(stands, "actor", "left")
        kept = table.select("actor", "before", "after", "times", "_last")
        begins = f.coalesce(f.col("stands.type"), f.lit(START))
    else:
        begins = f.lit(START)
    order = Window.partitionBy("actor").orderBy("place")
    came = rows.select(
        "actor",
        f.coalesce(f.lag("type").over(order), begins).alias("before"),
        f.col("type").alias("after"),
        f.lit(1).cast("bigint").alias("times"),
        f.struct("place", "type").alias("_last"),
    )
    counted = (
        together(kept, came)
        .groupBy("actor", "before", "after")
        .agg(f.sum("times").alias("times"), f.max("_last").alias("_last"))
    )
    counted = counted.persist()
    cached.append(counted)
    steps = counted.groupBy("before", "after").agg(f.sum("times").alias("step_times"))
    whole = f.sum("step_times").over(Window.partitionBy("before"))
    shares = steps.select("before", "after", (f.col("step_times") / whole).alias("share"))
    made = (
        counted.join(f.broadcast(shares), ["before", "after"])
        .select(*counted.columns, "share")
        .withColumn("surprise", -f.log2("share"))
        .withColumn("surprising", f.col("surprise") >= surprising_bits)
        .withColumn("step", f.concat_ws(" > ", "before", "after"))
        .withColumn("last_seen", f.col("_last.place.timestamp"))
    )
    return Output(made, cached=tuple(cached))


def steps_of(df: DataFrame) -> DataFrame:
    """The records that count: actor, type and their place in the order."""
    from pyspark.sql import functions as f

    return df.where("actor IS NOT NULL AND type IS NOT NULL").select(
        "actor", "type", f.struct(*ORDER).alias("place")
    )
