"""Rows of topics and groups, and the figures for Prometheus, gathered at a pace that leaves the
loop to others.
"""

from __future__ import annotations

from typing import Any

import msgspec

from trunkline.broker.exposition import write
from trunkline.broker.group_looks import GroupLooks
from trunkline.broker.snapshot import Pace
from trunkline.broker.spelling import moment, with_aliases
from trunkline.broker.topic_rules import Configs
from trunkline.bus import GroupInfo
from trunkline.bus.groups import group_info
from trunkline.bus.local import LocalBus
from trunkline.group.members import MemberInfo, select
from trunkline.names import GroupKey
from trunkline.options import TopicOptions, changed
from trunkline.patterns.measures import Scans, all_topics, measure

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
    for name, options in sorted((await all_topics(bus)).items()):
        rows.append(await show_topic(bus, configs, name, options))
        await pace.turn()
    return rows


async def show_group(bus: LocalBus, key: GroupKey) -> Row:
    """Where a group stands, and its members."""
    known = await bus.members(group=key.group)
    row = group_row(await group_info(bus.store, key, known))
    row["subscribed"] = [show_member(one) for one in select(known, key.topic, key.group)]
    return with_aliases(row)


def group_row(info: GroupInfo) -> Row:
    return with_aliases(
        {
            "topic": info.topic,
            "partition": info.partition,
            "group": info.group,
            "last_committed": info.floor,
            "lag": info.lag,
            "scheduled": info.scheduled,
            "next_due": moment(info.next_due),
            "inflight": info.leases,
            "waiting": info.waiting,
            "paused": info.paused,
            "members": info.members,
            "policy": changed(info.policy),
        }
    )


def show_member(one: MemberInfo) -> Row:
    times = {"since": moment(one.since), "last_delivery": moment(one.last_delivery)}
    return with_aliases({**msgspec.structs.asdict(one), **times})


async def show_groups(looks: GroupLooks) -> list[Row]:
    pace, rows = Pace(), {}
    for info in await looks.all(pace.turn):
        row = group_row(info)
        rows[place_of(row, ("topic", "group", "partition"))] = row
        await pace.turn()
    return [rows[place] for place in sorted(rows)]


class Figures:
    """The figures of a bus, in the words of Prometheus."""

    def __init__(self, bus: LocalBus, looks: GroupLooks) -> None:
        self._bus = bus
        self._looks = looks
        self._scans = Scans()

    async def text(self) -> bytes:
        turn = Pace().turn
        families = await measure(
            self._bus,
            audit=False,
            groups_max=_GROUPS_MAX,
            groups=await self._looks.all(turn),
            scans=self._scans,
            turn=turn,
        )
        return await write(families, turn)
