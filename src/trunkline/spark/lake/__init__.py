"""Delta tables: written by executors, committed by one writer, read from anywhere."""

from __future__ import annotations

from trunkline.spark.lake.table import (
    EVENTS,
    EVERYTHING,
    NOTHING,
    Lake,
    LakeFile,
    Replacing,
    event_files,
    register,
    row_bounds,
)

__all__ = [
    "EVENTS",
    "EVERYTHING",
    "NOTHING",
    "Lake",
    "LakeFile",
    "Replacing",
    "event_files",
    "register",
    "row_bounds",
]
