"""Pipelines: each a pure ``transform`` of a DataFrame and a declaration of where it leads.

One file holds one pipeline. A pipeline of your own is a function with the same decorator; name its
module with ``trunkline pipeline run --load my_pipelines`` and it stands beside the others.

A ``transform(df)`` is done to the stream itself: its rows are added to the table, or take the place
of those with the same ``keys``. A ``transform(df, table)`` is done batch by batch, with what the
table holds so far, and what it returns is the table from then on (``sink="replace"``).
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from trunkline.errors import Conflict, InvalidOption, NotFound

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Kind = Literal["table", "stream"]
Source = Literal["records", "groups", "segments"]
Sink = Literal["add", "upsert", "replace"]
ACTOR = "pipeline."  # what pipelines publish says so, and pipelines do not read it


@dataclass(frozen=True, slots=True)
class Made:
    """What a batch becomes. ``beside`` are rows for other tables, ``events`` go back to the bus:
    topic, type, key and value, and any other column of the sink. ``held`` is what several of them
    are made of: it was persisted, and is let go when the batch is done.
    """

    table: DataFrame
    beside: dict[str, DataFrame] = field(default_factory=dict)
    events: DataFrame | None = None
    held: tuple[DataFrame, ...] = ()


Transform = Callable[..., "DataFrame | Made"]
T = TypeVar("T", bound=Transform)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """``source`` and ``topics`` say what is read, ``sink`` what becomes of the rows: ``add`` them
    to the table, ``upsert`` by ``keys``, or ``replace`` the rows that ``live`` marks (all of them
    unless it names a column).

    ``stream`` is done to the stream before it is cut into batches: joins and windows, which keep
    their state in Spark for as long as the ``watermark`` says.
    """

    name: str
    about: str
    transform: Transform
    kind: Kind = "table"
    source: Source = "records"
    topics: str = ">"
    columns: str = ""
    echoes: bool = False  # whether it reads what pipelines published
    stream: Callable[[DataFrame], DataFrame] | None = None
    watermark: str = ""
    sink: Sink = "add"
    keys: tuple[str, ...] = ()
    live: str = ""
    table: str = ""
    refused: str = ""  # the table beside it of what it set aside
    by: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    to_topic: str = ""
    to_type: str = ""
    chart: tuple[str, str] | None = None  # what the report draws: a label and a number

    @property
    def into(self) -> str:
        """The table it makes."""
        return self.table or self.name

    @property
    def asks(self) -> frozenset[str]:
        """What its transform wants to know besides the rows: ``table``, ``bus``."""
        return frozenset(inspect.signature(self.transform).parameters) & {"table", "bus"}


_known: dict[str, Pipeline] = {}


def pipeline(name: str, *, about: str, **declared: Any) -> Callable[[T], T]:
    """Make a function that turns one DataFrame into another a pipeline."""

    def add(transform: T) -> T:
        have = _known.get(name)
        if have is not None and have.transform.__module__ != transform.__module__:
            raise Conflict(f"there are two pipelines {name}", name=name)
        if declared.get("keys"):
            declared.setdefault("sink", "upsert")
        made = Pipeline(name=name, about=about, transform=transform, **declared)
        if made.source == "records" and (made.sink == "replace") > ("table" in made.asks):
            raise InvalidOption(
                f"pipeline {name} replaces its table without having seen it",
                hint="let its transform take df and table",
            )
        _known[name] = made
        return transform

    return add


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
    """Those of this package and of the modules ``extra``, in the order they are best run."""
    for found in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{found.name}")
    for module in extra:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise NotFound(f"cannot load pipelines: {error}", hint="is it on PYTHONPATH?") from None
    first = {name: at for at, name in enumerate(("lake", "clean", "verify"))}
    return dict(sorted(_known.items(), key=lambda item: (first.get(item[0], 9), item[0])))


def find(names: list[str], extra: tuple[str, ...] = ()) -> list[Pipeline]:
    known = all_pipelines(extra)
    for name in names:
        if name == "replay" and name not in known:
            raise NotFound("replay has a command of its own", hint="trunkline pipeline replay")
        if name not in known:
            raise NotFound(f"there is no pipeline {name}", hint=f"known: {', '.join(known)}")
    return [known[name] for name in names] if names else list(known.values())
