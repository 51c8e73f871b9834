"""Pipelines: each a pure ``transform`` of a DataFrame and a declaration of where it leads.

One file holds one pipeline. A pipeline of your own is a function with the same decorator; name its
module with ``trunkline pipeline run --load my_pipelines`` and it stands beside the others.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from trunkline.errors import Conflict, NotFound

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Kind = Literal["table", "stream"]
Source = Literal["records", "groups", "segments"]
Transform = Callable[..., "DataFrame"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """``kind`` says what becomes of the rows: a ``table`` of the lake that each run replaces, a
    ``stream`` into a table that only grows. Rows with a ``reason`` go to the table ``refused``
    instead, if that is named; ``to_topic`` publishes the rows back as well.
    """

    name: str
    about: str
    transform: Transform
    kind: Kind = "table"
    source: Source = "records"
    topics: str = ">"
    columns: str = ""
    refused: str = ""
    to_topic: str = ""
    to_type: str = ""
    chart: tuple[str, str] | None = None  # what the report draws: a label and a number


_known: dict[str, Pipeline] = {}


def pipeline(name: str, *, about: str, **declared: Any) -> Callable[[Transform], Transform]:
    """Make a function that turns one DataFrame into another a pipeline."""

    def add(transform: Transform) -> Transform:
        have = _known.get(name)
        if have is not None and have.transform.__module__ != transform.__module__:
            raise Conflict(f"there are two pipelines {name}", name=name)
        _known[name] = Pipeline(name=name, about=about, transform=transform, **declared)
        return transform

    return add


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
        if name not in known:
            raise NotFound(f"there is no pipeline {name}", hint=f"known: {', '.join(known)}")
    return [known[name] for name in names] if names else list(known.values())
