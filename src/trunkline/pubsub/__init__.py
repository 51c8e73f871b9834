"""Publishers and consumers of bytes by subject: a thin face over any bus.

::

    async with trunkline.connect("nats://127.0.0.1:4222") as bus:      # or memory:, file:.bus
        publisher = Publisher(bus, "TRIGGERS", prefix="TRIGGERS")
        await publisher.publish("db1.users.doc123", b"...")

        consumer = Consumer(bus, "TRIGGERS", "DeliveryWorker", filter="TRIGGERS.>")
        await consumer.run(handle)                                       # until it is cancelled

A stream is a topic, a consumer's name is a group. The subject is the event's ``subject``; filters
have the wildcards of NATS, on every bus. The caller owns the bus and closes it.
"""

from __future__ import annotations

from trunkline.errors import FatalError
from trunkline.pubsub.consumer import Consumer, MessageHandler
from trunkline.pubsub.message import Message, Metadata
from trunkline.pubsub.publisher import Publisher

__all__ = ["Consumer", "FatalError", "Message", "MessageHandler", "Metadata", "Publisher"]
