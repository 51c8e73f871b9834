"""The groups of a bus on NATS: a durable consumer for each partition, and the policy in a document.

A policy is changed by compare-and-set; the consumers follow it.
"""

from __future__ import annotations

import logging
from datetime import datetime
from typing import Any

import msgspec

from trunkline.bus.nats.connection import NatsLink
from trunkline.bus.nats.place import FORMAT, MARK, flat
from trunkline.bus.nats.records import seek as seek_time
from trunkline.bus.nats.topics import News, Topics, create_stream, stream_info
from trunkline.errors import NotFound
from trunkline.options import GroupOptions, OnConflict, changed, differences, make, other_policy

logger = logging.getLogger(__name__)

PIN_GROUP = "one"
_NS = 1_000_000_000
_FAR = "2200-01-01T00:00:00Z"
_EXISTS = frozenset({10148, 10013, 10105})


class _Sequence(msgspec.Struct):
    consumer_seq: int = 0
    stream_seq: int = 0


class ConsumerInfo(msgspec.Struct):
    name: str = ""
    delivered: _Sequence = msgspec.field(default_factory=_Sequence)
    ack_floor: _Sequence = msgspec.field(default_factory=_Sequence)
    num_ack_pending: int = 0
    num_redelivered: int = 0
    num_waiting: int = 0
    num_pending: int = 0
    paused: bool = False


class _Groups(msgspec.Struct):
    groups: dict[str, dict[str, Any]] = {}


_info = msgspec.json.Decoder(ConsumerInfo).decode


def again_name(topic: str, group: str) -> str:
    return f"{flat(topic)}~{flat(group)}"


class Consumers:
    def __init__(self, link: NatsLink, catalog: Topics) -> None:
        self._link = link
        self._catalog = catalog

    def ack_wait_s(self, policy: GroupOptions) -> float:
        """When the server gives a record to another member because its holder is silent. Later than
        the ack timeout, which a living holder keeps itself.
        """
        return 1.5 * policy.ack_timeout_s + 1.0

    # -- policies ------------------------------------------------------------------------------

    async def policies(self, topic: str) -> dict[str, GroupOptions]:
        data, _ = await self._catalog.notes.get(f"groups.{topic}")
        return {name: make(GroupOptions, options) for name, options in _groups(data).items()}

    async def ensure(
        self,
        topic: str,
        group: str,
        policy: GroupOptions | None,
        start: str | int | datetime,
        on_conflict: OnConflict = "raise",
    ) -> GroupOptions:
        """Make the group on every partition of the topic; its policy."""
        wanted = policy or GroupOptions()

        def step(data: bytes | None) -> tuple[bytes | None, tuple[GroupOptions, bool, bool]]:
            groups = _groups(data)
            if group not in groups:
                groups[group] = changed(wanted)
                return msgspec.json.encode(_Groups(groups)), (wanted, True, False)
            have = make(GroupOptions, groups[group])
            if policy is None or not differences(have, policy):
                return None, (have, False, False)
            if on_conflict == "raise":
                raise other_policy(topic, group, have, policy)
            logger.warning("group %s on %s has another policy: %s", group, topic, on_conflict)
            if on_conflict == "keep":
                return None, (have, False, False)
            groups[group] = changed(policy)
            return msgspec.json.encode(_Groups(groups)), (policy, False, True)

        found = await self._catalog.notes.change(f"groups.{topic}", step)
        chosen, is_new, is_edited = found
        partitions = self._catalog.topics[topic].partitions
        for partition in range(partitions):
            await self._make(topic, partition, group, chosen, start if is_new else "earliest")
            if is_edited:
                await self._update(topic, partition, group, chosen)
        if is_new or is_edited:
            await self._catalog.tell(News("group", topic, group))
        return chosen

    async def edit(self, topic: str, group: str, changes: dict[str, Any]) -> GroupOptions:
        def step(data: bytes | None) -> tuple[bytes | None, GroupOptions]:
            groups = _groups(data)
            if group not in groups:
                raise _no_group(topic, group)
            options = make(GroupOptions, {**groups[group], **changes})
            groups[group] = changed(options)
            return msgspec.json.encode(_Groups(groups)), options

        options = await self._catalog.notes.change(f"groups.{topic}", step)
        for partition in range(self._catalog.topics[topic].partitions):
            await self._update(topic, partition, group, options)
        await self._catalog.tell(News("group", topic, group))
        return options

    async def remove(self, topic: str, group: str) -> None:
        def step(data: bytes | None) -> tuple[bytes | None, None]:
            groups = _groups(data)
            if groups.pop(group, None) is None:
                raise _no_group(topic, group)
            return msgspec.json.encode(_Groups(groups)), None

        await self._catalog.notes.change(f"groups.{topic}", step)
        for partition in range(self._catalog.topics[topic].partitions):
            name = self._link.place.stream(topic, partition)
            await self._quietly(f"CONSUMER.DELETE.{name}.{flat(group)}")
        await self._quietly(f"CONSUMER.DELETE.{self._link.place.again}.{again_name(topic, group)}")
        await self._catalog.tell(News("group", topic, group))

    async def _quietly(self, call: str) -> None:
        try:
            await self._link.api(call)
        except NotFound:
            return

    # -- consumers -----------------------------------------------------------------------------

    async def info(self, topic: str, partition: int, group: str) -> ConsumerInfo:
        name = self._link.place.stream(topic, partition)
        return _info(await self._link.api(f"CONSUMER.INFO.{name}.{flat(group)}"))

    async def _make(
        self,
        topic: str,
        partition: int,
        group: str,
        policy: GroupOptions,
        start: str | int | datetime,
    ) -> None:
        try:
            await self.info(topic, partition, group)
        except NotFound:
            pass
        else:
            return
        first = await self.place_of(topic, partition, start)
        config = {
            **self._config(group, policy),
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": first,
        }
        await self._create(self._link.place.stream(topic, partition), config, "create")

    async def _update(self, topic: str, partition: int, group: str, policy: GroupOptions) -> None:
        stream = self._link.place.stream(topic, partition)
        answer = await self._link.api(f"CONSUMER.INFO.{stream}.{flat(group)}")
        have = msgspec.json.decode(answer)["config"]
        kept = {name: have[name] for name in ("deliver_policy", "opt_start_seq") if name in have}
        await self._create(stream, {**self._config(group, policy), **kept}, "update")

    def _config(self, group: str, policy: GroupOptions) -> dict[str, Any]:
        config: dict[str, Any] = {
            "durable_name": flat(group),
            "name": flat(group),
            "ack_policy": "explicit",
            "ack_wait": int(self.ack_wait_s(policy) * _NS),
            "max_deliver": -1,
            "max_ack_pending": 1 if policy.ordering == "partition" else -1,
            "metadata": {MARK: FORMAT},
        }
        if policy.ordering == "key":
            # One member at a time: only one that sees all of a key can keep its order.
            config["priority_groups"] = [PIN_GROUP]
            config["priority_policy"] = "pinned_client"
            config["priority_timeout"] = int(self.ack_wait_s(policy) * _NS)
        return config

    async def _create(self, stream: str, config: dict[str, Any], action: str) -> None:
        body = {"stream_name": stream, "config": config, "action": action}
        try:
            await self._link.api(f"CONSUMER.CREATE.{stream}.{config['name']}", body)
        except Exception as error:
            if getattr(error, "code", 0) not in _EXISTS:
                raise  # else another member made it just now

    async def place_of(self, topic: str, partition: int, start: str | int | datetime) -> int:
        """The offset of the first record that a group gets which begins at ``start``."""
        found = await stream_info(self._link, self._link.place.stream(topic, partition))
        first, end = max(found.state.first_seq, 1), found.state.last_seq + 1
        if isinstance(start, datetime):
            return await seek_time(self._link, topic, partition, start) or end
        if isinstance(start, int):
            return min(max(start, first), end)
        return first if start == "earliest" else end

    async def seek(self, topic: str, partition: int, group: str, to: int) -> None:
        stream = self._link.place.stream(topic, partition)
        await self._link.api(f"CONSUMER.RESET.{stream}.{flat(group)}", {"seq": to})

    async def pause(self, topic: str, partition: int, group: str, paused: bool) -> None:
        stream = self._link.place.stream(topic, partition)
        body = {"pause_until": _FAR} if paused else {}
        await self._link.api(f"CONSUMER.PAUSE.{stream}.{flat(group)}", body)

    async def unpin(self, topic: str, partition: int, group: str) -> None:
        stream = self._link.place.stream(topic, partition)
        try:
            await self._link.api(f"CONSUMER.UNPIN.{stream}.{flat(group)}", {"group": PIN_GROUP})
        except Exception as error:  # noqa: BLE001 -- another member is served a little later then
            logger.debug("unpin: %s", error)

    # -- redriven records ----------------------------------------------------------------------

    async def has_again(self, topic: str, group: str) -> bool:
        name = f"{self._link.place.again}.{again_name(topic, group)}"
        try:
            await self._link.api(f"CONSUMER.INFO.{name}")
        except NotFound:
            return False
        return True

    async def lag_again(self, topic: str, group: str) -> int:
        name = f"{self._link.place.again}.{again_name(topic, group)}"
        try:
            found = _info(await self._link.api(f"CONSUMER.INFO.{name}"))
        except NotFound:
            return 0
        return found.num_pending + found.num_ack_pending

    async def make_again(self, topic: str, group: str, policy: GroupOptions) -> None:
        """The stream of redriven records, and the group's consumer of its own."""
        place = self._link.place
        await create_stream(
            self._link,
            place.again,
            {
                "subjects": [f"{place.bus}.again.>"],
                "retention": "workqueue",
                "metadata": {MARK: FORMAT},
            },
        )
        name = again_name(topic, group)
        config = {
            "durable_name": name,
            "name": name,
            "ack_policy": "explicit",
            "ack_wait": int(self.ack_wait_s(policy) * _NS),
            "max_deliver": -1,
            "max_ack_pending": -1,
            "filter_subject": place.again_subject(topic, group),
            "metadata": {MARK: FORMAT},
        }
        body = {"stream_name": place.again, "config": config}
        call = f"CONSUMER.CREATE.{place.again}.{name}.{config['filter_subject']}"
        await self._link.api(call, body)


def _groups(data: bytes | None) -> dict[str, dict[str, Any]]:
    return {} if data is None else dict(msgspec.json.decode(data, type=_Groups).groups)


def _no_group(topic: str, group: str) -> NotFound:
    return NotFound(f"there is no group {group} on {topic}", topic=topic, group=group)
