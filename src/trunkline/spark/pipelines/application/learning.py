"""Which decisions turned out well: rates per action and context, made of the table decisions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trunkline.spark.pipelines.declare import Output, as_events, table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@table(
    "learning",
    about="outcome rates per action and context, and what they let expect",
    source="decisions",
    keys=("action", "context"),
    to_topic="metacog",
    to_type="METACOG_REPORT",
    publish="asked",
    chart=("action", "decisions"),
)
def transform(df: DataFrame, prior: float = 5.0) -> Output:
    """``decisions`` counts different decisions, ``outcomes`` those whose first outcome came in
    time, ``too_late`` those whose first outcome did not.

    ``expected`` is the rate that is to be expected: the rate of the context, drawn to that of its
    action as if ``prior`` more outcomes had been seen, and that in turn to the rate of all. Brier
    scores are mean squared errors: of the confidence the decisions had, and of what is expected.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    good = f.col("ok").cast("double")
    rates = (
        df.where("decided IS NOT NULL")
        .groupBy("action", "context")
        .agg(
            f.count("*").alias("decisions"),
            f.count_if("has_outcome").alias("outcomes"),
            f.count_if("too_late").alias("too_late"),
            f.count("ok").alias("judged"),
            f.coalesce(f.sum(good), f.lit(0.0)).alias("good"),
            f.avg("reward").alias("reward"),
            f.avg("confidence").alias("confidence"),
            f.avg(f.pow(f.col("confidence") - good, 2)).alias("brier"),
        )
        .withColumn("success_rate", f.expr("try_divide(good, judged)"))
    )
    every = Window.partitionBy()
    action = Window.partitionBy("action")
    overall = f.try_divide(f.sum("good").over(every), f.sum("judged").over(every))
    ours = (f.sum("good").over(action) + prior * overall) / (f.sum("judged").over(action) + prior)
    expected = (f.col("good") + prior * ours) / (f.col("judged") + prior)
    squares = "good * pow(1 - expected, 2) + (judged - good) * pow(expected, 2)"
    scored = (
        rates.withColumn("expected", expected)
        .withColumn("model_brier", f.expr(f"try_divide({squares}, judged)"))
        .orderBy("action", "context")
    )
    events = as_events(scored, "metacog", "METACOG_REPORT", "action", "context")
    return Output(scored, events=events)
