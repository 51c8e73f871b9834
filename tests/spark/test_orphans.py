"""Runs that are killed leave no file behind that no table names, and no table half written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

from trunkline.spark.lake import Lake
from trunkline.spark.lake.storage import Storage
from trunkline.spark.pipelines import find
from trunkline.spark.pipelines.run import Runner

from .world import FLIGHTS, make_world

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Killed(BaseException):
    """The process ends here: no handler of errors runs."""


def orphans(lake: Lake) -> set[str]:
    """Files of rows that no commit of any table names."""
    found = {path.name for path in Path(lake.path).rglob("part-*.parquet")}
    logs = "".join(path.read_text() for path in Path(lake.path).rglob("_delta_log/*.json"))
    return {name for name in found if name not in logs}


def kill_at(patch: pytest.MonkeyPatch, number: int) -> None:
    """The process dies at the ``number``-th step that writes to the lake: behind an even one,
    before an odd one.
    """
    steps = 0

    def dying(real: Any) -> Any:
        def call(self: Any, *args: Any, **options: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps == number and number % 2:
                raise Killed
            made = real(self, *args, **options)
            if steps == number:
                raise Killed
            return made

        return call

    for name in ("stage", "commit"):
        patch.setattr(Lake, name, dying(getattr(Lake, name)))
    patch.setattr(Storage, "copy", dying(Storage.copy))


def killed(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str],
    kills: tuple[int, ...], kills_of_rebuild: tuple[int, ...],
) -> None:  # fmt: skip
    """Kill a run at each of some steps, then a rebuild; in the end all is as it should be."""
    root = make_world(tmp_path / "bus", 600)
    lake = Lake(str(tmp_path / "lake"))
    died = 0
    for rebuild, steps in ((False, kills), (True, kills_of_rebuild)):
        for number in steps:
            with monkeypatch.context() as patch:
                kill_at(patch, number)
                try:
                    Runner(spark, root, lake).run(find(names), rebuild=rebuild)
                except Killed:
                    died += 1
        results = Runner(spark, root, lake).run(find(names))
        assert [one.error for one in results if one.error] == []
        assert orphans(lake) == set()
        passed, refused = lake.read(spark, "clean"), lake.read(spark, "quarantine")
        assert passed.count() + refused.where("pipeline = 'clean'").count() == 600
        typed = lake.read(spark, f"clean.{FLIGHTS[0]}").count()
        assert typed == passed.where(f"topic = '{FLIGHTS[0]}'").count()
    assert died >= (len(kills) + len(kills_of_rebuild)) // 2
    assert not list((tmp_path / "lake").glob("_rebuild/*"))


def test_killed_runs_and_rebuilds_leave_no_file_behind(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(spark, tmp_path, monkeypatch, ["clean"], (2, 6), (10,))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_step_of_a_run_leaves_a_file_behind(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["clean", "traffic", "lag"]
    killed(spark, tmp_path, monkeypatch, names, tuple(range(1, 15)), tuple(range(1, 25)))
