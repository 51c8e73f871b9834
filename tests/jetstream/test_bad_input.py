"""What is wrong from the beginning is told in one line, and nothing is changed."""

from __future__ import annotations

from typing import Any

import pytest

import trunkline
from trunkline.bus.nats import NatsBus
from trunkline.errors import InvalidEvent, InvalidOption, TrunklineError, UnsupportedFormat

pytestmark = pytest.mark.timeout(60)


async def refused(url: str, kind: type[TrunklineError], **options: Any) -> TrunklineError:
    """The error of the first publish. It is one line."""
    with pytest.raises(kind) as caught:
        async with trunkline.connect(url, **options) as bus:
            await bus.publish("orders", 1)
    error = caught.value
    assert "\n" not in str(error)
    assert len(str(error)) < 400
    return error


@pytest.mark.parametrize(
    "url", ["nats://", "nats://host:port", "nats://host:99999999", "nats://host/a b", "nats:host"]
)
async def test_a_url_that_is_none(url: str) -> None:
    await refused(url, InvalidOption)


async def test_an_option_that_is_of_another_bus(url: str) -> None:
    await refused(url, InvalidOption, lock_timeout_s=1.0)
    await refused(url, InvalidOption, patience_s=-1)


async def test_a_bus_that_a_later_version_wrote(url: str) -> None:
    async with NatsBus(url) as bus:
        await bus.publish("orders", 1)
        link = bus.link
        name = link.place.note("topics")
        await link.ask(name, b'{"format":99,"topics":{}}')
        before = (await bus.read("orders", 1, 10))[-1].offset
    error = await refused(url, UnsupportedFormat)
    assert "99" in str(error)
    assert before == 1


async def test_a_batch_that_is_too_large(url: str) -> None:
    async with NatsBus(url) as bus:
        with pytest.raises(InvalidEvent, match="1000"):
            await bus.publish_many("orders", list(range(1001)))
        assert await bus.read("orders") == []
