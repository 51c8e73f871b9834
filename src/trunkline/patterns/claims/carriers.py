"""The logs that carry claims: an NDJSON file, a bus folder, a bus behind a broker.

Each carrier also keeps a checkpoint, the state of the claims up to a position, so that the cost of
a command does not grow with the claims that have ended. A checkpoint is a cache: without it, or
with one that does not fit, the log is read from its beginning.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any, Final, Protocol

from trunkline.clock import SystemClock
from trunkline.errors import InvalidOption, TrunklineError
from trunkline.event import Event, Record
from trunkline.files import ndjson
from trunkline.files.ndjson import CLAIM, RELEASE
from trunkline.options import StoreOptions, TopicOptions, changed
from trunkline.patterns.claims.ledger import Json
from trunkline.units import write_time

CHECKPOINT: Final = "coord.checkpoint"
# A bridge marks each event that it brings from another log. There the event has another position,
# and its release names that one: so it is no claim here.
ORIGIN: Final = "trunkline-origin"
_VERSION: Final = 1
_KEPT: Final = TopicOptions(retention_records=1, compact=True)


class Carrier(Protocol):
    """A log that carries claims. ``read`` gives the events since the last call, in order, each with
    its position; positions rise and are never used twice.
    """

    @property
    def seen(self) -> int:
        """The position that the next claim would get, as far as ``read`` has come."""

    def append(self, event: Json) -> None: ...

    def read(self) -> Iterator[tuple[int, Json]]: ...

    def restore(self) -> Json | None:
        """The state at the last checkpoint; ``read`` goes on behind it."""

    def save(self, state: Json) -> None:
        """Keep the state of everything that ``read`` gave."""

    def close(self) -> None: ...


class NdjsonCarrier:
    """Claims in an NDJSON file; a token is a line number. The checkpoint lies beside the file."""

    def __init__(self, events_file: str = ndjson.EVENTS_FILE) -> None:
        self._file = events_file
        self._mark = ndjson.Mark()
        self._seen = 1

    @property
    def seen(self) -> int:
        return self._seen

    def append(self, event: Json) -> None:
        # The line's ts has whole seconds; a lease needs the fraction too.
        payload = {**event["payload"], "at": event["ts"]}
        whole = ndjson.format_ts(ndjson.parse_ts(event["ts"]))
        ndjson.publish({**event, "ts": whole, "payload": payload}, self._file)

    def read(self) -> Iterator[tuple[int, Json]]:
        while True:
            lines, self._mark = ndjson.read_batch(self._file, self._mark)
            if not lines:
                return
            for number, line in lines:
                self._seen = number + 1
                # Decoding is what costs, and most lines of a shared log are about something else.
                event = ndjson.decode_line(line) if b"coord." in line else None
                if event is None or event.get("topic") not in (CLAIM, RELEASE):
                    continue
                headers = event.get("headers")
                if not (isinstance(headers, dict) and ORIGIN in headers):
                    yield number, event

    @property
    def _checkpoint(self) -> str:
        folder, name = os.path.split(self._file)
        return os.path.join(folder, f".{name}.claims.json")

    def restore(self) -> Json | None:
        try:
            with open(self._checkpoint, encoding="utf-8") as file:
                found = json.load(file)
            if found["version"] != _VERSION:
                return None
            mark = ndjson.Mark(**found["mark"])
            seen = int(found["seen"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if not ndjson.fits(self._file, mark):  # the log was replaced by another one
            return None
        self._mark, self._seen = mark, seen
        state: Json = found["state"]
        return state

    def save(self, state: Json) -> None:
        from trunkline.log import atomic

        found = {"version": _VERSION, "mark": self._mark._asdict(), "seen": self._seen}
        text = json.dumps({**found, "state": state})
        atomic.replace_file(self._checkpoint, text.encode())

    def close(self) -> None:
        pass


class _TopicsCarrier:
    """Claims in the topics ``coord.claim`` and ``coord.release``; a token is an offset of the
    first, which therefore has one partition. The checkpoint is a topic beside them.
    """

    def __init__(self) -> None:
        self._next = {CLAIM: 1, RELEASE: 1}

    def _bounds(self, topic: str) -> tuple[int, int]:
        raise NotImplementedError

    def _read(self, topic: str, start: int) -> list[Record]:
        raise NotImplementedError

    def _publish(self, event: Event) -> None:
        raise NotImplementedError

    def _define(self, topic: str, options: TopicOptions) -> None:
        raise NotImplementedError

    @property
    def seen(self) -> int:
        return self._next[CLAIM]

    def append(self, event: Json) -> None:
        self._publish(
            Event(
                id=event["event_id"],
                ts=ndjson.parse_ts(event["ts"]),
                topic=event["topic"],
                type=event["topic"],
                actor=event["actor"],
                subject=event["scope"],
                key=event["scope"],
                ttl_s=event["ttl_s"],
                payload=event["payload"],
            )
        )

    def read(self) -> Iterator[tuple[int, Json]]:
        # Claims first: a release is of use only once its claim is known.
        for topic in (CLAIM, RELEASE):
            first, end = self._bounds(topic)
            self._next[topic] = max(self._next[topic], first)
            while self._next[topic] < end:
                for record in self._read(topic, self._next[topic]):
                    self._next[topic] = record.offset + 1
                    if ORIGIN not in record.event.headers:
                        yield record.offset, _as_line(record.event)

    def restore(self) -> Json | None:
        first, end = self._bounds(CHECKPOINT)
        if end == first:
            return None
        found = self._read(CHECKPOINT, end - 1)[-1].event.payload
        try:
            if found["version"] != _VERSION:
                return None
            following = {topic: int(found["next"][topic]) for topic in self._next}
            state: Json = found["state"]
        except (KeyError, TypeError, ValueError):
            return None
        if any(self._bounds(topic)[1] < at for topic, at in following.items()):
            return None  # the topics were made anew
        self._next = following
        return state

    def save(self, state: Json) -> None:
        if self._bounds(CHECKPOINT) == (1, 1):
            self._define(CHECKPOINT, _KEPT)
        payload = {"version": _VERSION, "next": dict(self._next), "state": state}
        self._publish(Event(topic=CHECKPOINT, type=CHECKPOINT, key="claims", payload=payload))

    def _check_partitions(self, defined: TopicOptions | None) -> None:
        if defined is not None and defined.partitions > 1:
            raise InvalidOption(
                f"{CLAIM} has {defined.partitions} partitions, claims need one order",
                name="partitions",
            )


class FolderCarrier(_TopicsCarrier):
    """Claims in a bus folder, without an event loop: a command starts quickly."""

    def __init__(self, path: str, *, create: bool, allow_network: bool) -> None:
        from trunkline.folder import Folder

        super().__init__()
        options = StoreOptions(create=create, allow_network=allow_network)
        self._folder = Folder(path, options, SystemClock())
        try:
            self._check_partitions(self._folder.topics().get(CLAIM))
        except BaseException:
            self._folder.close()
            raise

    def _bounds(self, topic: str) -> tuple[int, int]:
        return self._folder.bounds(topic, 0)

    def _read(self, topic: str, start: int) -> list[Record]:
        return self._folder.read(topic, 0, start, 1000)

    def _publish(self, event: Event) -> None:
        from trunkline.codec import encode_event

        body = encode_event(event, self._folder.options.limits)
        self._folder.append(event.topic, 0, [body], [event])

    def _define(self, topic: str, options: TopicOptions) -> None:
        self._folder.define(topic, options)

    def close(self) -> None:
        self._folder.close()


class BusCarrier(_TopicsCarrier):
    """Claims in any other bus, for example behind a broker."""

    def __init__(self, url: str, **options: Any) -> None:
        from trunkline.bus import sync

        super().__init__()
        self._bus = sync.open(url, **options)
        try:
            self._check_partitions(self._bus.topics().get(CLAIM))
        except BaseException:
            self._bus.close()
            raise

    def _bounds(self, topic: str) -> tuple[int, int]:
        return self._bus.bounds(topic)

    def _read(self, topic: str, start: int) -> list[Record]:
        return self._bus.read(topic, start)

    def _publish(self, event: Event) -> None:
        self._bus.publish(event)

    def _define(self, topic: str, options: TopicOptions) -> None:
        self._bus.define(topic, **changed(options))

    def save(self, state: Json) -> None:
        try:
            super().save(state)
        except TrunklineError:
            return  # this agent may not write it; the next one may

    def close(self) -> None:
        self._bus.close()


def _as_line(event: Event) -> Json:
    return {
        "event_id": event.id,
        "ts": write_time(event.ts),
        "topic": event.topic,
        "scope": event.subject or event.key,
        "actor": event.actor,
        "payload": event.payload,
        "ttl_s": event.ttl_s,
    }
