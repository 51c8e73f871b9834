"""Names in the database. A topic has no ":" and no "/", and "0" comes before ":"."""

from __future__ import annotations

from typing import Final, NamedTuple

from trunkline.names import GroupKey

LOG: Final = "log"
EVENTS: Final = "events"
COUNTERS: Final = "counters"
CONFIGS: Final = "topic_configs"
GROUPS: Final = "group_offsets"
MEMBERS: Final = "members"
ABOUT: Final = "about"
ALL: Final = frozenset({LOG, EVENTS, COUNTERS, CONFIGS, GROUPS, MEMBERS, ABOUT})


class LogPlace(NamedTuple):
    """One partition of one incarnation of a topic: a topic that is made anew has a new one, so
    what was left of the old one is never read.
    """

    topic: str
    partition: int
    incarnation: str

    @property
    def prefix(self) -> str:
        return f"{self.topic}:{self.incarnation}:{self.partition}"

    def batch(self, offset: int) -> str:
        """The ``_id`` of the batch that begins at ``offset``."""
        return f"{self.prefix}/{offset:016d}"

    def since(self, start: int = 0) -> dict[str, str]:
        """The batches that begin at ``start`` or later."""
        return {"$gte": self.batch(start), "$lt": f"{self.prefix}/:"}

    def until(self, offset: int) -> dict[str, str]:
        """The batches that begin at ``offset`` or before."""
        return {"$gte": self.batch(0), "$lte": self.batch(offset)}

    @property
    def counter(self) -> str:
        return f"{self.topic}:{self.partition}"


def of_topic(topic: str, incarnation: str) -> dict[str, str]:
    """The batches of every partition of one incarnation."""
    return {"$gte": f"{topic}:{incarnation}:", "$lt": f"{topic}:{incarnation};"}


def group_id(key: GroupKey) -> str:
    return f"{key.topic}:{key.partition}:{key.group}"


def group_key(name: str) -> GroupKey:
    topic, number, group = name.split(":", 2)
    return GroupKey(topic, int(number), group)
