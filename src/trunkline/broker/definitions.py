"""What a bus is set up to be, as one document: topics, their rules and schemas, groups, policies.

``GET /definitions`` exports it and ``POST /definitions`` imports it, on this broker or another one.
Records, the places of groups, and tokens are no part of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from trunkline.broker.http import Ask, reply
from trunkline.broker.topic_rules import Attempts, Config, Milliseconds
from trunkline.bus.groups import floor_at
from trunkline.delivery.deadletters import check_member, keeps_books
from trunkline.errors import Conflict, Denied, InvalidOption
from trunkline.group import Group
from trunkline.names import SYSTEM_PREFIX, GroupKey, check_group, check_topic, is_dead
from trunkline.options import GroupOptions, TopicOptions, changed, make, merged
from trunkline.patterns.schemas import Compatibility


class TopicDefinition(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    topic: str
    options: dict[str, Any] = {}
    max_attempts: Attempts | None = None
    ack_timeout_ms: Milliseconds | None = None
    publish_acl: list[str] | None = None
    subscribe_acl: list[str] | None = None
    content_type: str | None = None


class GroupDefinition(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    topic: str
    group: str
    policy: dict[str, Any] = {}
    paused: bool = False


class SchemaDefinition(msgspec.Struct, forbid_unknown_fields=True):
    topic: str
    schema: dict[str, Any] | bool
    compatibility: Compatibility = "backward"


class Definitions(msgspec.Struct, forbid_unknown_fields=True):
    version: int = 1
    topics: list[TopicDefinition] = []
    schemas: list[SchemaDefinition] = []
    groups: list[GroupDefinition] = []


async def export_definitions(ask: Ask) -> Response:
    hub = ask.hub
    may = {name for name in await hub.bus.topics() if hub.allows(ask.who, "admin", name)}
    names = sorted(name for name in may if not name.startswith(SYSTEM_PREFIX))
    topics = await hub.bus.topics()
    found = Definitions()
    for name in names:
        rules = msgspec.structs.asdict(hub.configs.get(name))
        found.topics.append(TopicDefinition(**{**rules, "options": changed(topics[name])}))
    for name in hub.registry.topics():
        if name in names:
            one = hub.registry.current(name)
            found.schemas.append(SchemaDefinition(name, one.schema, one.compatibility))
    for key in sorted(await hub.bus.store.groups()):
        if key.partition or key.topic not in names or keeps_books(key):
            continue
        policy, paused = await hub.bus.store.change(key, _ways)
        found.groups.append(GroupDefinition(key.topic, key.group, changed(policy), paused))
    return reply(found)


def _ways(group: Group) -> tuple[GroupOptions, bool]:
    return group.options, group.paused


async def import_definitions(ask: Ask) -> Response:
    """Make what is not there, and change what is. Everything is checked before the first change;
    nothing is removed. A new group begins with the first record.
    """
    asked: Definitions = await ask.json(Definitions)
    _check(ask, asked)
    await _check_against_what_is_there(ask, asked)
    hub = ask.hub
    for topic in asked.topics:
        values = msgspec.structs.asdict(topic)
        options = values.pop("options")
        await hub.configs.set(Config(**values))
        await hub.bus.define(topic.topic, **options)
    for schema in asked.schemas:
        await hub.registry.add(schema.topic, schema.schema, schema.compatibility)
    for group in asked.groups:
        await _import_group(ask, group)
    hub.topics_shown.forget()
    hub.groups_shown.forget()
    counts = {name: len(getattr(asked, name)) for name in ("topics", "schemas", "groups")}
    return reply(counts)


def _check(ask: Ask, asked: Definitions) -> None:
    if asked.version != 1:
        raise InvalidOption(f"definitions of version {asked.version} are not known", name="version")
    names = {one.topic for one in asked.topics} | {one.topic for one in asked.schemas}
    for name in names | {one.topic for one in asked.groups}:
        ask.require("admin", check_topic(name))
        if name.startswith(SYSTEM_PREFIX):
            raise Denied("access denied", actor=ask.who.agent, action="admin", topic=name)
    given = [one for topic in asked.topics for one in (topic.publish_acl, topic.subscribe_acl)]
    if any(one is not None for one in given) and not ask.hub.rights.is_on:
        raise InvalidOption("this broker has no tokens: it takes no lists of agents", name="topics")
    for group in asked.groups:
        check_member(group.topic, check_group(group.group))
    _refuse_repeated("topic", [one.topic for one in asked.topics])
    _refuse_repeated("schema of", [one.topic for one in asked.schemas])
    _refuse_repeated("group", [f"{one.group} of {one.topic}" for one in asked.groups])


def _refuse_repeated(what: str, names: Sequence[str]) -> None:
    """Each definition is checked against the broker, not against others of the same document."""
    for name, count in Counter(names).items():
        if count > 1:
            raise InvalidOption(f"the {what} {name} is there {count} times", name="definitions")


async def _check_against_what_is_there(ask: Ask, asked: Definitions) -> None:
    hub = ask.hub
    topics = await hub.bus.topics()
    for topic in asked.topics:
        have = topics.get(topic.topic, TopicOptions())
        wanted = merged(have, topic.options).partitions
        if wanted < have.partitions:
            raise Conflict(f"{topic.topic} has {have.partitions} partitions, not {wanted}")
        if is_dead(topic.topic) and wanted > 1:
            raise InvalidOption("a dead letter topic has one partition", name="partitions")
    for schema in asked.schemas:
        await hub.registry.check_new(schema.topic, schema.schema, schema.compatibility)
    for group in asked.groups:
        found = await hub.bus.groups(group.topic, group.group)
        merged(found[0].policy if found else GroupOptions(), group.policy)


async def _import_group(ask: Ask, wanted: GroupDefinition) -> None:
    bus = ask.hub.bus
    options = (await bus.topics()).get(wanted.topic, TopicOptions())
    for partition in range(options.partitions):
        key = GroupKey(wanted.topic, partition, wanted.group)
        floor = await floor_at(bus.store, key, "earliest")

        def step(group: Group, floor: int = floor) -> None:
            if not group.created:
                group.define(make(GroupOptions, wanted.policy), floor)
            else:
                group.edit(merged(group.options, wanted.policy))
            group.pause(wanted.paused)

        await bus.store.change(key, step)
