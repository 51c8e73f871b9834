"""What a topic's configuration says beyond the options of its log: how often a record is tried, and
which agents may use the topic. Kept on the bus itself, on ``system.topics``; the last record of a
topic counts.
"""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from trunkline.buses.local import LocalBus
from trunkline.event import Event
from trunkline.options import GroupOptions
from trunkline.topics import is_pattern, matches

TOPIC = "system.topics"


class Config(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """``max_attempts`` counts the first try too. A list of agents, where there is one, is needed
    in addition to a token's own rights; a name with ``!`` before it is refused.
    """

    topic: str
    max_attempts: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    ack_timeout_ms: Annotated[int, Meta(ge=1, le=10**12)] | None = None
    publish_acl: list[str] | None = msgspec.field(default=None, name="publishACL")
    subscribe_acl: list[str] | None = msgspec.field(default=None, name="subscribeACL")


class Configs:
    def __init__(self, bus: LocalBus) -> None:
        self._bus = bus
        self._next = 1
        self._known: dict[str, Config] = {}

    async def refresh(self) -> bool:
        first, end = await self._bus.store.bounds(TOPIC, 0)
        if not first <= self._next <= end:  # trimmed, or made anew
            self._next = first
        changed = False
        while self._next < end:
            for record in await self._bus.read(TOPIC, self._next):
                self._next = record.offset + 1
                changed = True
                with contextlib.suppress(msgspec.ValidationError):
                    config = msgspec.convert(record.event.payload, Config)
                    self._known[config.topic] = config
        return changed

    async def set(self, config: Config) -> None:
        if config == self._known.get(config.topic, Config(config.topic)):
            return
        if TOPIC not in await self._bus.topics():
            await self._bus.define(TOPIC, compact=True)
        payload = msgspec.to_builtins(config)
        await self._bus.publish(Event(topic=TOPIC, key=config.topic, type="topic", payload=payload))
        await self.refresh()

    def get(self, topic: str) -> Config:
        return self._known.get(topic) or Config(topic)

    def may(self, agent: str, action: str, topic: str) -> bool:
        if is_pattern(topic):
            found = [config for config in self._known.values() if matches(topic, config.topic)]
        else:
            found = [self.get(topic)]
        return all(_lists(config, agent, action) for config in found)

    def policy(self, topic: str, ack_timeout_s: float | None) -> GroupOptions:
        """The policy of a group that is made without one."""
        config = self.get(topic)
        values: dict[str, Any] = {}
        if config.ack_timeout_ms is not None:
            values["ack_timeout_s"] = config.ack_timeout_ms / 1000
        elif ack_timeout_s is not None:
            values["ack_timeout_s"] = ack_timeout_s
        if config.max_attempts is not None:
            values["max_retries"] = config.max_attempts - 1
        return GroupOptions(**values)


def _lists(config: Config, agent: str, action: str) -> bool:
    listed = config.publish_acl if action == "publish" else config.subscribe_acl
    if listed is None or action not in ("publish", "subscribe", "read"):
        return True
    return f"!{agent}" not in listed and (agent in listed or "*" in listed)
