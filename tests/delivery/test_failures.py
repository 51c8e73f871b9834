"""A handler that fails, or takes too long, is visible."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest

import trunkline
from trunkline import GroupOptions, InvalidOption, Letter

QUICK = GroupOptions(max_retries=1, backoff_base_s=0.0)


async def letters_of(handler: Any, url: str = "memory:", **options: Any) -> list[Letter]:
    async with trunkline.connect(url) as bus:
        bus.on("orders", group="billing", policy=QUICK, **options)(handler)
        await bus.publish("orders", {"id": 1})
        assert await bus.drain(20)
        return [one async for one in bus.dead_letters("orders").letters()]


async def bill(event: Any) -> None:
    price(event.payload)


def price(order: dict[str, Any]) -> float:
    return float(order["price"])


async def test_the_last_failure_is_an_error_with_the_number_of_its_letter(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "trunkline")
    await letters_of(bill)
    traced = [one for one in caplog.records if one.exc_info]
    assert [one.levelname for one in traced] == ["DEBUG", "DEBUG", "ERROR"]
    last = traced[-1].getMessage()
    assert last.startswith(
        "gave up orders/0@1 of group billing after 2 attempts: letter 1 of orders"
    )
    assert "KeyError: 'price'" in last
    assert "in price" in caplog.text


async def test_a_letter_keeps_the_end_of_the_traceback() -> None:
    (letter,) = await letters_of(bill)
    assert letter.error == "KeyError: 'price'"
    lines = letter.traceback.splitlines()
    assert "in bill" in lines[0], "the frames of the bus are left out"
    assert lines[-1].strip().strip("~^ ") == "" or "order[" in lines[-1]
    assert "in price" in letter.traceback


async def test_a_traceback_is_bounded() -> None:
    async def deep(event: Any) -> None:
        def down(left: int) -> None:
            if left:
                down(left - 1)
            raise ValueError("ä" * 5000)

        down(60)

    (letter,) = await letters_of(deep)
    assert 200 < len(letter.traceback.encode()) <= 1000
    assert len(letter.error.encode()) <= 1000


async def test_a_rejected_record_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async def reject(event: Any) -> None:
        raise trunkline.Reject("a negative price")

    caplog.set_level(logging.INFO, "trunkline")
    (letter,) = await letters_of(reject)
    assert letter.traceback == ""
    (said,) = [one for one in caplog.records if "gave up" in one.message]
    assert (said.levelname, "letter 1 of orders: a negative price" in said.message) == (
        "INFO",
        True,
    )


async def test_a_handler_that_takes_longer_than_its_limit_fails() -> None:
    async def hang(event: Any) -> None:
        await asyncio.sleep(60)

    (letter,) = await letters_of(hang, timeout_s=0.01)
    assert (letter.error, letter.attempts) == (
        "TimeoutError: the handler took longer than 0.01 s",
        2,
    )
    assert "in hang" in letter.traceback


async def test_a_plain_function_that_hangs_holds_up_nobody() -> None:
    began: list[float] = []

    def hang(event: Any) -> None:
        began.append(time.monotonic())
        time.sleep(0.3)

    (letter,) = await letters_of(hang, timeout_s=0.01)
    assert "took longer than 0.01 s" in letter.error
    assert len(began) == 2


async def test_a_timeout_of_the_handlers_own_is_told_as_its_own() -> None:
    async def own(event: Any) -> None:
        async with asyncio.timeout(0.01):
            await asyncio.sleep(60)

    (letter,) = await letters_of(own, timeout_s=50)
    assert letter.error == "TimeoutError"


async def test_a_limit_is_a_number_of_seconds() -> None:
    bus = trunkline.connect("memory:")
    with pytest.raises(InvalidOption, match="timeout_s"):
        bus.on("orders", group="billing", timeout_s="5")  # type: ignore[arg-type]


@pytest.mark.parametrize("url", ["memory:", "file:{folder}"])
async def test_a_letter_of_a_policy_that_allows_fewer_tries_says_so(
    url: str, tmp_path: Any
) -> None:
    policy = GroupOptions(max_retries=9, backoff_base_s=0.0)
    async with trunkline.connect(url.format(folder=tmp_path)) as bus:
        await bus.publish("orders", {"id": 1})
        async with bus.subscribe("orders", group="billing", policy=policy) as subscription:
            for delay_s in (0.0, 0.0, 0.2):
                await (await anext(subscription)).nack(delay_s, "not yet")
        await bus.edit("orders", "billing", max_retries=1)
        bus.on("orders", group="billing")(bill)
        assert await bus.drain(20)
        found = [one async for one in bus.dead_letters("orders").letters()]
    said = "no try is left: tries that failed: 3, tries that are allowed: 2"
    assert found[0].error == said, "no process ended"
