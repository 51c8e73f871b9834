"""A bar for what Spark is doing: stages, tasks and rows of jobs, rates and lag of streams."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Seen(NamedTuple):
    """What is going on: ``stages`` that run, their tasks, and what streams say of themselves."""

    stages: int
    done: int
    tasks: int
    text: str


class Watch:
    """Looks at what a session does, from now on."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._store = spark.sparkContext._jsc.sc().statusStore()
        self._rows: dict[int, int] = {}
        self._began = perf_counter()

    def look(self) -> Seen:
        stages = done = tasks = 0
        running = self._store.activeStages().iterator()
        while running.hasNext():
            stage = running.next()
            stages += 1
            done += stage.numCompleteTasks()
            tasks += stage.numTasks()
            self._rows[stage.stageId()] = stage.inputRecords()
        words = [f"{stages} stage{'s' * (stages > 1)}"] if stages else []
        streams = [q.lastProgress for q in self._spark.streams.active if q.lastProgress]
        said = [streams_said(streams)] if streams else self._rate()
        return Seen(stages, done, tasks, ", ".join(words + said))

    def _rate(self) -> list[str]:
        rows = sum(self._rows.values())
        return [f"{rows / (perf_counter() - self._began):,.0f} rows/s"] if rows else []


def streams_said(streams: Sequence[Any]) -> str:
    """The rate and the lag of all streams together, by the last progress of each."""
    rate = sum(one["processedRowsPerSecond"] or 0 for one in streams)
    return f"{rate:,.0f} rows/s, {sum(map(stream_lag, streams)):,} behind"


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
        from rich import progress as rich
        from rich.console import Console
    except ImportError:
        enabled = False
    if not (enabled and sys.stderr.isatty()):
        yield
        return
    columns = (
        rich.TextColumn("{task.description:14}"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TextColumn("tasks"),
        rich.TimeElapsedColumn(),
        rich.TextColumn("{task.fields[said]}"),
    )
    ended = threading.Event()
    # What was done is printed as a line; the bar itself leaves no trace.
    with rich.Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # else what is piped would go to the terminal
    ) as bar:
        line = bar.add_task(label, total=None, said="")
        watch = Watch(spark)

        def draw() -> None:
            while not ended.wait(0.25):
                # A stage or a session that just ended takes its status with it.
                with contextlib.suppress(Exception):
                    seen = watch.look()
                    bar.update(line, completed=seen.done, total=seen.tasks or None, said=seen.text)

        thread = threading.Thread(target=draw, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
