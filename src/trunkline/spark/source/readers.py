"""``format("trunkline")``: the log as a table, batch and stream.

There is no ``pushFilters``: Spark keeps one reader per ``load()`` and would go on using the pushed
filter for every other query on the same DataFrame. What is to be left out is said by options, the
columns by ``.schema(...)``.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import pyarrow as pa
from pyspark.errors import PySparkNotImplementedError
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    SimpleDataSourceStreamReader,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from trunkline.errors import InvalidOption
from trunkline.spark.lake import LakeFile, event_files
from trunkline.spark.lake.tiering import LakePart, read_part, split_tiers
from trunkline.spark.sink.writers import BatchSink, StreamSink
from trunkline.spark.source.catalogs import Catalog, is_remote
from trunkline.spark.source.columns import CORRUPT, check_columns, table_ddl
from trunkline.spark.source.offsets import Place, catalog_of, resolve, spans_between
from trunkline.spark.source.options import Selection, bus_of, read_options
from trunkline.spark.source.payload import (
    PAYLOAD,
    REGISTRY,
    PayloadColumn,
    kind_of,
    payload_ddl,
    registered,
)
from trunkline.spark.source.plan import admit_bytes, admit_rows, cores, divide
from trunkline.spark.source.progress_group import Mirror
from trunkline.spark.source.scan import OffsetRange, ScanOptions, scan

_STORED: Final = "read with "  # how the comment that carries a table's options begins
_CATALOG: Final = ("provider", "owner", "location", "comment", "external", "is_managed_location")


@dataclass
class ReadTask(InputPartition):
    """What one task reads."""

    spans: list[OffsetRange]
    parts: list[LakePart] = field(default_factory=list)


class TrunklineSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "trunkline"

    def schema(self) -> str:
        given = {key.lower(): value for key, value in self.options.items()}
        if "provider" in given:  # CREATE TABLE … USING trunkline
            return table_in_catalog(given)
        return _ddl(given)

    def reader(self, schema: StructType) -> DataSourceReader:
        return BatchReader(*self._asked(schema, stream=False))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        asked = self._asked(schema, stream=True)
        if asked[0].low_latency:  # Spark then asks for the simple reader
            raise PySparkNotImplementedError(
                errorClass="NOT_IMPLEMENTED", messageParameters={"feature": "streamReader"}
            )
        return StreamReader(*asked)

    def simpleStreamReader(self, schema: StructType) -> SimpleDataSourceStreamReader:  # noqa: N802
        return LowLatencyReader(*self._asked(schema, stream=True))

    def _asked(self, schema: StructType, *, stream: bool) -> tuple[Selection, Reading]:
        options = options_in_catalog(schema) | dict(self.options)
        choice = read_options(options, stream=stream)
        return choice, reading_of(choice, options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        return BatchSink(self.options, schema, overwrite)

    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamArrowWriter:
        return StreamSink(self.options, schema, overwrite)


def _ddl(given: Mapping[str, str]) -> str:
    """The columns of the table that options ask for; their names are in lower case."""
    columns = table_ddl(
        headers=given.get("includeheaders", "").lower() == "true",
        corrupt=given.get("badrecords", "").lower() == "column",
    )
    asked = given.get("payloadschema")
    return f"{columns}, {PAYLOAD} {payload_ddl(given, asked)}" if asked else columns


def table_in_catalog(given: Mapping[str, str]) -> str:
    """The columns of a table in Spark's catalog. The catalog keeps no options of a source in
    Python, so the comment of the first column carries them.
    """
    options = {key: value for key, value in given.items() if key not in _CATALOG}
    options = {key: value for key, value in options.items() if not key.startswith("option.")}
    if "token" in options:
        raise InvalidOption(
            "a table in the catalog keeps no token", hint="set TRUNKLINE_TOKEN where it is read"
        )
    read_options(options, stream=False)
    root = bus_of(options)
    options["url"] = root if is_remote(root) else f"file:{root}"
    first, rest = _ddl(options).split(", ", 1)
    told = (_STORED + json.dumps(options)).replace("\\", "\\\\").replace("'", "\\'")
    return f"{first} COMMENT '{told}', {rest}"


def options_in_catalog(schema: StructType) -> dict[str, str]:
    """The options that the columns of a table in Spark's catalog carry."""
    for one in schema.fields:
        told = (one.metadata or {}).get("comment", "")
        if told.startswith(_STORED):
            found: dict[str, str] = json.loads(told.removeprefix(_STORED))
            return found
    return {}


@dataclass(frozen=True)
class Reading:
    """How records become rows: what is scanned, and the type of the payload, if one was asked."""

    scan: ScanOptions
    payload: PayloadColumn | None = None

    def task(self, task: InputPartition) -> Iterator[pa.RecordBatch]:
        return self.shown(read_task(task, self.scan))

    def shown(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return batches if self.payload is None else self.payload.add(batches)


def reading_of(choice: Selection, options: Mapping[str, str], schema: StructType) -> Reading:
    asked = {one.name: one.dataType.simpleString() for one in schema.fields}
    payload = None
    if choice.payload and PAYLOAD in asked:
        ddl = asked.pop(PAYLOAD)
        if choice.payload.lower() == REGISTRY:
            kind = registered(options)
            if kind_of(schema[PAYLOAD].dataType).ddl != kind.ddl:
                raise InvalidOption(
                    f"the schema of the topic changed, payload was {ddl}", hint="load() again"
                )
        else:
            kind = kind_of(schema[PAYLOAD].dataType)
        payload = PayloadColumn(kind, tuple(schema.names), choice.bad_records)
        asked.setdefault("value", "string")
    names = check_columns(asked)
    bad = choice.bad_records
    if bad == "column" and CORRUPT not in names:
        bad = "skip"
    scanned = ScanOptions(
        root=choice.root,
        names=tuple(names),
        bad_records=bad,
        fail_on_data_loss=choice.fail_on_data_loss,
        types=choice.types,
        spaces=choice.spaces,
        token=choice.token,
    )
    return Reading(scanned, payload)


def lake_files(choice: Selection) -> list[LakeFile]:
    return event_files(choice.lake) if choice.lake else []


def divide_work(
    catalog: Catalog, choice: Selection, spans: list[OffsetRange], files: list[LakeFile], tasks: int
) -> list[InputPartition]:
    """The tasks that read the spans: what ``files`` of the lake hold from there, the rest from the
    log. There is always one.
    """
    old, new = split_tiers(spans, files)
    wanted = choice.min_partitions
    parts = divide(catalog, new, wanted or tasks, exact=bool(wanted))
    made = [ReadTask([], old[at::tasks]) for at in range(min(tasks, len(old)))]
    return [*made, *map(ReadTask, parts)] or [ReadTask([])]


def read_task(task: InputPartition, options: ScanOptions) -> Iterator[pa.RecordBatch]:
    assert isinstance(task, ReadTask)
    for part in task.parts:
        yield from read_part(part, options)
    for span in task.spans:
        yield from scan(span, options)
    _settle()


@cache
def _settle() -> None:
    """Once in each of Spark's workers: it collects garbage after every task and every plan, which
    takes 40 ms if all that was imported is looked at again.
    """
    gc.collect()
    gc.freeze()


class BatchReader(DataSourceReader):
    """A snapshot: the end is fixed when Spark plans the first query on the DataFrame."""

    def __init__(self, choice: Selection, reading: Reading) -> None:
        self._choice = choice
        self._reading = reading
        catalog = catalog_of(choice)
        try:  # so that what is wrong is said at load()
            resolve(catalog, choice, "starting", lake_files(choice))
        finally:
            catalog.close()

    def partitions(self) -> Sequence[InputPartition]:
        choice = self._choice
        catalog = catalog_of(choice)
        files = lake_files(choice)
        try:
            start = resolve(catalog, choice, "starting", files)
            end = resolve(catalog, choice, "ending", files)
            spans = spans_between(start, end)
            return divide_work(catalog, choice, spans, files, 2 * cores())
        finally:
            catalog.close()
            _settle()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._reading.task(partition)


class _Following:
    """What both stream readers share: where the log begins and ends, and the group they show."""

    def __init__(self, choice: Selection, reading: Reading) -> None:
        self._choice = choice
        self._reading = reading
        self._mirror = Mirror(choice.root, choice.group)
        self._catalog: Catalog | None = None
        self._waiting_since: float | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_catalog": None}

    def catalog(self) -> Catalog:
        if self._catalog is None:
            self._catalog = catalog_of(self._choice)
        return self._catalog

    def begin(self) -> Place:
        place = resolve(self.catalog(), self._choice, "starting", lake_files(self._choice))
        self._mirror.begin(place)
        return place

    def ends(self) -> Place:
        return resolve(self.catalog(), self._choice, "ending")

    def whole(self, start: Place, end: Place) -> Place:
        """``start``, with the beginning of each partition that came after it was noted."""
        full: Place = {}
        for topic, partitions in end.items():
            for partition in partitions:
                at = start.get(topic, {}).get(partition)
                if at is None:
                    at = self.catalog().reader(topic, int(partition)).head().start
                full.setdefault(topic, {})[partition] = at
        return full

    def admit(self, start: Place, end: Place) -> Place:
        choice = self._choice
        self._mirror.advance(start)
        start = self.whole(start, end)
        end = {t: {p: max(o, start[t][p]) for p, o in ps.items()} for t, ps in end.items()}
        if self._is_too_little(start, end):
            return start
        if choice.bytes_max:
            end = admit_bytes(self.catalog(), start, end, choice.bytes_max)
        return end

    def _is_too_little(self, start: Place, end: Place) -> bool:
        choice = self._choice
        count = sum(span.end - span.start for span in spans_between(start, end))
        now = time.monotonic()
        if not choice.rows_min or count >= choice.rows_min or not count:
            self._waiting_since = None
            return False
        if self._waiting_since is None:
            self._waiting_since = now
        if now - self._waiting_since >= choice.wait_s:
            self._waiting_since = None
            return False
        return True


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Executors read; the driver only counts offsets and bytes."""

    def __init__(self, choice: Selection, reading: Reading) -> None:
        self._choice = choice
        self._log = _Following(choice, reading)
        self._reading = reading
        self._target: Place | None = None

    def initialOffset(self) -> Place:  # noqa: N802
        return self._log.begin()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        rows = self._choice.rows_max
        return ReadMaxRows(rows) if rows else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._log.ends()

    def reportLatestOffset(self) -> Place:  # noqa: N802
        return self._log.ends()

    def latestOffset(self, start: Place, limit: ReadLimit) -> Place:  # noqa: N802
        end = self._log.admit(start, self._target or self._log.ends())
        if isinstance(limit, ReadMaxRows):
            end = admit_rows(self._log.whole(start, end), end, limit.max_rows)
        return end

    def partitions(self, start: Place, end: Place) -> Sequence[InputPartition]:
        spans = spans_between(self._log.whole(start, end), end)
        catalog = self._log.catalog()
        is_old = any(s.start < catalog.reader(s.topic, s.partition).head().start for s in spans)
        files = lake_files(self._choice) if is_old else []
        return divide_work(catalog, self._choice, spans, files, cores())

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._reading.task(partition)

    def commit(self, end: Place) -> None:
        self._log._mirror.advance(end)

    def stop(self) -> None:
        self._log._mirror.close()


class LowLatencyReader(SimpleDataSourceStreamReader):
    """Reads in the driver and hands the rows over with the offsets: no task has to be started."""

    def __init__(self, choice: Selection, reading: Reading) -> None:
        self._log = _Following(choice, reading)
        self._rows = choice.rows_max or 10_000
        self._reading = reading

    def initialOffset(self) -> Place:  # noqa: N802
        return self._log.begin()

    def read(self, start: Place) -> tuple[Iterator[pa.RecordBatch], Place]:
        end = self._log.admit(start, self._log.ends())
        whole = self._log.whole(start, end)
        end = admit_rows(whole, end, self._rows)
        if whole == end:
            return iter([]), end
        return iter(list(self._between(whole, end))), end

    def readBetweenOffsets(  # noqa: N802
        self, start: Place, end: Place
    ) -> Iterator[pa.RecordBatch]:
        return iter(list(self._between(self._log.whole(start, end), end)))

    def commit(self, end: Place) -> None:
        self._log._mirror.advance(end)

    def _between(self, start: Place, end: Place) -> Iterator[pa.RecordBatch]:
        for span in spans_between(start, end):
            yield from self._reading.shown(scan(span, self._reading.scan))
