"""The log as a Spark table. ``session()`` is where to start."""

from __future__ import annotations

from trunkline.spark.session.errors import cause_of
from trunkline.spark.session.start import session

__all__ = ["cause_of", "session"]
