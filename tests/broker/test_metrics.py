"""``GET /metrics``, and the table of ``docs/broker.md`` that names what it gives."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from trunkline.broker.server import Broker
from trunkline.middleware.metrics import Metrics
from trunkline.patterns.audit import METRICS, Counts
from trunkline.patterns.measures import measure

from .client import Peer, until

PAGE = (Path(__file__).parents[2] / "docs" / "broker.md").read_text("utf-8")
TABLE = dict(re.findall(r"^\| `((?:trunkline|events)_\w+)` \| ([^|]*?) ?\|", PAGE, re.M))


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return {"url": f"file:{tmp_path / 'bus'}", "metrics_s": 0.05}


async def families(broker: Broker) -> list[Any]:
    async with httpx.AsyncClient(trust_env=False) as http:
        text = (await http.get(broker.url.replace("ws", "http", 1) + "/metrics")).text
    return list(text_string_to_metric_families(text))


def names(found: list[Any]) -> dict[str, str]:
    """Each metric with its labels; a histogram by its own name."""
    given = {}
    for family in found:
        for sample in family.samples:
            name = family.name if family.type == "histogram" else sample.name
            given[name] = ", ".join(sorted(label for label in sample.labels if label != "le"))
    return given


async def one_dead_letter(broker: Broker, one: Peer) -> None:
    await one.ask("PUBLISH", topic="t", payload=1)
    await one.subscribe("t", "g")
    await one.nack(await one.hear("MESSAGE"), dead=True)
    desk = broker.hub.bus.dead_letters("t")

    async def is_written() -> bool:
        return [letter.offset async for letter in desk.letters()] == [1]

    await until(is_written)


async def test_the_docs_name_every_metric_and_its_labels(broker: Broker, one: Peer) -> None:
    await one_dead_letter(broker, one)
    given = names(await families(broker))
    process = {name: given.pop(name) for name in list(given) if name.startswith("process_")}
    assert given == TABLE
    assert {"process_open_fds", "process_resident_memory_bytes"} <= process.keys()


async def test_every_help_text_explains(broker: Broker, one: Peer) -> None:
    await one_dead_letter(broker, one)
    for family in await families(broker):
        words = family.documentation.split()
        assert len(words) >= 4, family.name
        assert "_".join(words).lower() not in family.name


async def test_every_door_has_the_same_names(broker: Broker, one: Peer) -> None:
    await one_dead_letter(broker, one)
    stored = {family.name for family in await measure(broker.hub.bus, audit=False)}
    assert stored <= TABLE.keys()
    registry = CollectorRegistry()
    Metrics(registry)
    handled = {family.name for family in registry.collect()}
    ours = {name for name in handled if name.startswith("trunkline_")}
    assert {name.removesuffix("_total") for name in TABLE} >= ours

    async def told() -> Any:
        return [one.event.payload for one in await broker.hub.bus.read(METRICS)]

    (row, *_) = await until(told)
    assert row["metrics"].keys() <= TABLE.keys()
    assert row["metrics"]["trunkline_connected_total"] == 1


async def test_durations_bytes_and_outcomes_are_counted(broker: Broker, one: Peer) -> None:
    await one_dead_letter(broker, one)
    values = {
        (sample.name, sample.labels.get("outcome")): sample.value
        for family in await families(broker)
        for sample in family.samples
        if sample.labels.get("topic") in (None, "t")
    }
    assert values["trunkline_publish_duration_seconds_count", None] == 1
    assert values["trunkline_fsync_duration_seconds_count", None] >= 1
    assert values["trunkline_process_duration_seconds_count", None] == 1
    assert values["trunkline_settled_total", "term"] == 1
    assert values["trunkline_open_letters", None] == 1
    assert values["trunkline_published_bytes_total", None] > 0
    assert values["trunkline_stored_bytes", None] > 0
    assert values["trunkline_free_bytes", None] > 0


def test_series_beyond_a_bound_are_counted_and_not_kept() -> None:
    counts = Counts()
    for number in range(1005):
        counts.published(f"t{number}", 1, 0.1)
        counts.finished("t", f"g{number}", "ack", [0.1])
    assert (len(counts.publish_s), len(counts.settled)) == (1000, 1000)
    assert (counts.acked, len(counts.dropped)) == (1005, 10)


async def test_a_lag_is_that_of_a_consumer(broker: Broker, one: Peer) -> None:
    await one_dead_letter(broker, one)
    lags = [
        sample.labels
        for family in await families(broker)
        for sample in family.samples
        if sample.name.endswith("_lag_records")
    ]
    assert lags == [{"topic": "t", "partition": "0", "group": "g"}]
