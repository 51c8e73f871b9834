"""What a topic's configuration says beyond the options of its log: how often a record is tried, and
which agents may use the topic. Kept on the bus itself, on ``system.topics``; the last record of a
topic counts.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from trunkline.access import Principal
from trunkline.bus import Bus
from trunkline.names import is_pattern, matches
from trunkline.options import GroupOptions
from trunkline.patterns.topic_table import TopicTable

TOPIC = "system.topics"

Attempts = Annotated[int, Meta(ge=1, le=1_000_000)]
Milliseconds = Annotated[int, Meta(ge=1, le=10**12)]


class Config(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """``max_attempts`` counts the first try too. A list of agents and scopes, where there is one,
    is needed in addition to a token's own rights; a name with ``!`` before it is refused.
    """

    topic: str
    max_attempts: Attempts | None = None
    ack_timeout_ms: Milliseconds | None = None
    publish_acl: list[str] | None = msgspec.field(default=None, name="publishACL")
    subscribe_acl: list[str] | None = msgspec.field(default=None, name="subscribeACL")
    content_type: str | None = None  # of the topic as a stream; JSON if None


class Configs:
    def __init__(self, bus: Bus) -> None:
        self._table = TopicTable(bus, TOPIC, Config, self._take)
        self._known: dict[str, Config] = {}

    async def refresh(self) -> bool:
        return await self._table.refresh()

    def _take(self, config: Config) -> None:
        self._known[config.topic] = config

    async def set(self, config: Config) -> None:
        if config == self._known.get(config.topic, Config(config.topic)):
            return
        await self._table.put(config.topic, config, type="topic")
        await self.refresh()

    def get(self, topic: str) -> Config:
        return self._known.get(topic) or Config(topic)

    def may(self, who: Principal, action: str, topic: str) -> bool:
        if is_pattern(topic):
            found = [config for config in self._known.values() if matches(topic, config.topic)]
        else:
            found = [self.get(topic)]
        return all(_lists(config, who, action) for config in found)

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


def _lists(config: Config, who: Principal, action: str) -> bool:
    listed = config.publish_acl if action == "publish" else config.subscribe_acl
    if listed is None or action not in ("publish", "subscribe", "read"):
        return True
    names = (who.agent, *who.scopes)
    if any(f"!{name}" in listed for name in names):
        return False
    return "*" in listed or any(name in listed for name in names)
