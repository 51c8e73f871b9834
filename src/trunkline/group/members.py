"""The members of a group: what each tells of its subscriptions."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from trunkline.names import is_dead, matches


class MemberInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A living subscription of a group. What it has in hand is told every two seconds."""

    topic: str  # as it was subscribed to: it may be a pattern
    group: str
    member: str  # the opening of the bus that leases for it
    pid: int  # of its process; behind a broker the broker's
    host: str
    since: float  # when it began, in epoch seconds
    in_flight: int = 0  # records that are leased and not settled
    last_delivery: float | None = None  # in epoch seconds; None: it was never given a record
    client: str = ""  # behind a broker: the agent and its address

    def reads(self, topic: str) -> bool:
        """Whether it reads a topic. A pattern reads dead letters only if it asks for them."""
        return matches(self.topic, topic) and (not is_dead(topic) or is_dead(self.topic))


def select(
    members: Iterable[MemberInfo], topic: str | None = None, group: str | None = None
) -> list[MemberInfo]:
    """The members of a group, and those that read a topic or have subscribed to that pattern."""
    found = [
        one
        for one in members
        if group in (None, one.group) and (topic is None or topic == one.topic or one.reads(topic))
    ]
    return sorted(found, key=lambda one: (one.topic, one.group, one.since, one.member))


def count(members: Collection[MemberInfo], topic: str, group: str, holders: set[str]) -> int:
    """How many members a group has: those that are subscribed, and others that hold records."""
    mine = [one for one in members if one.group == group and one.reads(topic)]
    return len(mine) + len(holders - {one.member for one in mine})
