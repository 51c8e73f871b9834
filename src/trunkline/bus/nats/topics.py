"""The topics of a bus on NATS: their options, their streams, and how members hear of changes.

The options of all topics are one document, changed by compare-and-set. Every partition of a topic
is a stream. A member that changed something says so on the subject for news.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import msgspec

from trunkline.bus.nats.connection import NatsLink
from trunkline.bus.nats.place import FORMAT, MARK
from trunkline.errors import Conflict, InvalidOption, NotFound, UnsupportedFormat
from trunkline.names import dead_topic
from trunkline.options import TopicOptions, changed, make

PARTITIONS_MAX = 64
RESEND_WINDOW_S = 120.0  # an event that is sent again within it is kept once
_NS = 1_000_000_000
_NOT_HERE = ("segment_bytes", "segment_records", "compact", "retain_for_lake")
_EXISTS = frozenset({10058})  # a stream of that name with another configuration
_OVERLAPS = 10065
T = TypeVar("T")


class News(msgspec.Struct, omit_defaults=True):
    """What changed, for the other members."""

    kind: Literal["topics", "group", "again", "moved"]
    topic: str = ""
    group: str = ""


class StreamState(msgspec.Struct):
    first_seq: int = 0
    last_seq: int = 0
    messages: int = 0
    bytes: int = 0


class StreamConfig(msgspec.Struct):
    num_replicas: int = 1
    metadata: dict[str, str] | None = None
    storage: str = "file"


class Peer(msgspec.Struct):
    name: str = ""
    current: bool = True
    offline: bool = False


class ClusterInfo(msgspec.Struct):
    leader: str = ""
    replicas: list[Peer] | None = None


class StreamInfo(msgspec.Struct):
    config: StreamConfig
    state: StreamState
    cluster: ClusterInfo | None = None


class _Names(msgspec.Struct):
    streams: list[str] | None = None


class _Document(msgspec.Struct):
    format: int = 1
    topics: dict[str, dict[str, Any]] = {}


class _Stored(msgspec.Struct):
    seq: int
    data: bytes = b""


class _Got(msgspec.Struct):
    message: _Stored


class Notes:
    """Small documents by name, each changed by compare-and-set."""

    def __init__(self, link: NatsLink) -> None:
        self._link = link
        self._is_ours = False
        self._ready = False

    async def _check(self) -> bool:
        """Whether the stream is there. A reader makes none."""
        if not self._is_ours:
            try:
                found = await stream_info(self._link, self._link.place.notes)
            except NotFound:
                return False
            self._link.check_ours(self._link.place.notes, found.config.metadata)
            self._is_ours = True
        return True

    async def _ensure(self) -> None:
        if self._ready:
            return
        place = self._link.place
        await create_stream(
            self._link,
            place.notes,
            {
                "subjects": [place.note(">")],
                "max_msgs_per_subject": 1,
                "metadata": {MARK: FORMAT},
            },
        )
        self._ready = True

    async def get(self, name: str) -> tuple[bytes | None, int]:
        """The document and its revision; ``None`` and 0 if there is none."""
        if not await self._check():
            return None, 0
        place = self._link.place
        body = {"last_by_subj": place.note(name)}
        try:
            answer = await self._link.api(f"STREAM.MSG.GET.{place.notes}", body)
        except NotFound:
            return None, 0
        found = msgspec.json.decode(answer, type=_Got).message
        return found.data, found.seq

    async def put(self, name: str, data: bytes, revision: int) -> None:
        """Write the document unless it is at another revision; ``Conflict`` then."""
        await self._ensure()
        link = self._link
        headers = {"Nats-Expected-Last-Subject-Sequence": str(revision)}
        await link.ask(link.place.note(name), data, headers)

    async def change(self, name: str, step: Callable[[bytes | None], tuple[bytes | None, T]]) -> T:
        """Run ``step`` on the document until its result is written. A step that gives ``None``
        changes nothing.
        """
        for turn in range(1000):
            data, revision = await self.get(name)
            new, result = step(data)
            if new is None or new == data:
                return result
            try:
                await self.put(name, new, revision)
            except Conflict:
                await asyncio.sleep(min(0.001 * turn, 0.05))
                continue
            return result
        raise Conflict(f"{name} changes all the time")


async def create_stream(link: NatsLink, name: str, config: dict[str, Any]) -> None:
    """Make a stream, or bring one of ours to this configuration. ``Conflict`` for a stream that
    is not ours.
    """
    whole = {
        "name": name,
        "storage": "file",
        "retention": "limits",
        "discard": "old",
        "num_replicas": link.replicas,
        **config,
    }
    try:
        await link.api(f"STREAM.CREATE.{name}", whole)
        return
    except Exception as error:
        code = getattr(error, "code", 0)
        if code == _OVERLAPS:
            raise _overlap(config["subjects"][0]) from None
        if code not in _EXISTS:
            raise
    found = await stream_info(link, name)
    link.check_ours(name, found.config.metadata)
    whole["num_replicas"] = found.config.num_replicas
    await link.api(f"STREAM.UPDATE.{name}", whole)


def _overlap(subject: str) -> Conflict:
    hint = "take another bus: nats://host:4222/other; nothing was changed"
    return Conflict(f"another stream takes the subject {subject}", hint=hint)


async def stream_info(link: NatsLink, name: str) -> StreamInfo:
    return msgspec.json.decode(await link.api(f"STREAM.INFO.{name}"), type=StreamInfo)


class Topics:
    """Every topic, as this member knows it, and its streams."""

    def __init__(self, link: NatsLink, notes: Notes) -> None:
        self.link = link
        self.notes = notes
        self.topics: dict[str, TopicOptions] = {}
        self.durability: dict[str, str] = {}  # of topics whose streams are known
        self._making = asyncio.Lock()

    async def load(self) -> dict[str, TopicOptions]:
        data, _ = await self.notes.get("topics")
        self.topics = {
            name: make(TopicOptions, options) for name, options in _topics(data).topics.items()
        }
        return self.topics

    async def ensure(self, topic: str) -> TopicOptions:
        """The topic's options; a topic that is not there is made."""
        if topic in self.durability:
            return self.topics[topic]
        async with self._making:
            if topic not in self.topics:
                await self.load()
            if topic not in self.topics:
                await self._define(topic, TopicOptions(), only_new=True)
            if topic not in self.durability:
                await self._look(topic)
        return self.topics[topic]

    async def define(self, topic: str, named: dict[str, Any]) -> None:
        """Set the options that are named; the others stay."""
        async with self._making:
            await self.load()
            have = self.topics.get(topic)
            options = make(TopicOptions, {**(changed(have) if have else {}), **named})
            check_options(topic, options)
            if have is not None and have.partitions > options.partitions:
                raise InvalidOption(
                    f"{topic} has {have.partitions} partitions, and they cannot become fewer",
                    name="partitions",
                )
            await self._define(topic, options)
            await self._look(topic)

    async def _define(self, topic: str, options: TopicOptions, *, only_new: bool = False) -> None:
        have = self.topics.get(topic)
        was = None if have is None else changed(have)
        await self._check_streams(topic, options.partitions)
        await self._make_streams(topic, options)

        def step(data: bytes | None) -> tuple[bytes | None, tuple[TopicOptions, bool]]:
            document = _topics(data)
            found = document.topics.get(topic)
            if only_new and found is not None:
                return None, (make(TopicOptions, found), True)
            document.topics[topic] = changed(options)
            return msgspec.json.encode(document), (options, found != was)

        self.topics[topic], has_raced = await self.notes.change("topics", step)
        if has_raced:  # with another member, whose options the streams may have
            await self._make_streams(topic, self.topics[topic])
        await self.tell(News("topics", topic))

    async def _make_streams(self, topic: str, options: TopicOptions) -> None:
        for partition in range(options.partitions):
            name = self.link.place.stream(topic, partition)
            await create_stream(self.link, name, _config(self.link, topic, partition, options))

    async def _check_streams(self, topic: str, partitions: int) -> None:
        """Refuse a topic of which one partition would be another program's stream, before the
        others are made. That of one partition is refused when it is made.
        """
        for partition in range(partitions if partitions > 1 else 0):
            name = self.link.place.stream(topic, partition)
            subject = self.link.place.subject(topic, partition)
            try:
                found = await stream_info(self.link, name)
            except NotFound:
                answer = await self.link.api("STREAM.NAMES", {"subject": subject})
                takers = msgspec.json.decode(answer, type=_Names).streams or ()
                if set(takers) - {name}:  # it may have been made just now
                    raise _overlap(subject) from None
            else:
                self.link.check_ours(name, found.config.metadata)

    async def _look(self, topic: str) -> None:
        """What an acknowledgement of this topic means, as the server says."""
        found = await stream_info(self.link, self.link.place.stream(topic, 0))
        self.link.check_ours(topic, found.config.metadata)
        if found.config.num_replicas > 1:
            self.durability[topic] = "replicated"
        else:
            self.durability[topic] = "fsync" if self.link.syncs else "os"

    async def remove(self, topic: str) -> None:
        """Remove a topic, its records and its groups."""
        await self.load()
        if topic not in self.topics:
            raise NotFound(f"there is no topic {topic}", topic=topic)
        partitions = self.topics[topic].partitions

        def step(data: bytes | None) -> tuple[bytes | None, None]:
            document = _topics(data)
            document.topics.pop(topic, None)
            return msgspec.json.encode(document), None

        await self.notes.change("topics", step)
        self.topics.pop(topic, None)
        self.durability.pop(topic, None)
        await self.notes.change(f"groups.{topic}", lambda data: (data and b"{}", None))
        await self.notes.change(f"closed.{dead_topic(topic)}", lambda data: (data and b"[]", None))
        for partition in range(partitions):
            try:
                await self.link.api(f"STREAM.DELETE.{self.link.place.stream(topic, partition)}")
            except NotFound:
                continue
        await self.tell(News("topics", topic))

    async def tell(self, news: News) -> None:
        await self.link.tell(self.link.place.news, msgspec.json.encode(news))


def _topics(data: bytes | None) -> _Document:
    found = _Document(topics={}) if data is None else msgspec.json.decode(data, type=_Document)
    if found.format != 1:
        raise UnsupportedFormat(f"the bus has format {found.format}, this program knows 1")
    return found


def check_options(topic: str, options: TopicOptions) -> None:
    """Refuse what NATS cannot do before anything is changed."""
    differs = changed(options)
    for name in _NOT_HERE:
        if name in differs:
            raise InvalidOption(f"{name} is not for a topic on NATS", name=name, topic=topic)
    if options.partitions > PARTITIONS_MAX:
        raise InvalidOption(
            f"a topic on NATS has at most {PARTITIONS_MAX} partitions: each is a stream",
            name="partitions",
        )
    if 0 < options.dedup_window_s < RESEND_WINDOW_S / 4:
        raise InvalidOption(
            f"dedup_window_s on NATS is {RESEND_WINDOW_S / 4:g} or more",
            name="dedup_window_s",
            hint="a publish is sent again within the same window",
        )
    limits = ("retention_age_s", "retention_bytes", "retention_records")
    if options.retain_unsettled and any(getattr(options, name) is not None for name in limits):
        raise InvalidOption(
            "NATS removes old records whether groups have settled them or not",
            name="retain_unsettled",
            hint="retain_unsettled=False accepts that",
        )


def _config(link: NatsLink, topic: str, partition: int, options: TopicOptions) -> dict[str, Any]:
    window_s = options.dedup_window_s or RESEND_WINDOW_S
    if options.retention_age_s is not None:
        window_s = min(window_s, max(options.retention_age_s, 1.0))
    config: dict[str, Any] = {
        "subjects": [link.place.subject(topic, partition)],
        "duplicate_window": int(window_s * _NS),
        "allow_direct": True,
        "allow_atomic": True,
        "compression": "s2" if options.compress else "none",
        "metadata": {MARK: FORMAT, "topic": topic, "partition": str(partition)},
    }
    if options.retention_age_s is not None:
        config["max_age"] = max(int(options.retention_age_s * _NS), _NS)
    if options.retention_bytes is not None:
        config["max_bytes"] = options.retention_bytes
    if options.retention_records is not None:
        config["max_msgs"] = options.retention_records
    return config
