"""How far a pipeline is. Its file in the lake names the batch that was planned last.

A batch is planned, and noted here, before anything of it is written. Its table's commit carries the
number of the plan. So the plan is done if the table has that number, and is done again, with the
same offsets, if not.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

import msgspec

from trunkline.spark.lake import Lake

Position = dict[str, Any]


class Plan(msgspec.Struct, kw_only=True):
    """Batch ``version`` of a pipeline, from ``start`` to ``end``; ``app`` names its commits."""

    app: str
    version: int = -1
    start: Position = {}
    end: Position = {}


class _Stored(msgspec.Struct):
    now: Plan
    rebuilt: Plan | None = None  # counts once the table has its number


@dataclass(frozen=True)
class Progress:
    lake: Lake
    name: str

    @property
    def _path(self) -> str:
        return f"_progress/{self.name}.json"

    def load(self, table: str) -> Plan | None:
        """The last plan; None if the pipeline never ran."""
        stored = self._stored()
        if stored is None:
            return None
        rebuilt = stored.rebuilt
        if rebuilt is not None and self.lake.version(table, rebuilt.app) >= rebuilt.version:
            return rebuilt
        return stored.now

    def rebuilt(self) -> Plan | None:
        """The plan of tables that were made anew and have still to be swapped in."""
        stored = self._stored()
        return stored.rebuilt if stored is not None else None

    def _stored(self) -> _Stored | None:
        data = self.lake.storage.read(self._path)
        return msgspec.json.decode(data, type=_Stored) if data is not None else None

    def save(self, plan: Plan, rebuilt: Plan | None = None) -> None:
        self.lake.storage.replace(self._path, msgspec.json.encode(_Stored(plan, rebuilt)) + b"\n")


def new_app(name: str) -> str:
    return f"{name}:{uuid.uuid4().hex[:12]}"
