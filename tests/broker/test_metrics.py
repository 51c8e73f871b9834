"""``GET /metrics``, and the table of ``docs/broker.md`` that names what it gives."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from trunkline.broker.server import Broker

from .client import Peer, until

PAGE = (Path(__file__).parents[2] / "docs" / "broker.md").read_text("utf-8")


async def samples(broker: Broker) -> list[tuple[str, dict[str, str], float]]:
    async with httpx.AsyncClient(trust_env=False) as http:
        text = (await http.get(broker.url.replace("ws", "http", 1) + "/metrics")).text
    return [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]


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
    given = {name: ", ".join(labels) for name, labels, _ in await samples(broker)}
    table = re.findall(r"^\| `((?:trunkline|events)_\w+)` \| ([^|]*?) ?\|", PAGE, re.M)
    assert dict(table) == given


async def test_a_lag_is_that_of_a_consumer(broker: Broker, one: Peer) -> None:
    await one_dead_letter(broker, one)
    lags = [labels for name, labels, _ in await samples(broker) if name.endswith("_lag_records")]
    assert lags == [{"topic": "t", "partition": "0", "group": "g"}]
