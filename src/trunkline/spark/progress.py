"""A bar for what Spark is doing: tasks done of all there are, rows and lag of streams."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def tasks_now(spark: SparkSession) -> tuple[int, int]:
    """``(done, all)`` over the stages of the jobs that run now."""
    tracker = spark.sparkContext.statusTracker()
    done = total = 0
    for job in tracker.getActiveJobsIds():
        about = tracker.getJobInfo(job)
        for stage in about.stageIds if about else []:
            state = tracker.getStageInfo(stage)
            if state is not None:
                done += state.numCompletedTasks
                total += state.numTasks
    return done, total


def stream_lag(progress: Any) -> int:
    """How many records a stream has still to read, by its last progress."""
    behind = 0
    for source in progress["sources"]:
        if source["latestOffset"] and source["endOffset"]:
            latest, end = json.loads(source["latestOffset"]), json.loads(source["endOffset"])
            behind += sum(
                offset - end.get(topic, {}).get(partition, offset)
                for topic, partitions in latest.items()
                for partition, offset in partitions.items()
            )
    return behind


@contextlib.contextmanager
def show_progress(spark: SparkSession, label: str, *, enabled: bool = True) -> Iterator[None]:
    """Draw a bar on stderr while the body runs, if someone is there to see it."""
    try:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )
    except ImportError:
        enabled = False
    if not (enabled and sys.stderr.isatty()):
        yield
        return
    from rich.console import Console

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    ended = threading.Event()
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        line = bar.add_task(label, total=None)

        def watch() -> None:
            while not ended.wait(0.25):
                done, total = tasks_now(spark)
                rates = [
                    f"{q.lastProgress['processedRowsPerSecond']:,.0f} rows/s, "
                    f"{stream_lag(q.lastProgress):,} behind"
                    for q in spark.streams.active
                    if q.lastProgress
                ]
                bar.update(
                    line, completed=done, total=total or None, description=" ".join([label, *rates])
                )

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
