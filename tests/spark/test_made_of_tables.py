"""What a table that is made of another tells the bus: each row once, whatever became of the files
that its source keeps the rows in.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

from trunkline.spark.lake import Lake
from trunkline.spark.lake.erase import erase_rows
from trunkline.spark.lake.optimize import optimize
from trunkline.spark.pipelines import all_pipelines, expect, find, table
from trunkline.spark.pipelines import declare as registry
from trunkline.spark.pipelines.run import Runner

from .logs import TOPIC, make_event, read_log
from .test_tables import fill, results

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TOLD = "told"


class Died(Exception):
    """As if the process had been killed here."""


@pytest.fixture(autouse=True)
def own() -> Iterator[None]:
    before = dict(all_pipelines())

    @table(
        "mine",
        source="clean",
        to_topic=TOLD,
        to_type=TOLD,
        expect=[expect("odd", "n <> 3", on_fail="drop")],
    )
    def mine(df: DataFrame) -> DataFrame:
        n = "CAST(get_json_object(value, '$.n') AS INT) AS n"
        return df.where(f"topic = '{TOPIC}'").selectExpr("id", "space", "timestamp", n)

    @table("totals", source="clean", keys=("key",), to_topic=TOLD, to_type="total")
    def totals(df: DataFrame) -> DataFrame:
        return df.where(f"topic = '{TOPIC}'").groupBy("key").count()

    yield
    registry._known.clear()
    registry._known.update(before)


class World:
    def __init__(self, spark: SparkSession, path: Path) -> None:
        self.path, self.spark = path, spark
        self.root = str(path / "bus")
        self.lake = Lake(str(path / "lake"))

    def publish(self, *numbers: int) -> None:
        fill(self.path / "bus", *(event(n) for n in numbers))

    def run(self, *names: str, **options: Any) -> None:
        known = all_pipelines()
        wanted = [known[name] for name in names]
        results(Runner(self.spark, self.root, self.lake).run(wanted, **options))

    def die_in_a_batch(self, patch: pytest.MonkeyPatch) -> None:
        """After it published and before it commits."""
        commit = Lake.commit

        def die(lake: Lake, staged: Any, **options: Any) -> list[str]:
            if staged.table == "mine":
                raise Died
            return commit(lake, staged, **options)

        with patch.context() as here:
            here.setattr(Lake, "commit", die)
            (ran,) = Runner(self.spark, self.root, self.lake).run([all_pipelines()["mine"]])
        assert ran.error

    def rows(self) -> list[int]:
        return sorted(row.n for row in self.lake.read(self.spark, "mine").collect())

    def told(self) -> list[int]:
        found = [record.event for record in read_log(self.root, TOLD)]
        return sorted(event.payload["n"] for event in found if event.type == TOLD)


def event(number: int) -> Any:
    space = "home" if number % 2 else "work"
    return make_event(number, type="t", key=f"k{number % 2}", space=space, payload={"n": number})


@pytest.fixture
def world(spark: SparkSession, tmp_path: Path) -> World:
    return World(spark, tmp_path)


def test_rows_are_told_once_when_the_files_of_the_source_are_merged(world: World) -> None:
    world.publish(0, 1)
    world.run("clean", "mine")
    world.publish(2, 3)
    world.run("clean")
    world.publish(4)
    world.run("clean")

    assert optimize(world.lake, "clean", many=2) > 2, "new files are merged with old ones"
    world.run("clean", "mine")

    assert world.rows() == world.told() == [0, 1, 2, 4], "a rule refused 3"


def test_rows_are_told_once_when_merged_files_are_gone(world: World) -> None:
    world.publish(0, 1)
    world.run("clean", "mine")
    world.publish(1, 2)
    world.run("clean")
    optimize(world.lake, "clean", many=2)
    world.lake._table("clean").vacuum(0, dry_run=False, enforce_retention_duration=False)

    world.run("mine")

    assert world.rows() == world.told() == [0, 1, 2]


def test_a_first_batch_that_died_does_not_take_what_came_since_twice(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.publish(0, 1)
    world.run("clean")
    world.die_in_a_batch(monkeypatch)
    world.publish(2)
    world.run("clean")
    optimize(world.lake, "clean", many=2)

    world.run("mine")
    world.run("mine")

    assert world.rows() == world.told() == [0, 1, 2]


def test_a_batch_that_died_does_not_bring_back_what_was_erased_since(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.publish(0, 1)
    world.run("clean")
    world.die_in_a_batch(monkeypatch)
    erase_rows(world.lake.path, "home")

    world.run("mine")

    assert world.rows() == [0]


def test_rows_are_told_once_when_others_are_erased_from_the_source(world: World) -> None:
    world.publish(0, 1, 2)
    world.run("clean", "mine")
    erase_rows(world.lake.path, "home")
    world.publish(4)

    world.run("clean", "mine")

    assert world.rows() == [0, 2, 4]
    assert world.told() == [0, 1, 2, 4]


@pytest.mark.parametrize("name", ["clean", "mine"])
def test_rows_are_told_once_when_a_table_is_made_anew(world: World, name: str) -> None:
    world.publish(0, 1)
    world.run("clean", "mine")

    world.run(name, rebuild=True)
    world.publish(2)
    world.run("clean", "mine")

    assert world.rows() == world.told() == [0, 1, 2]


def test_only_the_counts_that_changed_are_told(world: World) -> None:
    world.publish(0, 1)
    world.run("clean", "totals")
    world.publish(2)
    world.run("clean", "totals")
    optimize(world.lake, "clean", many=2)

    world.run("clean", "totals")

    found = [(r.event.key, r.event.payload["count"]) for r in read_log(world.root, TOLD)]
    assert sorted(found) == [("k0", 1), ("k0", 2), ("k1", 1)]


def test_a_report_that_did_not_change_is_not_told_again(world: World) -> None:
    decided = make_event(0, topic="actions", type="ACTION_DECISION", payload={"action": "mail"})
    fill(world.path / "bus", decided)
    job = Runner(world.spark, world.root, world.lake, publish=True)
    wanted = find(["learning"])

    first = results(job.run(wanted))
    again = results(job.run(wanted))  # clean takes what learning published

    assert (first["learning"].published, again["learning"].published) == (1, 0)
    assert again["clean"].events == 1
