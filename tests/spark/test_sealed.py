"""Spark reads sealed payloads with the key ring, and without it nobody reads them in the lake."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("joserfc")

import trunkline
from trunkline.crypto.keyring import KeyRing, new_wrapping_key
from trunkline.errors import InvalidOption
from trunkline.guard.vault import Vault
from trunkline.spark.lake import EVENTS, Lake
from trunkline.spark.pipelines import find
from trunkline.spark.pipelines.run import Runner
from trunkline.spark.source.sealed import open_values

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CANARY = "the-canary-sings-at-dawn"


async def fill(url: str, ring: KeyRing) -> None:
    async with trunkline.connect(url) as bus:
        await bus.publish("notes", {"text": "in the open"}, space="home", subject="cleo")
        bus.use(Vault(ring, per="subject"))
        for number in range(10):
            who = ("anna", "ben")[number % 2]
            payload = {"text": f"{CANARY} {number}"}
            await bus.publish("notes", payload, space="home", subject=who)


def test_sealed_payloads_are_opened_with_the_ring_and_stay_sealed_in_the_lake(
    spark: SparkSession, tmp_path: Path
) -> None:
    key = tmp_path / "wrapping.key"
    key.write_text(new_wrapping_key())
    source = f"file:{key}"
    ring = KeyRing(tmp_path / "keys", source, create=True)
    url, lake = f"file:{tmp_path / 'bus'}", Lake(str(tmp_path / "lake"))
    asyncio.run(fill(url, ring))
    ran = Runner(spark, url, lake).run(find(["lake"]))
    assert [one.error for one in ran if one.error] == []
    data = b"".join(p.read_bytes() for p in (tmp_path / "lake").rglob("*") if p.is_file())
    assert CANARY.encode() not in data
    ring.shred("home", "ben")
    log = spark.read.format("trunkline").option("url", url).option("subscribe", "notes").load()
    for rows in (log, lake.read(spark, EVENTS)):
        opened = open_values(rows, ring.path, source).orderBy("offset").collect()
        texts = [row["value"] and json.loads(row["value"])["text"] for row in opened]
        assert texts[0] == "in the open"
        assert texts[1::2] == [f"{CANARY} {number}" for number in range(0, 10, 2)]
        assert texts[2::2] == [None] * 5  # the key of ben is shredded
    with pytest.raises(InvalidOption):
        open_values(log.select("value"), ring.path, source)


def test_the_pipeline_erasure_deletes_what_was_erased_from_tables_and_summaries(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A table of opened payloads: its rows, older files and older commits hold nothing of anna."""
    import deltalake
    import pyarrow as pa

    from trunkline.crypto.note import Signer
    from trunkline.guard.erasure import erase

    key = tmp_path / "wrapping.key"
    key.write_text(new_wrapping_key())
    ring = KeyRing(tmp_path / "keys", f"file:{key}", create=True)
    url, lake = f"file:{tmp_path / 'bus'}", Lake(str(tmp_path / "lake"))
    asyncio.run(fill(url, ring))
    assert not any(one.error for one in Runner(spark, url, lake).run(find(["lake"])))
    summaries = str(tmp_path / "lake" / "summaries")
    for part in (("anna", "ben"), ("anna", "cleo")):
        rows = {
            "space": ["home"] * 2,
            "subject": list(part),
            "text": [f"{x} likes tea" for x in part],
        }
        deltalake.write_deltalake(summaries, pa.table(rows), mode="append")

    async def shred() -> None:
        async with trunkline.connect(url) as bus:
            await erase(bus, ring, Signer.new("example.com/audit"), "home", "anna")

    asyncio.run(shred())
    for _ in range(2):  # the second run has nothing to do
        assert not any(one.error for one in Runner(spark, url, lake).run(find(["erasure"])))
    done = {(r["table"], r["rows"]) for r in lake.read(spark, "erasure").collect()}
    assert done == {("summaries", 2), (EVENTS, 5)}
    left = deltalake.DeltaTable(summaries).to_pyarrow_table().to_pylist()
    assert sorted(row["subject"] for row in left) == ["ben", "cleo"]
    assert {r["subject"] for r in lake.read(spark, EVENTS).collect()} == {"ben", "cleo"}
    for path in (tmp_path / "lake").rglob("*"):
        if path.is_file():
            assert b"anna" not in path.read_bytes(), path
    # The lake goes on: what comes next is added once.
    before = lake.rows(EVENTS)

    async def more() -> None:
        async with trunkline.connect(url) as bus:
            await bus.publish("notes", {"text": "new"}, space="home", subject="cleo")

    asyncio.run(more())
    assert not any(one.error for one in Runner(spark, url, lake).run(find(["lake"])))
    assert lake.rows(EVENTS) >= before + 1
