"""Makes ``format("trunkline")`` known: Spark looks for modules whose name begins with pyspark_."""

from __future__ import annotations

from trunkline.spark.source.readers import TrunklineSource as DefaultSource

__all__ = ["DefaultSource"]
