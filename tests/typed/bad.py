"""An application that is wrong: each line marked ``error`` is refused by both checkers."""

from __future__ import annotations

import msgspec

import trunkline
from trunkline import Delivery, Event, GroupOptions
from trunkline.patterns.outbox import AsyncSqlOutbox
from trunkline.patterns.tasks import TaskQueue


class Order(msgspec.Struct):
    id: int


bus = trunkline.connect("file:.bus")
trunkline.connect("file:.bus", durabilty="os")  # error: no such option
trunkline.connect("file:.bus", on_full="explode")  # error: not a choice
trunkline.connect("ws://127.0.0.1", patience="5")  # error: no such option
trunkline.open("file:.bus", durabilty="os")  # error: no such option
bus.on("orders", group="billing", wrokers=4)  # error: no such option
bus.on("orders", group="billing", on_conflict="replace")  # error: not a choice
bus.subscribe("orders", group="billing", policy={"max_retries": 3})  # error: not GroupOptions
bus.subscribe("orders")  # error: no group


async def three(event: Event, delivery: Delivery, more: int) -> None: ...


async def swapped(delivery: Delivery, event: Event) -> None: ...


async def of_nothing() -> None: ...


async def no_delivery(order: Order, event: Event) -> None: ...


async def wrong_field(event: Event[Order]) -> None:
    print(event.payload.idd)  # error: an order has no such field


bus.on("orders", group="billing")(three)  # error: three arguments
bus.on("orders", group="billing")(swapped)  # error: the event comes first
bus.on("orders", group="billing")(of_nothing)  # error: no argument
bus.on("orders", group="billing")(no_delivery)  # error: the second argument is the delivery
bus.on("orders", group="billing")(5)  # error: not a function


queue = TaskQueue(bus, "mails")


@queue.task
async def send(order: Order, copies: int = 1) -> int:
    return copies


bus.every("5m", mised="all")  # error: no such option
bus.every("5m", missed="some")  # error: not a choice
bus.every("5m")(three)  # error: three arguments
bus.on("orders", group="billing", timeout="5")  # error: no such option
bus.on("orders", group="billing", timeout_s="5")  # error: not a number
GroupOptions.patient(max_retrys=5)  # error: no such option


async def tasks() -> None:
    await send.delay(1)  # error: not an order
    await send.delay(Order(1), copy=2)  # error: no such argument
    send.options(delay=5)  # error: no such option
    await AsyncSqlOutbox(None).add(None, "orders", 1, dealy_s=5)  # error: no such field


async def main() -> None:
    await bus.publish("orders", 1, dealy_s=1)  # error: no such field
    paid: Event[Order] = Event(topic="orders", payload=5)  # error: not an order
    await bus.publish(paid)
    await bus.publish("orders", 1, priority="urgent")  # error: not a choice
    await bus.publish("orders", 1, headers={"a": 1})  # error: headers are text
    await bus.publish_many("orders", [1], dealy_s=1)  # error: no such field
    bus.fire("orders", 1, dealy_s=1)  # error: no such field
    await bus.define("o", partions=2)  # error: no such option
    await bus.edit("orders", "billing", max_retrys=5)  # error: no such option
    await bus.seek("orders", "billing", 1.5)  # error: neither an offset nor a time
    stream = bus.subscribe("orders", group="billing")
    stream.batches(500, wait=1)  # error: no such option
    stream.batches("500")  # error: not a number
    print(bus.store)  # error: a bus need not have a store
