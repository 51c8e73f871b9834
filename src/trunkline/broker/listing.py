"""Rows of topics and groups, and the figures for Prometheus, gathered at a pace that leaves the
loop to others.
"""

from __future__ import annotations

from typing import Any

import msgspec

from trunkline.broker.snapshot import Pace
from trunkline.broker.spelling import moment, with_aliases
from trunkline.broker.topic_rules import Configs
from trunkline.bus.local import LocalBus
from trunkline.errors import NotFound
from trunkline.group import Group
from trunkline.group.members import MemberInfo, count, select
from trunkline.names import GroupKey
from trunkline.options import TopicOptions, changed
from trunkline.patterns.measures import Family, measure

_GROUPS_MAX = 1000  # of which Prometheus is told

Row = dict[str, Any]


def place_of(row: Row, by: tuple[str, ...]) -> str:
    """Where a row stands among those that are sorted by these members."""
    return "/".join(f"{row[one]:04d}" if one == "partition" else str(row[one]) for one in by)


async def show_topic(
    bus: LocalBus, configs: Configs, name: str, options: TopicOptions | None = None
) -> Row:
    options = options or (await bus.topics()).get(name, TopicOptions())
    bounds = [await bus.store.bounds(name, number) for number in range(options.partitions)]
    rules = {k: v for k, v in msgspec.structs.asdict(configs.get(name)).items() if v is not None}
    if options.retention_age_s is not None:
        rules["retention_ms"] = round(options.retention_age_s * 1000)
    return with_aliases(
        {
            **rules,
            "partitions": options.partitions,
            "records": sum(end - first for first, end in bounds),
            "options": changed(options),
        }
    )


async def show_topics(bus: LocalBus, configs: Configs) -> list[Row]:
    pace, rows = Pace(), []
    for name, options in sorted((await bus.topics()).items()):
        rows.append(await show_topic(bus, configs, name, options))
        await pace.turn()
    return rows


async def show_group(bus: LocalBus, key: GroupKey, members: list[MemberInfo] | None = None) -> Row:
    """Where a group stands; who is subscribed to it, unless all members are given."""
    first, end = await bus.store.bounds(key.topic, key.partition)
    known = await bus.members(group=key.group) if members is None else members

    wall = bus.clock.now().timestamp()

    def look(group: Group) -> Row:
        ahead = group.outlook(wall)
        return {
            "topic": key.topic,
            "partition": key.partition,
            "group": key.group,
            "last_committed": group.floor,
            "lag": group.lag(end, first, wall=wall),
            "scheduled": ahead.scheduled,
            "next_due": moment(ahead.next_due),
            "inflight": len(group.leases),
            "waiting": len(group.waiting),
            "paused": group.paused,
            "members": count(known, key.topic, key.group, group.holders()),
            "policy": changed(group.options),
        }

    row = await bus.store.change(key, look)
    if members is None:
        row["subscribed"] = [show_member(one) for one in select(known, key.topic, key.group)]
    return with_aliases(row)


def show_member(one: MemberInfo) -> Row:
    times = {"since": moment(one.since), "last_delivery": moment(one.last_delivery)}
    return with_aliases({**msgspec.structs.asdict(one), **times})


async def show_groups(bus: LocalBus) -> list[Row]:
    pace, rows = Pace(), []
    members = await bus.members()
    for key in await bus.store.groups():
        try:
            rows.append(await show_group(bus, key, members))
        except NotFound:  # it was removed meanwhile
            continue
        await pace.turn()
    return sorted(rows, key=lambda row: place_of(row, ("topic", "group", "partition")))


async def show_figures(bus: LocalBus) -> list[Family]:
    return await measure(bus, audit=False, groups_max=_GROUPS_MAX, turn=Pace().turn)
