"""Pipelines: tables that are made of the log, and of other tables.

``declare`` has the decorator, ``run`` the runner. ``builtin`` holds the tables of any bus,
``application`` the tables of one application's events.
"""

from __future__ import annotations

from trunkline.spark.pipelines.declare import (
    ACTOR,
    Output,
    Pipeline,
    all_pipelines,
    as_events,
    find,
    pipeline,
    table,
    together,
)
from trunkline.spark.pipelines.rules import Expectation, expect

__all__ = [
    "ACTOR",
    "Output",
    "Pipeline",
    "all_pipelines",
    "as_events",
    "find",
    "Expectation",
    "expect",
    "pipeline",
    "table",
    "together",
]
