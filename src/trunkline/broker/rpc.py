"""The calls of a bus besides publishing and subscribing, for clients that ask for them by name.
Each call checks the caller's rights itself.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from trunkline.broker.dlq_pages import page_of, readable
from trunkline.broker.session import Op, Session
from trunkline.broker.subscriber import start_of
from trunkline.bus.groups import edit_group
from trunkline.errors import InvalidOption, NotFound
from trunkline.explain import reason
from trunkline.names import GroupKey, check_group, check_topic, dead_topic, matches
from trunkline.options import TopicOptions, make
from trunkline.patterns.replies import left
from trunkline.store import lag_of
from trunkline.wire.frames import From

_READ_MAX = 1000


class _Read(msgspec.Struct, forbid_unknown_fields=True):
    topic: str
    start: int = 1
    limit: int = _READ_MAX
    partition: int = 0


class _Define(msgspec.Struct, forbid_unknown_fields=True):
    topic: str
    options: dict[str, Any] = {}


class _Topic(msgspec.Struct, forbid_unknown_fields=True):
    topic: str


class _Trim(_Topic):
    before: int
    partition: int = 0


class _Forget(msgspec.Struct, forbid_unknown_fields=True):
    topic: str
    group: str


class _ForgetLeft(msgspec.Struct, forbid_unknown_fields=True):
    topic: str
    prefix: Annotated[str, Meta(min_length=1)]


class _Policy(_Forget):
    partition: int = 0


class _Groups(msgspec.Struct, forbid_unknown_fields=True):
    topic: str | None = None
    group: str | None = None


class _Seek(_Forget):
    to: From


class _Edit(_Forget):
    policy: dict[str, Any]


class _Lag(msgspec.Struct, forbid_unknown_fields=True):
    groups: list[tuple[str, str]]


class _Letters(msgspec.Struct, forbid_unknown_fields=True):
    topic: str
    group: str | None = None
    closed: bool = False
    start: int = 0
    offsets: list[int] | None = None
    where: str | None = None
    rate: float | None = None
    dry_run: bool = False
    max_redrives: int = 3

    @property
    def chosen(self) -> set[int] | None:
        """The client has looked whether they are open. By now somebody else may have closed some,
        or the client itself by a call that it repeats, because a connection was lost.
        """
        return None if self.offsets is None else set(self.offsets)


async def _topics(session: Session, _args: dict[str, Any]) -> Any:
    found = await session.hub.bus.topics()
    return {
        name: options
        for name, options in found.items()
        if session.hub.allows(session.who, "read", name)
    }


async def _define(session: Session, args: dict[str, Any]) -> Any:
    asked = _args(args, _Define)
    session.require("admin", check_topic(asked.topic))
    session.hub.refuse_reserved(session.who, "admin", asked.topic)
    make(TopicOptions, asked.options)
    await session.hub.bus.define(asked.topic, **asked.options)


async def _remove(session: Session, args: dict[str, Any]) -> None:
    asked = _args(args, _Topic)
    session.require("admin", check_topic(asked.topic))
    session.hub.refuse_reserved(session.who, "admin", asked.topic)
    await session.hub.bus.remove(asked.topic)


async def _trim(session: Session, args: dict[str, Any]) -> Any:
    asked = _args(args, _Trim)
    session.require("admin", check_topic(asked.topic))
    session.hub.refuse_reserved(session.who, "admin", asked.topic)
    return await session.hub.bus.trim(asked.topic, asked.before, partition=asked.partition)


async def _read(session: Session, args: dict[str, Any]) -> Any:
    asked = _args(args, _Read)
    session.require("read", check_topic(asked.topic))
    await session.hub.bus.check_partition(asked.topic, asked.partition)
    limit = max(1, min(asked.limit, _READ_MAX))
    # As much as the store gives at once: the client asks for the rest.
    start, hub = asked.start, session.hub
    while found := await hub.bus.store.read(asked.topic, asked.partition, start, limit):
        if allowed := [record for record in found if hub.may_read(session.who, record)]:
            return allowed
        start = found[-1].offset + 1
    return []


async def _bounds(session: Session, args: dict[str, Any]) -> Any:
    asked = _args(args, _Read)
    session.require("read", check_topic(asked.topic))
    return await session.hub.bus.bounds(asked.topic, asked.partition)


async def _letters(session: Session, args: dict[str, Any]) -> Any:
    """As many as fit into one answer: the client asks for the rest."""
    asked = _args(args, _Letters)
    session.require("read", dead_topic(check_topic(asked.topic)))
    found, _ = await page_of(
        session.hub.bus.dead_letters(asked.topic),
        group=asked.group,
        closed=asked.closed,
        start=asked.start,
        offsets=asked.chosen,
        may_read=partial(session.hub.may_read, session.who),
    )
    return found


async def _redrive(session: Session, args: dict[str, Any]) -> Any:
    asked = _args(args, _Letters)
    session.require("admin", check_topic(asked.topic))
    desk = session.hub.bus.dead_letters(asked.topic)
    return [
        done
        async for done in desk.redrive(
            group=asked.group,
            offsets=asked.chosen,
            where=readable(asked.where, partial(session.hub.may_read, session.who)),
            rate=asked.rate,
            dry_run=asked.dry_run,
            max_redrives=asked.max_redrives,
            skip_closed=True,
        )
    ]


async def _drop(session: Session, args: dict[str, Any]) -> Any:
    asked = _args(args, _Letters)
    session.require("admin", check_topic(asked.topic))
    desk = session.hub.bus.dead_letters(asked.topic)
    return [
        letter
        async for letter in desk.drop(
            group=asked.group,
            offsets=asked.chosen,
            where=readable(asked.where, partial(session.hub.may_read, session.who)),
            dry_run=asked.dry_run,
            skip_closed=True,
        )
    ]


async def _lag(session: Session, args: dict[str, Any]) -> int:
    asked = _args(args, _Lag)
    bus = session.hub.bus
    for topic, group in asked.groups:
        session.require("subscribe", topic, group)
    total = 0
    for key in await bus.store.groups():
        if any(key.group == group and matches(topic, key.topic) for topic, group in asked.groups):
            total += await lag_of(bus.store, key)
    return total


async def _groups(session: Session, args: dict[str, Any]) -> Any:
    """Every group of a topic that the caller may read or subscribe to."""
    asked = _args(args, _Groups)
    hub, who = session.hub, session.who
    return [
        one
        for one in await hub.bus.groups(asked.topic, asked.group)
        if hub.allows(who, "read", one.topic) or hub.allows(who, "subscribe", one.topic, one.group)
    ]


async def _members(session: Session, args: dict[str, Any]) -> Any:
    """The members of the groups that the caller may read or subscribe to."""
    asked = _args(args, _Groups)
    hub, who = session.hub, session.who
    return [
        one
        for one in await hub.bus.members(asked.topic, asked.group)
        if hub.allows(who, "read", one.topic) or hub.allows(who, "subscribe", one.topic, one.group)
    ]


async def _seek(session: Session, args: dict[str, Any]) -> Any:
    asked = _args(args, _Seek)
    _administer(session, asked)
    return await session.hub.bus.seek(asked.topic, asked.group, start_of(asked.to))


async def _pause(session: Session, args: dict[str, Any]) -> Any:
    asked = _args(args, _Forget)
    _administer(session, asked)
    return await session.hub.bus.pause(asked.topic, asked.group)


async def _resume(session: Session, args: dict[str, Any]) -> Any:
    asked = _args(args, _Forget)
    _administer(session, asked)
    return await session.hub.bus.resume(asked.topic, asked.group)


async def _edit(session: Session, args: dict[str, Any]) -> Any:
    asked = _args(args, _Edit)
    _administer(session, asked)
    return await edit_group(session.hub.bus.store, asked.topic, asked.group, asked.policy)


def _administer(session: Session, asked: _Forget) -> None:
    session.require("admin", check_topic(asked.topic), check_group(asked.group))


async def _forget(session: Session, args: dict[str, Any]) -> None:
    """Remove a group that the caller made for itself; as much as subscribing with it takes."""
    asked = _args(args, _Forget)
    session.require("subscribe", check_topic(asked.topic), check_group(asked.group))
    with contextlib.suppress(NotFound):
        await session.hub.bus.forget(asked.topic, asked.group)


async def _forget_left(session: Session, args: dict[str, Any]) -> None:
    """Remove groups such as the caller makes for itself, whose makers were killed."""
    asked = _args(args, _ForgetLeft)
    check_topic(asked.topic)
    hub = session.hub
    for group in await left(hub.bus, asked.topic, asked.prefix, hub.clock.now()):
        if hub.allows(session.who, "subscribe", asked.topic, group):
            await hub.bus.forget(asked.topic, group)


async def _policy(session: Session, args: dict[str, Any]) -> Any:
    """How a group that the caller may be a member of is to be treated."""
    asked = _args(args, _Policy)
    session.require("subscribe", check_topic(asked.topic), check_group(asked.group))
    key = GroupKey(asked.topic, asked.partition, asked.group)
    store = session.hub.bus.store
    if key not in await store.groups():
        raise NotFound(f"there is no group {key.group} on {key.topic}", group=key.group)
    return await store.update(key, lambda group: group.options)


async def _health(session: Session, _args: dict[str, Any]) -> Any:
    return await session.hub.bus.health()


OPS: dict[str, Op] = {
    "topics": _topics,
    "define": _define,
    "remove": _remove,
    "trim": _trim,
    "read": _read,
    "bounds": _bounds,
    "groups": _groups,
    "members": _members,
    "lag": _lag,
    "seek": _seek,
    "pause": _pause,
    "resume": _resume,
    "edit": _edit,
    "forget": _forget,
    "forget_left": _forget_left,
    "policy": _policy,
    "letters": _letters,
    "redrive": _redrive,
    "drop": _drop,
    "health": _health,
}


def _args(args: dict[str, Any], kind: Any) -> Any:
    try:
        return msgspec.convert(args, kind)
    except msgspec.ValidationError as error:
        raise InvalidOption(f"wrong arguments: {reason(error)}") from error
