"""The bus on NATS JetStream: the same calls, carried by a server or a cluster.

A publish returns once JetStream has stored the event. A publish that was cut off is sent again
with its id, and the server keeps it once. Groups are durable consumers; delays, dead letters,
filters and time to live are done here, on top of them.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import ssl
from collections.abc import Iterable, Sequence
from typing import Any, Unpack

import msgspec
from nats.aio.msg import Msg

from trunkline.bus import Delivery, GroupInfo, Health, Start, Where
from trunkline.bus.app import CLOSED, BusBase, OnPublish
from trunkline.bus.groups import check_policy_fields, check_start
from trunkline.bus.nats.connection import NatsLink, end_task
from trunkline.bus.nats.consumers import Consumers
from trunkline.bus.nats.desk import NatsDesk
from trunkline.bus.nats.membership import Acks, Membership
from trunkline.bus.nats.place import parse
from trunkline.bus.nats.records import fetch, read, seek, write_event
from trunkline.bus.nats.subscription import NatsSubscription
from trunkline.bus.nats.topics import PARTITIONS_MAX, News, Notes, Topics, stream_info
from trunkline.bus.nats.window import BATCH_MAX, REPEATED, PubAck, Window
from trunkline.check import check_count, check_events
from trunkline.clock import Clock, SystemClock
from trunkline.delivery.deadletters import check_member
from trunkline.errors import (
    Closed,
    InvalidEvent,
    InvalidOption,
    NotFound,
    OutOfRange,
    TrunklineError,
)
from trunkline.event import Event, EventFields, Receipt, Record
from trunkline.explain import spelt
from trunkline.features import Features
from trunkline.filters import to_filter
from trunkline.group.members import MemberInfo, select
from trunkline.names import (
    check_group,
    check_pattern,
    check_topic,
    is_dead,
    is_pattern,
    matches,
)
from trunkline.options import (
    BusOptions,
    Flow,
    GroupFields,
    GroupOptions,
    Limits,
    NatsOptions,
    OnConflict,
    TopicFields,
    TopicOptions,
    check_on_conflict,
    check_policy,
    make,
)
from trunkline.store import Bounds, pick_partition

logger = logging.getLogger(__name__)

_FIND_S = 5.0  # news come at once; this is for news that were lost
FEATURES = Features(
    durability="os",  # "replicated" in a cluster, "fsync" where the server syncs every write
    partitions_max=PARTITIONS_MAX,
    batch_max=BATCH_MAX,
    atomic_dedup=False,
    priority=False,
    shared_keys=False,
    attempts="delivered",
    ledgers=False,
    handles=False,
)
_BUS = frozenset(BusOptions.__struct_fields__)


class NatsBus(BusBase):
    features = FEATURES

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        creds: str | None = None,
        tls: ssl.SSLContext | None = None,
        clock: Clock | None = None,
        middleware: Sequence[object] = (),
        limits: Limits = Limits(),
        on_publish: OnPublish | None = None,
        on_message: OnPublish | None = None,
        **options: Any,
    ) -> None:
        mine = {name: options.pop(name) for name in list(options) if name in _BUS}
        chosen = make(BusOptions, mine)
        if chosen.audit:
            raise InvalidOption("audit is not for a bus on NATS", name="audit")
        if tls is not None and not isinstance(tls, ssl.SSLContext):
            raise InvalidOption(f"tls is an ssl.SSLContext, not {spelt(tls)}", name="tls")
        super().__init__(chosen, clock or SystemClock(), limits, middleware, on_publish, on_message)
        self._settings = make(NatsOptions, options)
        place = parse(url)
        if token is not None:
            place = msgspec.structs.replace(place, token=token)
        if tls is None and url.startswith("nats+tls:"):
            tls = ssl.create_default_context()
        self.link = NatsLink(place, self._settings, creds=creds, tls=tls)
        self.notes = Notes(self.link)
        self.catalog = Topics(self.link, self.notes)
        self.consumers = Consumers(self.link, self.catalog)
        self.window = Window(self.link)
        self.subscriptions: set[NatsSubscription] = set()
        self._sender = Acks(self.link)
        self._members: dict[tuple[str, str], Membership] = {}
        self._joining = asyncio.Lock()
        self._beginning = asyncio.Lock()
        self._begun = False
        self._news: asyncio.Queue[News] = asyncio.Queue()
        self._listener: asyncio.Task[None] | None = None
        self._turn = 0

    @property
    def is_closed(self) -> bool:
        return self._life is CLOSED

    # -- publishing ----------------------------------------------------------------------------

    async def publish(
        self, topic: str | Event, payload: Any = None, **fields: Unpack[EventFields]
    ) -> Receipt:
        if type(topic) is str and topic in self.catalog.durability and not fields:
            if is_dead(topic):
                event = self._event(topic, payload, {})
            else:
                event = Event(topic=topic, payload=payload, ts=self.clock.now())
        elif isinstance(topic, Event):
            event = self._whole(topic, payload, {**fields})
        else:
            event = self._event(topic, payload, {**fields})
        if self._plain and self._life is not CLOSED:
            return await self._publish_one(event)
        return (await self._send([event]))[0]

    async def publish_many(
        self, topic: str, payloads: Sequence[Any], **fields: Unpack[EventFields]
    ) -> list[Receipt]:
        events = self._events(topic, payloads, {**fields})
        return await self._send(events) if events else []

    async def publish_again(self, topic: str, events: Sequence[Event]) -> list[Receipt]:
        check_events(check_topic(topic), events, self._limits)
        if not events:
            return []
        options = await self._topic(topic)
        since = min(event.ts for event in events)
        wanted = {event.id for event in events}
        there: dict[str, Receipt] = {}
        durability = self.catalog.durability[topic]
        for partition in range(options.partitions):
            start = await seek(self.link, topic, partition, since)
            for record in (
                await self.read(topic, start, 2**62, partition=partition) if start else ()
            ):
                name = record.event.id
                if name in wanted:
                    there[name] = Receipt(topic, partition, record.offset, name, False, durability)
        receipts = []
        for event in events:
            if event.id not in there:
                there[event.id] = await self._publish_one(event)
            receipts.append(there[event.id])
        return receipts

    async def _append(self, events: list[Event]) -> list[Receipt]:
        if len(events) == 1:
            return [await self._publish_one(events[0])]
        return await self._publish_batch(events) if events else []

    async def _publish_one(self, event: Event) -> Receipt:
        data = write_event(event, self._limits)
        topic = event.topic
        if topic not in self.catalog.durability:
            await self._topic(topic)
        options = self.catalog.topics[topic]
        partition = self._partition(event, options)
        return await self._store(event, data, partition, options)

    async def _store(
        self, event: Event, data: bytes, partition: int, options: TopicOptions
    ) -> Receipt:
        subject = self.link.place.subject(event.topic, partition)
        try:
            ack = await self.window.send(subject, data, _message_id(event, options))
        except TrunklineError as error:
            raise error from None
        return await self._receipt(event, partition, ack)

    async def _receipt(self, event: Event, partition: int, ack: PubAck) -> Receipt:
        durability = self.catalog.durability[event.topic]
        if not ack.duplicate:
            return Receipt(event.topic, partition, ack.seq, event.id, False, durability)
        try:
            first = (await fetch(self.link, event.topic, partition, ack.seq)).event.id
        except NotFound:
            first = event.id
        # Of an event that was sent again, the server has the first send.
        is_mine = ack.resent and first == event.id
        return Receipt(event.topic, partition, ack.seq, first, not is_mine, durability)

    async def _publish_batch(self, events: list[Event]) -> list[Receipt]:
        topic = events[0].topic
        if any(event.topic != topic for event in events):
            raise InvalidEvent("the events of one batch have one topic")
        bodies = [write_event(event, self._limits) for event in events]
        options = await self._topic(topic)
        shares: dict[int, list[int]] = {}
        for number, event in enumerate(events):
            shares.setdefault(self._partition(event, options), []).append(number)
        most = max(map(len, shares.values()))
        if most > BATCH_MAX:
            raise InvalidEvent(
                f"a batch on NATS has at most {BATCH_MAX} events of a partition, not {most}",
                hint="publish it in parts: each part is atomic",
            )
        receipts: dict[int, Receipt] = {}
        for partition, numbers in shares.items():
            chosen = [(number, events[number], bodies[number]) for number in numbers]
            receipts |= await self._publish_share(chosen, partition, options)
        return [receipts[number] for number in range(len(events))]

    async def _publish_share(
        self, chosen: list[tuple[int, Event, bytes]], partition: int, options: TopicOptions
    ) -> dict[int, Receipt]:
        """The events of one partition as one atomic batch."""
        ids = [_message_id(event, options) for _, event, _ in chosen]
        first_of: dict[str, int] = {}
        for at, name in enumerate(ids):
            first_of.setdefault(name, at)
        topic = chosen[0][1].topic
        kept = sorted(first_of.values())
        subject = self.link.place.subject(topic, partition)
        receipts: dict[int, Receipt] = {}
        try:
            if len(kept) == 1:
                raise _OneByOne
            messages = [(chosen[at][2], ids[at]) for at in kept]
            ack = await self.window.send_batch(subject, messages)
        except (TrunklineError, _OneByOne) as error:
            if getattr(error, "code", REPEATED) != REPEATED or isinstance(error, Closed):
                raise
            if isinstance(error, TrunklineError) and "code" not in error.fields:
                raise
            # Some are there already, and the server does not say which.
            for at in kept:
                number, event, data = chosen[at]
                ack = await self.window.send(subject, data, ids[at])
                ack.resent = ack.resent or bool(getattr(error, "resent", False))
                receipts[number] = await self._receipt(event, partition, ack)
        else:
            durability = self.catalog.durability[topic]
            for offset, at in enumerate(kept, ack.seq - len(kept) + 1):
                number, event, _ = chosen[at]
                receipts[number] = Receipt(topic, partition, offset, event.id, False, durability)
        for at, (number, _, _) in enumerate(chosen):
            if number not in receipts:
                first = receipts[chosen[first_of[ids[at]]][0]]
                receipts[number] = msgspec.structs.replace(first, duplicate=True)
        return receipts

    def _partition(self, event: Event, options: TopicOptions) -> int:
        if options.partitions == 1:
            return 0
        self._turn += 1
        return pick_partition(event, options.partitions, self._turn)

    async def _topic(self, topic: str) -> TopicOptions:
        await self.begin()
        return await self.catalog.ensure(topic)

    # -- subscribing ---------------------------------------------------------------------------

    def subscribe(
        self,
        topic: str,
        *,
        group: str,
        start: Start = "earliest",
        policy: GroupOptions | None = None,
        on_conflict: OnConflict = "raise",
        max_inflight: int | None = None,
        where: Where = None,
    ) -> NatsSubscription:
        check_pattern(topic)
        check_group(group)
        check_member(topic, group)
        flow = Flow() if max_inflight is None else Flow(max_inflight=max_inflight)
        if policy is not None:
            check_policy(policy)
        match = to_filter(where)
        check_start(start)
        check_on_conflict(on_conflict)
        return NatsSubscription(self, topic, group, start, policy, on_conflict, flow, match)

    async def known_topics(self) -> dict[str, TopicOptions]:
        await self.begin()
        return self.catalog.topics

    async def join(self, subscription: NatsSubscription, topic: str, *, since: bool) -> Membership:
        """This process as a member of the subscription's group on a topic."""
        await self.begin()
        options = await self.catalog.ensure(topic)
        key = (topic, subscription.group)
        async with self._joining:
            member = self._members.get(key)
            is_new = topic not in subscription.members
            if member is not None and not is_new and len(member.partitions) == options.partitions:
                return member
            start = subscription.start
            if since and start == "latest":  # the topic came after the subscription
                start = "earliest"
            policy = await self.consumers.ensure(
                topic,
                subscription.group,
                subscription.policy if is_new else None,
                start,
                subscription.on_conflict,
            )
            if member is None:
                member = Membership(
                    self.link,
                    self.consumers,
                    self._sender,
                    self.clock,
                    self._bury,
                    topic,
                    subscription.group,
                    policy,
                    options.ttl_policy,
                )
                self._members[key] = member
            member.follow(policy)
            for partition in range(options.partitions):
                if partition not in member.partitions:
                    info = await self.consumers.info(topic, partition, subscription.group)
                    await member.begin(partition, info)
            if await self.consumers.has_again(topic, subscription.group):
                await member.begin_again()
            return member

    async def leave(self, member: Membership) -> None:
        async with self._joining:
            if member.seats:
                return
            if self._members.get((member.topic, member.group)) is member:
                del self._members[member.topic, member.group]
            await member.close()

    async def _bury(self, letter: Event, name: str) -> None:
        """Write a dead letter; once, however often it is sent within the server's window."""
        await self._topic(letter.topic)
        data = write_event(letter, Limits(record_bytes=2 * self._limits.record_bytes))
        subject = self.link.place.subject(letter.topic, 0)
        await self.window.send(subject, data, _plain_id(name))

    def _streams(self) -> Iterable[NatsSubscription]:
        return self.subscriptions

    async def _unsettled(self) -> int:
        for subscription in list(self.subscriptions):
            await subscription.find()
        found = 0
        for topic, group in list(self._members):
            found += await self.lag(topic, group)
        return found

    async def policy_of(self, delivery: Delivery) -> GroupOptions:
        return self._members[delivery.topic, delivery.group].policy

    # -- looking -------------------------------------------------------------------------------

    async def topics(self) -> dict[str, TopicOptions]:
        await self.begin()
        return dict(await self.catalog.load())

    async def define(self, topic: str, **options: Unpack[TopicFields]) -> None:
        """Set a topic's options; see ``TopicOptions``."""
        check_topic(topic)
        make(TopicOptions, {**options})  # a wrong option is refused before anything else
        await self.begin()
        await self.catalog.define(topic, {**options})
        self._heed()

    async def remove(self, topic: str) -> None:
        check_topic(topic)
        await self.begin()
        await self.catalog.remove(topic)

    async def trim(self, topic: str, before: int, *, partition: int = 0) -> Bounds:
        check_count("before", before)
        await self._check_partition(topic, partition)
        first, end = await self.bounds(topic, partition)
        if before > first:
            stream = self.link.place.stream(topic, partition)
            await self.link.api(f"STREAM.PURGE.{stream}", {"seq": min(before, end)})
        return await self.bounds(topic, partition)

    async def bounds(self, topic: str, partition: int = 0) -> Bounds:
        await self._check_partition(topic, partition)
        try:
            found = await stream_info(self.link, self.link.place.stream(topic, partition))
        except NotFound:
            return Bounds(1, 1)
        state = found.state
        return Bounds(max(state.first_seq, 1), state.last_seq + 1)

    async def _read(self, topic: str, partition: int, start: int, limit: int) -> list[Record]:
        first, end = await self.bounds(topic, partition)
        if start >= end:
            return []
        if start < first:
            raise OutOfRange(f"{topic}/{partition} begins at {first}", first=first, offset=start)
        return await read(self.link, topic, partition, start, min(limit, end - start))

    async def _check_partition(self, topic: str, partition: int) -> None:
        check_topic(topic)
        check_count("partition", partition)
        await self.begin()
        if topic not in self.catalog.topics:
            await self.catalog.load()
        options = self.catalog.topics.get(topic)
        if partition and options is not None and partition >= options.partitions:
            raise OutOfRange(f"there is no partition {partition} in {topic}", partition=partition)

    # -- groups --------------------------------------------------------------------------------

    async def groups(self, topic: str | None = None, group: str | None = None) -> list[GroupInfo]:
        if topic is not None:
            check_pattern(topic)
        if group is not None:
            check_group(group)
        found: list[GroupInfo] = []
        for name in sorted(await self.topics()):
            if topic is None or matches(topic, name):
                for one in await self.consumers.policies(name):
                    if group in (None, one):
                        found += await self._group(name, one)
        return found

    async def members(self, topic: str | None = None, group: str | None = None) -> list[MemberInfo]:
        if topic is not None:
            check_pattern(topic)
        if group is not None:
            check_group(group)
        return select((one.describe() for one in self.subscriptions), topic, group)

    async def _group(self, topic: str, group: str) -> list[GroupInfo]:
        """Where a group stands; ``NotFound`` if there is no such group."""
        policy = (await self.consumers.policies(topic)).get(group)
        if policy is None:
            raise NotFound(f"there is no group {group} on {topic}", topic=topic, group=group)
        found = []
        again = await self.consumers.lag_again(topic, group)
        subscribed = await self.members(topic, group)  # of other processes one is known to wait
        for partition in range(self.catalog.topics[topic].partitions):
            info = await self.consumers.info(topic, partition, group)
            here = self._members.get((topic, group))
            leases = here.leases(partition) if here is not None else 0
            found.append(
                GroupInfo(
                    topic=topic,
                    partition=partition,
                    group=group,
                    floor=info.ack_floor.stream_seq,
                    last_settled=info.ack_floor.stream_seq,
                    lag=info.num_pending + info.num_ack_pending + (0 if partition else again),
                    leases=info.num_ack_pending,
                    waiting=max(0, info.num_redelivered - leases),
                    members=max(1 if info.num_waiting else 0, len(subscribed)),
                    paused=info.paused,
                    policy=policy,
                )
            )
        return found

    async def lag(self, topic: str, group: str) -> int:
        """How many records of a topic or pattern a group has not settled."""
        check_pattern(topic)
        if is_pattern(topic):
            return sum(one.lag for one in await self.groups(topic, group))
        await self._check_partition(topic, 0)
        if topic not in self.catalog.topics:
            raise NotFound(f"there is no group {group} on {topic}", topic=topic, group=group)
        return sum([one.lag for one in await self._group(topic, group)])

    async def seek(self, topic: str, group: str, to: Start) -> list[GroupInfo]:
        check_start(to, "to")
        named = await self._named(topic, group)
        await self._tell(News("moved", topic, group))  # before: members let go of their records
        for one in named:
            first = await self.consumers.place_of(topic, one.partition, to)
            await self.consumers.seek(topic, one.partition, group, first)
        return await self._group(topic, group)

    async def pause(self, topic: str, group: str) -> list[GroupInfo]:
        return await self._pause(topic, group, True)

    async def resume(self, topic: str, group: str) -> list[GroupInfo]:
        return await self._pause(topic, group, False)

    async def _pause(self, topic: str, group: str, on: bool) -> list[GroupInfo]:
        for one in await self._named(topic, group):
            await self.consumers.pause(topic, one.partition, group, on)
        return await self._group(topic, group)

    async def edit(self, topic: str, group: str, **policy: Unpack[GroupFields]) -> list[GroupInfo]:
        check_policy_fields({**policy})
        await self._named(topic, group)
        await self.consumers.edit(topic, group, {**policy})
        await self._tell(News("group", topic, group))
        return await self._group(topic, group)

    async def forget(self, topic: str, group: str) -> None:
        await self._named(topic, group)
        await self.consumers.remove(topic, group)

    async def _named(self, topic: str, group: str) -> list[GroupInfo]:
        check_topic(topic)
        check_group(group)
        if topic not in await self.topics():
            raise NotFound(f"there is no group {group} on {topic}", topic=topic, group=group)
        return await self._group(topic, group)

    async def _tell(self, news: News) -> None:
        """Follow the change here at once; other members hear of it."""
        await self._follow(news)
        await self.catalog.tell(news)

    def dead_letters(self, topic: str) -> NatsDesk:
        return NatsDesk(self, check_topic(topic))

    async def health(self) -> Health:
        failed = [str(error) for error in self._failed()]
        kinds = set(self.catalog.durability.values())
        return {
            "ok": self.link.is_up and self._life is not CLOSED and not failed,
            "connected": self.link.is_up,
            "durability": min(kinds, key=("os", "fsync", "replicated").index) if kinds else "os",
            "groups": len(self._members),
            "failed": failed,
        }

    # -- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        if self._life is CLOSED:
            raise Closed("the bus is closed")
        await self.begin()
        await super().start()

    async def begin(self) -> None:
        """Connect, and hear of changes."""
        if self._begun:
            return
        async with self._beginning:
            if self._life is CLOSED:
                raise Closed("the bus is closed")
            if self._begun:
                return
            await self.link.open()
            await self.window.start()
            await self.catalog.load()
            await self.link.nc.subscribe(self.link.place.news, cb=self._told)
            self.link.at_reconnect(lambda: self._news.put_nowait(News("topics")))
            self._listener = asyncio.get_running_loop().create_task(self._listen())
            self._begun = True

    async def _told(self, message: Msg) -> None:
        self._news.put_nowait(msgspec.json.decode(message.data, type=News))

    async def _listen(self) -> None:
        """Follow what other members changed."""
        while True:
            try:
                async with asyncio.timeout(_FIND_S):
                    news = await self._news.get()
            except TimeoutError:
                news = News("topics")
            try:
                await self._follow(news)
            except (TrunklineError, KeyError) as error:
                logger.warning("news of %s were not followed: %s", news.topic, error)

    async def _follow(self, news: News) -> None:
        if news.kind == "topics":
            await self.catalog.load()
            self._heed()
            for subscription in list(self.subscriptions):
                try:
                    await subscription.find()
                except TrunklineError as error:
                    if not self.link.is_up:
                        raise
                    subscription.fail(error)
        member = self._members.get((news.topic, news.group))
        if member is None:
            return
        if news.kind == "again":
            await member.begin_again()
        elif news.kind == "moved":
            member.revoke()
        elif news.kind == "group":
            policies = await self.consumers.policies(news.topic)
            if news.group in policies:
                member.follow(policies[news.group])

    def _heed(self) -> None:
        """Members follow the options of their topics."""
        for (topic, _), member in self._members.items():
            options = self.catalog.topics.get(topic)
            if options is not None:
                member.ttl = options.ttl_policy

    async def close(self) -> None:
        if self._life is CLOSED:
            return
        try:
            await self.stop()
            await self._end()
        finally:
            self._life = CLOSED
            await end_task(self._listener)
            for subscription in list(self.subscriptions):
                await subscription.close()
            await self.window.close()
            await self.link.close()


class _OneByOne(Exception):
    """A batch that is not sent as one."""


def _message_id(event: Event, options: TopicOptions) -> str:
    if options.dedup_window_s and event.idem_key is not None:
        return _plain_id(f"key:{event.idem_key}")
    return _plain_id(event.id)


def _plain_id(text: str) -> str:
    """Text as a header takes it."""
    if text.isascii() and text.isprintable() and " " not in text:
        return text
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
