"""Which decisions turned out well: decisions joined to what came of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trunkline.spark.pipelines import pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

DECISION = "action STRING, context STRING, confidence DOUBLE"
OUTCOME = "decision STRING, ok BOOLEAN, reward DOUBLE"


@pipeline(
    "learning",
    about="outcome rates per action and context, and what a model of them expects",
    columns="id,type,value,timestamp,cause",
    to_topic="metacog",
    to_type="METACOG_REPORT",
    chart=("action", "decisions"),
)
def transform(df: DataFrame, within: str = "1 hour") -> DataFrame:
    """A decision has type ACTION_DECISION; its outcome, ACTION_EXECUTED, names it as cause."""
    from pyspark.sql import functions as f

    made = df.where("type = 'ACTION_DECISION'").select(
        "id", "timestamp", f.from_json("value", DECISION).alias("d")
    )
    came = df.where("type = 'ACTION_EXECUTED'").select(
        f.coalesce("cause", f.get_json_object("value", "$.decision")).alias("of"),
        f.col("timestamp").alias("at"),
        f.from_json("value", OUTCOME).alias("o"),
    )
    soon = f.expr(f"of = id AND at BETWEEN timestamp AND timestamp + INTERVAL {within}")
    joined = made.join(came, soon, "left")
    good = f.when(f.col("o.ok"), 1.0).when(~f.col("o.ok"), 0.0)
    rates = joined.groupBy("d.action", "d.context").agg(
        f.count_distinct("id").alias("decisions"),
        f.count("of").alias("outcomes"),
        f.avg(good).alias("success_rate"),
        f.avg("o.reward").alias("reward"),
        f.avg(f.pow(f.col("d.confidence") - good, 2)).alias("brier"),
    )
    known = joined.where("o.ok IS NOT NULL").selectExpr("d.*", "CAST(o.ok AS DOUBLE) AS label")
    return rates.join(expected(known), ["action", "context"], "left").orderBy("action", "context")


def expected(outcomes: DataFrame) -> DataFrame:
    """How often each action should turn out well, by a model of what has been seen; nothing while
    all outcomes were alike.
    """
    from pyspark.ml.classification import LogisticRegression
    from pyspark.ml.feature import FeatureHasher
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions as f

    seen = outcomes.na.fill({"context": "", "confidence": 0.5}).cache()
    if seen.select("label").distinct().count() < 2:
        return seen.select("action", "context", f.lit(None).cast("double").alias("expected")).limit(
            0
        )
    hasher = FeatureHasher(
        inputCols=["action", "context", "confidence"], outputCol="features", numFeatures=256
    )
    rows = hasher.transform(seen)
    model = LogisticRegression(regParam=0.01, maxIter=20).fit(rows)
    chance = vector_to_array(f.col("probability")).getItem(1)
    scored: DataFrame = model.transform(rows)
    return scored.groupBy("action", "context").agg(f.avg(chance).alias("expected"))
