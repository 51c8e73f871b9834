"""Which decisions turned out well: decisions joined to what came of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trunkline.spark.pipelines import Made, as_events, pipeline, together

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

DECISION = "action_id STRING, action STRING, context STRING, confidence DOUBLE"
OUTCOME = "action_id STRING, decision STRING, ok BOOLEAN, status STRING, reward DOUBLE"
WITHIN = "1 hour"


def join(df: DataFrame) -> DataFrame:
    """Each decision with its outcome, as soon as that is there, or without, once none can come.

    A decision has type ACTION_DECISION. Its outcome, ACTION_EXECUTED, names it: by ``action_id`` in
    both payloads, by ``decision`` in its own, or as its cause.
    """
    from pyspark.sql import functions as f

    made = (
        df.where("type = 'ACTION_DECISION'")
        .withColumn("d", f.from_json("value", DECISION))
        .select(
            f.coalesce("d.action_id", "id").alias("ref"),
            f.col("timestamp").alias("decided"),
            f.coalesce("d.action", f.lit("")).alias("action"),
            f.coalesce("d.context", f.lit("")).alias("context"),
            f.coalesce("d.confidence", f.lit(0.5)).alias("confidence"),
        )
    )
    came = (
        df.where("type = 'ACTION_EXECUTED'")
        .withColumn("o", f.from_json("value", OUTCOME))
        .select(
            f.coalesce("o.action_id", "o.decision", "cause").alias("of"),
            f.col("timestamp").alias("executed"),
            f.coalesce("o.ok", f.col("o.status") == "ok").alias("ok"),
            f.col("o.reward").alias("reward"),
        )
    )
    soon = f"of = ref AND executed BETWEEN decided AND decided + INTERVAL {WITHIN}"
    return made.join(came, f.expr(soon), "left_outer")


@pipeline(
    "learning",
    about="outcome rates per action and context, and what a model of them expects",
    columns="id,type,value,timestamp,cause",
    stream=join,
    watermark="10 minutes",
    sink="replace",
    to_topic="metacog",
    to_type="METACOG_REPORT",
    chart=("action", "decisions"),
)
def transform(df: DataFrame, table: DataFrame | None = None) -> Made:
    """``df`` is what ``join`` gives. Brier scores are mean squared errors: of the confidence the
    decisions had, and of what the model expects.
    """
    from pyspark.sql import functions as f

    good = f.col("ok").cast("double")
    came = df.groupBy("action", "context").agg(
        f.count("*").alias("decisions"),
        f.count("of").alias("outcomes"),
        f.count("ok").alias("judged"),
        f.coalesce(f.sum(good), f.lit(0.0)).alias("good"),
        f.sum("reward").alias("_reward"),
        f.count("reward").alias("_rewards"),
        f.sum("confidence").alias("_confidence"),
        f.sum(f.pow(f.col("confidence") - good, 2)).alias("_error"),
        f.lit(True).alias("changed"),
    )
    sums = [name for name in came.columns if name not in ("action", "context", "changed")]
    before = table and table.select("action", "context", *sums, f.lit(False).alias("changed"))
    known = (
        together(before, came)
        .groupBy("action", "context")
        .agg(*[f.sum(name).alias(name) for name in sums], f.max("changed").alias("changed"))
    )
    rates = (
        known.withColumn("success_rate", f.expr("try_divide(good, judged)"))
        .withColumn("reward", f.expr("try_divide(_reward, _rewards)"))
        .withColumn("confidence", f.expr("_confidence / decisions"))
        .withColumn("brier", f.expr("try_divide(_error, judged)"))
        .persist()
    )
    squares = "good * pow(1 - expected, 2) + (judged - good) * pow(expected, 2)"
    model_brier = f.expr(f"try_divide({squares}, judged)")
    scored = expected(rates).withColumn("model_brier", model_brier).persist()
    told = scored.where("changed").drop("changed")
    return Made(
        scored.drop("changed").orderBy("action", "context"),
        events=as_events(told, "metacog", "METACOG_REPORT", "action", "context"),
        held=(rates, scored),
    )


def expected(rates: DataFrame) -> DataFrame:
    """The rates with what a model trained on them expects of each; nothing while all outcomes were
    alike. It learns from counts, so it costs what the table has, not what the log has.
    """
    from pyspark.ml.classification import LogisticRegression
    from pyspark.ml.feature import FeatureHasher
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions as f

    good, judged = rates.agg(f.sum("good"), f.sum("judged")).collect()[0]
    if not good or good == judged:
        return rates.withColumn("expected", f.lit(None).cast("double"))
    hasher = FeatureHasher(
        inputCols=["action", "context", "confidence"], outputCol="features", numFeatures=256
    )
    rows = hasher.transform(rates)
    lessons = rows.selectExpr("features", "1.0D AS label", "good AS weight").unionByName(
        rows.selectExpr("features", "0.0D AS label", "judged - good AS weight")
    )
    model = LogisticRegression(weightCol="weight", regParam=0.01, maxIter=20).fit(
        lessons.where("weight > 0")
    )
    chance = vector_to_array(f.col("probability")).getItem(1)
    scored: DataFrame = model.transform(rows).withColumn("expected", chance)
    return scored.drop("features", "rawPrediction", "probability", "prediction")
