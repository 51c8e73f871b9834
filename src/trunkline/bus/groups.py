"""The groups of a store: where they stand, moving them, and what happens to a policy that differs.

These calls are the same for the local bus and for the broker, which answers its clients by them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from trunkline.bus import GroupInfo, Start
from trunkline.delivery.deadletters import is_hidden, keeps_books
from trunkline.errors import InvalidOption, NotFound
from trunkline.event import Bounds
from trunkline.group import Group
from trunkline.group.members import MemberInfo, count, select
from trunkline.names import GroupKey, check_group, check_pattern, check_topic, matches
from trunkline.options import GroupOptions, OnConflict, differences, make, merged, other_policy
from trunkline.store import Store

logger = logging.getLogger(__name__)


async def list_groups(
    store: Store, topic: str | None = None, group: str | None = None
) -> list[GroupInfo]:
    """Every group, or those of a topic or pattern, or of one name. The groups that keep the books
    of dead letters are left out unless they are named. A group that is one process's own, to hear
    answers or cancellations, is left out unless it or its topic is named.
    """
    if topic is not None:
        check_pattern(topic)
    if group is not None:
        check_group(group)
    keys = [
        key
        for key in await store.groups()
        if (topic is None or matches(topic, key.topic))
        and group in (None, key.group)
        and (group is not None or not (keeps_books(key) if topic == key.topic else is_hidden(key)))
    ]
    members = await store.members()
    return [await group_info(store, key, members) for key in keys]


async def list_members(
    store: Store, topic: str | None = None, group: str | None = None
) -> list[MemberInfo]:
    """Every subscription of a living member, or those of a topic or pattern, or of a group. The
    subscriptions that one process has for itself are left out unless the group is named.
    """
    if topic is not None:
        check_pattern(topic)
    if group is not None:
        check_group(group)
    return [
        one
        for one in select(await store.members(), topic, group)
        if group is not None or not is_hidden(GroupKey(one.topic, 0, one.group))
    ]


async def group_info(
    store: Store, key: GroupKey, members: list[MemberInfo] | None = None
) -> GroupInfo:
    bounds = await store.bounds(key.topic, key.partition)
    known = await store.members() if members is None else members
    wall = store.clock.now().timestamp()
    return await store.update(key, lambda group: describe(key, group, bounds, known, wall))


def describe(
    key: GroupKey, group: Group, bounds: Bounds, members: list[MemberInfo], wall: float
) -> GroupInfo:
    """Where a group stands at a time, in a log of these bounds."""
    ahead = group.outlook(wall)
    return GroupInfo(
        topic=key.topic,
        partition=key.partition,
        group=key.group,
        floor=group.floor,
        last_settled=group.last_settled,
        lag=group.lag(bounds.next, bounds.first, wall=wall),
        leases=len(group.leases),
        waiting=len(group.waiting),
        members=count(members, key.topic, key.group, group.holders()),
        paused=group.paused,
        policy=group.options,
        scheduled=ahead.scheduled,
        next_due=ahead.next_due,
        filtered=group.ledger.filtered,
    )


async def find_group(store: Store, topic: str, group: str) -> list[GroupKey]:
    """A group's partitions; ``NotFound`` if there is no such group."""
    check_topic(topic)
    check_group(group)
    keys = [key for key in await store.groups() if (key.topic, key.group) == (topic, group)]
    if not keys:
        raise NotFound(f"there is no group {group} on {topic}", topic=topic, group=group)
    return keys


async def floor_at(store: Store, key: GroupKey, start: Start) -> int:
    """The floor of a group whose next record is the one at ``start``."""
    first, end = await store.bounds(key.topic, key.partition)
    if isinstance(start, datetime):
        return await store.seek(key.topic, key.partition, start) - 1
    if isinstance(start, int):
        return min(max(start, first), end) - 1
    return (first if start == "earliest" else end) - 1


async def seek_group(store: Store, topic: str, group: str, to: Start) -> list[GroupInfo]:
    check_start(to, "to")
    keys = await find_group(store, topic, group)
    floors = [await floor_at(store, key, to) for key in keys]
    for key, floor in zip(keys, floors, strict=True):
        await store.update(key, lambda found, floor=floor: found.seek(floor))  # type: ignore[misc]
    return await _told(store, topic, keys)


async def pause_group(store: Store, topic: str, group: str, on: bool) -> list[GroupInfo]:
    keys = await find_group(store, topic, group)
    for key in keys:
        await store.update(key, lambda found: found.pause(on))
    return await _told(store, topic, keys)


async def edit_group(
    store: Store, topic: str, group: str, policy: dict[str, Any]
) -> list[GroupInfo]:
    """Change the options that ``policy`` names."""
    check_policy_fields(policy)
    keys = await find_group(store, topic, group)

    def edit(found: Group) -> None:
        found.edit(merged(found.options, policy))

    for key in keys:
        await store.update(key, edit)
    return await _told(store, topic, keys)


async def forget_group(store: Store, topic: str, group: str) -> None:
    for key in await find_group(store, topic, group):
        await store.update(key, None)


def check_policy_fields(policy: dict[str, Any]) -> None:
    """Refuse a wrong name or value before a group is changed."""
    if not policy:
        known = ", ".join(GroupOptions.__struct_fields__)
        raise InvalidOption("no option to change was named", hint=f"known options: {known}")
    make(GroupOptions, policy)


async def _told(store: Store, topic: str, keys: Iterable[GroupKey]) -> list[GroupInfo]:
    """Wake the members of a group that was changed."""
    store.bell.ring(topic)
    return [await group_info(store, key) for key in keys]


def agree(
    group: Group, key: GroupKey, policy: GroupOptions, on_conflict: OnConflict
) -> Callable[[], None] | None:
    """Settle what becomes of a policy that differs from that of a group that exists. Returns how to
    log the decision, for the caller to do once the change is kept.
    """
    have = group.options
    if have == policy:
        return None
    if on_conflict == "raise":
        raise other_policy(key.topic, key.group, have, policy)
    changes = ", ".join(f"{name} {old} -> {new}" for name, old, new in differences(have, policy))
    if on_conflict == "keep":
        said = "group %s on %s/%d keeps its policy; a member asked for %s"
    else:
        group.edit(policy)
        said = "group %s on %s/%d has a new policy: %s"
    return lambda: logger.warning(said, key.group, key.topic, key.partition, changes)


def check_start(start: Start, name: str = "start") -> None:
    hint = "earliest, latest, an offset or a time"
    if isinstance(start, bool) or not isinstance(start, str | int | datetime):
        raise InvalidOption(f"not a start: {start!r}", name=name, hint=hint)
    if isinstance(start, str) and start not in ("earliest", "latest"):
        raise InvalidOption(f"not a start: {start!r}", name=name, hint=hint)
    if isinstance(start, int) and start < 0:
        raise InvalidOption(f"offsets count from 1, there is no {start}", name=name)
    if isinstance(start, datetime) and start.tzinfo is None:
        raise InvalidOption("a start time has a time zone", name=name)
