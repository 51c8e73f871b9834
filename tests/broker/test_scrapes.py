"""What lists and metrics cost where there are many groups, and how true they are."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import thread_time
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from trunkline.broker import listing
from trunkline.broker.exposition import write
from trunkline.broker.group_looks import GroupLooks
from trunkline.broker.server import Broker
from trunkline.broker.snapshot import Gathered, Pace
from trunkline.bus.connect import open_local
from trunkline.clock import SystemClock
from trunkline.errors import Closed
from trunkline.names import GroupKey
from trunkline.options import BrokerOptions, GroupOptions
from trunkline.patterns.measures import Families, measure, to_text

GROUPS = 60
PARTITIONS = 5


async def add_groups(folder: Path) -> None:
    async with open_local(f"file:{folder}") as bus:
        await bus.define("orders", partitions=PARTITIONS)
        for number in range(PARTITIONS * 10):
            await bus.publish("orders", number, key=str(number))
        for partition in range(PARTITIONS):
            for number in range(GROUPS):
                key = GroupKey("orders", partition, f"g{number:02d}")
                await bus.store.change(key, lambda group: group.define(GroupOptions(), 0))


@asynccontextmanager
async def scraped(folder: Path) -> AsyncIterator[tuple[Broker, httpx.AsyncClient]]:
    options = BrokerOptions(url=f"file:{folder}", port=0, metrics_s=0)
    async with Broker(options) as broker, httpx.AsyncClient(base_url=broker.url) as http:
        yield broker, http


async def rows_of(broker: Broker, http: httpx.AsyncClient) -> dict[tuple[str, int], Any]:
    """All pages of groups, as they are now."""
    broker.hub.groups_shown.forget()
    found: dict[tuple[str, int], Any] = {}
    after: str | None = ""
    while after is not None:
        page = (await http.get("/groups", params={"limit": 70, "after": after})).json()
        found |= {(row["group"], row["partition"]): row for row in page["groups"]}
        after = page["next"]
    return found


async def test_a_scrape_leaves_no_file_of_a_group_open(tmp_path: Path) -> None:
    await add_groups(tmp_path)
    async with scraped(tmp_path) as (broker, http):
        await http.get("/topics")
        before = len(os.listdir("/proc/self/fd"))
        assert len(await rows_of(broker, http)) == GROUPS * PARTITIONS
        told = (await http.get("/metrics")).text
        assert told.count("\ntrunkline_group_lag_records{") == GROUPS * PARTITIONS
        assert len(os.listdir("/proc/self/fd")) <= before + 2 * PARTITIONS


async def test_lists_show_what_another_process_did(tmp_path: Path) -> None:
    await add_groups(tmp_path)
    async with scraped(tmp_path) as (broker, http), open_local(f"file:{tmp_path}") as other:
        before = await rows_of(broker, http)
        assert before["g07", 0]["lag"] > 0
        assert await rows_of(broker, http) == before
        await other.seek("orders", "g07", "latest")
        await other.pause("orders", "g08")
        await other.forget("orders", "g09")
        after = await rows_of(broker, http)
        assert {after["g07", number]["lag"] for number in range(PARTITIONS)} == {0}
        assert after["g08", 0]["paused"]
        assert not [one for one in after if one[0] == "g09"]
        assert after["g10", 0] == before["g10", 0]
        at = "g10", (await other.publish("orders", "more", key="k")).partition
        assert (await rows_of(broker, http))[at]["lag"] == before[at]["lag"] + 1


async def test_a_look_tells_what_a_transaction_tells(tmp_path: Path) -> None:
    await add_groups(tmp_path)

    async def go_on() -> None: ...

    async with open_local(f"file:{tmp_path}") as bus:
        looks = GroupLooks(bus)
        assert await looks.all(go_on) == await looks.all(go_on) == await bus.groups()
        async with bus.subscribe("orders", group="g03") as deliveries:
            held = await anext(deliveries)
            assert await looks.all(go_on) == await bus.groups()
            await held.ack()
        assert await looks.all(go_on) == await bus.groups()


async def test_figures_are_the_same_from_every_collector(tmp_path: Path) -> None:
    await add_groups(tmp_path)
    async with open_local(f"file:{tmp_path}") as bus:
        figures = listing.Figures(bus, GroupLooks(bus))
        for _ in range(2):  # the second time from what the first one kept
            told = samples((await figures.text()).decode())
            wanted = samples(to_text(await measure(bus, audit=False)))
            lags = [one for one in told if one[0] == "trunkline_group_lag_records"]
            assert len(lags) == GROUPS * PARTITIONS
            moving = ("_age_seconds", "_free_bytes", "_time_seconds")
            assert {one[:2] for one in wanted} <= {one[:2] for one in told}
            assert not [one for one in wanted - told if not one[0].endswith(moving)]


def samples(text: str) -> set[tuple[str, tuple[tuple[str, str], ...], float]]:
    return {
        (sample.name, tuple(sorted(sample.labels.items())), sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_no_step_of_a_scrape_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest hold of the loop stays a small part of all that is done on it."""
    await add_groups(tmp_path)
    held: list[float] = []
    run = asyncio.events.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        began = thread_time()
        run(handle)
        held.append(thread_time() - began)

    async with scraped(tmp_path) as (broker, http):
        await http.get("/metrics")
        monkeypatch.setattr(asyncio.events.Handle, "_run", timed)
        broker.hub.figures_shown.forget()
        await http.get("/metrics")
        await rows_of(broker, http)
        monkeypatch.undo()
    assert max(held) < 0.2 * sum(held)


async def test_a_group_that_cannot_be_read_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await add_groups(tmp_path)
    journal = next((tmp_path / "offsets").glob("*.journal"))
    for path in (tmp_path / "offsets").glob(journal.stem + ".*"):
        path.write_bytes(b"no group at all")
    async with open_local(f"file:{tmp_path}") as bus:
        rows = await GroupLooks(bus).all(Pace().turn)

    assert len(rows) == GROUPS * PARTITIONS - 1
    assert "left out of lists and metrics" in caplog.text


async def test_an_old_value_is_better_than_a_long_wait() -> None:
    go, told = asyncio.Event(), iter(["first", "second"])

    async def gather() -> str:
        value = next(told)
        if value == "second":
            await go.wait()
        return value

    shown = Gathered(gather, SystemClock(), fresh_s=0, wait_s=0.01)
    assert await shown.get() == "first"
    assert await shown.get() == "first"
    go.set()
    for _ in range(3):
        await asyncio.sleep(0)
    assert shown._value == "second"


async def test_pieces_of_a_family_have_one_heading() -> None:
    found = Families()
    for number in range(100):
        found.add("things", "gauge", "How many", number, of=str(number))

    async def go_on() -> None: ...

    told = (await write(found.all(), go_on)).decode()
    assert told.count("#") == 2
    assert told.count("\nthings{") == 100


async def test_a_reader_of_figures_is_told_that_the_broker_closes() -> None:
    async def gather() -> str:
        await asyncio.Event().wait()
        return "never"

    shown = Gathered(gather, SystemClock())
    reader = asyncio.create_task(shown.get())
    await asyncio.sleep(0)

    await shown.close()

    with pytest.raises(Closed, match="the broker is closing"):
        await reader
