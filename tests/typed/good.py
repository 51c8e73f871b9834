"""An application that is right: both checkers accept every line in strict mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, assert_type

import msgspec

import trunkline
from trunkline import Bus, Delivery, DeliveryBatch, Event, GroupInfo, GroupOptions, Receipt
from trunkline.patterns.outbox import AsyncSqlOutbox
from trunkline.patterns.schedule import Tick
from trunkline.patterns.tasks import TaskQueue, Ticket

bus = trunkline.connect("file:.bus", on_full="wait", drain_timeout_s=1.0)
assert_type(bus, Bus)
outbox = AsyncSqlOutbox(None)
assert_type(trunkline.connect("ws://127.0.0.1:7070", token="t", patience_s=5), Bus)


@bus.on("orders", group="billing", workers=4, policy=GroupOptions(max_retries=3))
async def bill(event: Event) -> None:
    print(event.payload, event.key)


@bus.on("orders", group="shipping", on_conflict="update", where="type = 'placed'")
async def ship(event: Event, delivery: Delivery) -> None:
    assert_type(await delivery.ack(), bool)


@bus.on("orders", group="books")
def book(event: Event) -> dict[str, Any]:
    return {"id": event.id}


class Order(msgspec.Struct):
    id: int


@dataclass
class Address:
    street: str


@bus.on("orders", group="typed")
async def pay(order: Order) -> None:
    assert_type(order.id, int)


@bus.on("orders", group="typed-event")
async def pay_event(event: Event[Order]) -> None:
    assert_type(event.payload, Order)


@bus.on("orders", group="typed-delivery")
async def pay_delivery(delivery: Delivery[Order]) -> None:
    assert_type(delivery.event, Event[Order])
    assert_type(delivery.payload.id, int)


@bus.on("orders", group="typed-both")
def pay_both(address: Address, delivery: Delivery) -> None:
    assert_type(address.street, str)
    delivery.extend()


async def main() -> None:
    await bus.publish("orders", Order(1), key="c42")
    await bus.publish_many("orders", [Order(1), Order(2)])
    assert_type(Event(topic="orders", payload=Order(1)), Event[Order])
    async with bus:
        receipt = await bus.publish("orders", {"id": 1}, key="c42", delay_s=3, priority="high")
        assert_type(receipt, Receipt)
        await bus.publish(Event(topic="orders", payload=1))
        assert_type(await bus.publish_many("orders", [1, 2], ttl_s=5), list[Receipt])
        await bus.fire("orders", 1, headers={"a": "b"})
        await bus.define("orders", partitions=2, retention_age_s=60)
        assert_type(await bus.groups(), list[GroupInfo])
        assert_type(await bus.lag("orders", "billing"), int)
        await bus.edit("orders", "billing", max_retries=5, ordering="none")
        await bus.seek("orders", "billing", "earliest")
        await bus.pause("orders", "billing")
        await bus.resume("orders", "billing")
        async with bus.subscribe("orders", group="billing", max_inflight=10) as deliveries:
            async for delivery in deliveries:
                assert_type(delivery, Delivery)
                await delivery.nack(delay_s=1)
            async for batch in deliveries.batches(500, wait_s=0.5):
                assert_type(batch, DeliveryBatch)
                assert_type(await batch[0].term("broken"), bool)
                assert_type(await batch.ack(), int)
        async for letter in bus.dead_letters("orders").letters(group="billing"):
            print(letter.offset, letter.error)
        assert_type(await bus.drain(1.0), bool)
        assert_type((await bus.health())["ok"], bool)


queue = TaskQueue(bus, "mails")


@queue.task
async def send(order: Order, copies: int = 1) -> int:
    return copies


@bus.every("5m")
async def clean_up() -> None: ...


@bus.every("0 3 * * *", tz="Europe/Berlin", missed="all")
def report(tick: Tick) -> None:
    print(tick.due)


async def tasks(session: object) -> None:
    assert_type(await send(Order(1)), int)
    assert_type(await send.delay(Order(1), copies=2), Ticket)
    await send.options(delay_s=5, result=True).delay(Order(1))
    await outbox.add(session, "orders", Order(1), delay_s=5, key="c42")
    await bus.subscribe("orders", group="g", policy=GroupOptions.patient(max_retries=20)).close()


def script() -> None:
    with trunkline.open("file:.bus", create=False) as here:
        here.publish("orders", 1, key="c42")
        here.edit("orders", "billing", max_retries=5)
