"""Declaring a table: a function that makes rows of rows, and where both are.

``@table("delays", source="clean.flights", keys=("day", "carrier"))`` makes a function a pipeline.
Name its module with ``trunkline pipeline run --load my_pipelines`` and it stands beside the others.

A ``transform(df)`` gets the rows that are new. Its rows are added to the table, or take the place
of those with the same ``keys``. A transform that also takes ``table`` gets what the table holds of
the entities that came (see ``entity``), and returns what it holds of them from then on. One that
takes ``history`` can ask for every record up to this batch.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from trunkline.errors import Conflict, InvalidOption, NotFound
from trunkline.spark.pipelines.rules import Expectation, rules_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

RECORDS = "records"  # the log
SILVER = "clean"  # the table of the events that passed
SNAPSHOTS = ("groups", "segments")  # what the bus is now
Sink = Literal["add", "upsert", "replace"]
ACTOR = "pipeline."  # the actor of events that pipelines publish; pipelines do not read them
_GIVEN = frozenset({"table", "bus", "history", "lake"})  # parameters that the runner fills in


@dataclass(frozen=True, slots=True)
class Output:
    """What a batch becomes. ``side_tables`` are rows for other tables. ``events`` go back to
    the bus: topic, type, key and value, and any other column of the sink. ``cached`` are persisted
    frames that several of them are made of; the runner unpersists them when the batch is done.
    ``notes`` are shown when it runs, one line each.
    """

    table: DataFrame
    side_tables: dict[str, DataFrame] = field(default_factory=dict)
    events: DataFrame | None = None
    cached: tuple[DataFrame, ...] = ()
    notes: tuple[str, ...] = ()


Transform = Callable[..., "DataFrame | Output"]
T = TypeVar("T", bound=Transform)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """``source`` is the log (``records``), another table, or what the bus is now (``groups``,
    ``segments``). ``topics`` and ``columns`` say what is read of the log.

    ``sink`` says what becomes of the rows: ``add`` them to the table, ``upsert`` them by ``keys``,
    or ``replace`` the rows of the entities that came. ``entity`` names the columns of an entity: a
    batch reads and writes only the buckets of the table that the batch's entities are in. ``span``
    names the first and the last time of a row instead, in a table of what happened when. A batch
    then reads and writes only the periods of the table that its records are in or near to
    (``reach``: seconds, or the setting that has them), and the rows for which ``is_open`` is true.
    With ``add``, ``reach`` is how far from its records a batch looks at what the table has.

    ``to_topic`` publishes the rows that are added. Where a batch is made of all rows of another
    table, it publishes those that the table lacked. A rebuild publishes nothing.

    ``stream`` and ``watermark`` are for joins and windows that keep their state in Spark.
    """

    name: str
    about: str
    transform: Transform
    source: str = RECORDS
    topics: str = ">"
    columns: str = ""
    reads_published: bool = False  # whether it reads the events that pipelines published
    reads_damaged: bool = False  # whether it gets rows that stand for damaged lines
    reads_once: bool = False  # whether its first batch looks at its rows once
    prepare: Callable[[DataFrame], DataFrame] | None = None  # done to the rows before anything else
    stream: Callable[[DataFrame], DataFrame] | None = None
    watermark: str = ""
    sink: Sink = "add"
    keys: tuple[str, ...] = ()
    entity: tuple[str, ...] = ()
    span: tuple[str, str] | None = None
    reach: float | str = 0.0
    is_open: str = ""
    table: str = ""
    partition_by: tuple[str, ...] = ()
    split_files_by: tuple[str, ...] = ()
    rules: tuple[Expectation, ...] = ()
    to_topic: str = ""
    to_type: str = ""
    publish: Literal["always", "asked"] = "always"  # with --publish only, or whenever it runs
    chart: tuple[str, str] | None = None  # what the report draws: a label and a number

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", self.table or self.name)

    @property
    def parameters(self) -> frozenset[str]:
        """What its transform wants to know besides the rows, of those in ``_GIVEN``."""
        return frozenset(inspect.signature(self.transform).parameters) & _GIVEN

    @property
    def settings(self) -> dict[str, Any]:
        """The parameters that can be set (``--set pause_s=600``), with their defaults."""
        found = inspect.signature(self.transform).parameters
        return {
            name: one.default
            for name, one in found.items()
            if name not in _GIVEN and isinstance(one.default, bool | int | float | str)
        }

    @property
    def is_of_silver(self) -> bool:
        """Whether it is a fold of the events that passed, by their offsets in the log."""
        fold = self.sink == "replace" and "table" in self.parameters
        return self.source == SILVER and fold

    @property
    def is_stream(self) -> bool:
        """Whether Spark keeps the state of it, in a checkpoint of a streaming query."""
        keeps = self.sink == "upsert" and "table" not in self.parameters
        return self.source == RECORDS and bool(self.stream or self.watermark or keeps)


_known: dict[str, Pipeline] = {}


def table(
    name: str,
    *,
    about: str = "",
    expect: Mapping[str, str] | Sequence[Expectation] = (),
    **declared: Any,
) -> Callable[[T], T]:
    """Make a function that turns one DataFrame into another a pipeline."""

    def add(transform: T) -> T:
        have = _known.get(name)
        if have is not None and have.transform.__module__ != transform.__module__:
            raise Conflict(f"there are two pipelines {name}", name=name)
        if declared.get("keys"):
            declared.setdefault("sink", "upsert")
        doc = (inspect.getdoc(transform) or "").partition("\n")[0]
        made = Pipeline(
            name=name,
            about=about or doc,
            transform=transform,
            rules=rules_of(expect),
            **declared,
        )
        if made.source == RECORDS and (made.sink == "replace") > ("table" in made.parameters):
            raise InvalidOption(
                f"pipeline {name} replaces its table without having seen it",
                hint="let its transform take df and table",
            )
        _known[name] = made
        return transform

    return add


pipeline = table


def as_events(df: DataFrame, topic: str, type_: str, *key: str) -> DataFrame:
    """Rows as events whose payload is the row. ``key`` names the columns that their key is of."""
    from pyspark.sql import functions as f

    shown = [name for name in df.columns if not name.startswith("_")]
    columns = [
        f.lit(topic).alias("topic"),
        f.lit(type_).alias("type"),
        (f.concat_ws("|", *key) if key else f.lit(None).cast("string")).alias("key"),
        f.to_json(f.struct(*shown)).alias("value"),
    ]
    if "space" in df.columns:
        columns.append(f.when(f.col("space") != "", f.col("space")).alias("space"))
    return df.select(*columns)


def together(table: DataFrame | None, rows: DataFrame) -> DataFrame:
    """What there was and what came."""
    return rows if table is None else table.unionByName(rows, allowMissingColumns=True)


def all_pipelines(extra: tuple[str, ...] = ()) -> dict[str, Pipeline]:
    """Those of this package and of the modules ``extra``, each behind those it is made of."""
    for found in _modules():
        importlib.import_module(found)
    for module in extra:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise NotFound(f"cannot load pipelines: {error}", hint="is it on PYTHONPATH?") from None
    first = {name: at for at, name in enumerate(("lake", "clean", "verify"))}
    known = sorted(_known.values(), key=lambda one: (first.get(one.name, 9), one.name))
    return {one.name: one for one in in_order(known)}


def maker_of(source: str, known: Sequence[Pipeline]) -> Pipeline | None:
    """The pipeline that makes a table; ``clean.orders`` is made by ``clean``."""
    for one in known:
        if source == one.table or source.startswith(f"{one.table}."):
            return one
    return None


def in_order(pipelines: Sequence[Pipeline]) -> list[Pipeline]:
    """The pipelines in this order, but each behind the maker of its source. ``Conflict`` if they
    form a circle.
    """
    left = list(pipelines)
    done: list[Pipeline] = []
    while left:
        ready = [one for one in left if maker_of(one.source, left) in (None, one)]
        if not ready:
            names = ", ".join(one.name for one in left)
            raise Conflict(f"pipelines are made of one another: {names}", name=names)
        done.append(ready[0])
        left.remove(ready[0])
    return done


def _modules() -> list[str]:
    """The modules that declare the pipelines of this package."""
    from trunkline.spark.pipelines import application, builtin

    return [
        f"{package.__name__}.{found.name}"
        for package in (builtin, application)
        for found in pkgutil.iter_modules(package.__path__)
    ]


def find(names: list[str], extra: tuple[str, ...] = ()) -> list[Pipeline]:
    """The pipelines of these names, all of them without one. The maker of a source comes along."""
    known = all_pipelines(extra)
    for name in names:
        if name == "replay" and name not in known:
            raise NotFound("replay has a command of its own", hint="trunkline pipeline replay")
        if name not in known:
            raise NotFound(f"there is no pipeline {name}", hint=f"known: {', '.join(known)}")
    if not names:
        return list(known.values())
    wanted = [known[name] for name in names]
    for one in wanted:
        maker = maker_of(one.source, list(known.values()))
        if maker is not None and maker not in wanted:
            wanted.append(maker)
    return in_order(wanted)
