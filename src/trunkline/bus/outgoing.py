"""Frames on their way to a broker: what one turn of the loop says leaves in one message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from trunkline.batcher import Batcher
from trunkline.wire.frames import Ack, dump, join

_encode = msgspec.json.Encoder().encode
_COUNT = 32  # frames and events: the broker begins with them while there is more to say
_BYTES = 16 * 1024
_ACKS = 16  # of one subscription: more of them do not wait for each other
_Place = tuple[str, int, str]
_Event = tuple[str, int, bytes]  # topic, corr and event: events of one topic share a frame


class Outgoing:
    """``write`` sends one message. A message has at most ``together`` bytes, unless one frame alone
    is larger: a broker refuses a message by its size.
    """

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self.together = _BYTES
        self._write = write
        self._acks: dict[_Place, list[int]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._batch: Batcher[bytes | _Event] = Batcher(
            self._send, count_max=_COUNT, size_max=_BYTES
        )

    def put(self, frame: bytes) -> None:
        self._batch.add(frame, len(frame))

    def publish(self, topic: str, corr: int, event: bytes) -> None:
        self._batch.add((topic, corr, event), len(event))

    def ack(self, place: _Place, offset: int, linger_s: float | None) -> None:
        """Settle a delivery within ``linger_s``, so that one frame does for several."""
        mine = self._acks.setdefault(place, [])
        mine.append(offset)
        if not linger_s or len(mine) >= _ACKS:
            self._batch.plan()
        elif self._timer is None:  # it runs on while other frames leave: no ack waits for longer
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(linger_s, self._linger_ended)

    def _linger_ended(self) -> None:
        self._timer = None
        if self._acks:
            self._batch.plan()
            self._batch.flush()

    def flush(self) -> None:
        if self._acks:
            self._batch.plan()
        self._batch.flush()

    def clear(self) -> None:
        self._batch.clear()
        self._acks.clear()

    def halve(self) -> None:
        """Let messages be smaller from now on."""
        self.together //= 2
        self._batch.limit(self.together)

    def _send(self, items: list[bytes | _Event], _size: int) -> None:
        frames: list[bytes] = []
        events: list[_Event] = []
        for item in items:
            if isinstance(item, bytes):
                if events:
                    frames.append(_publish_frame(events))
                    events = []
                frames.append(item)
            else:
                if events and item[0] != events[0][0]:
                    frames.append(_publish_frame(events))
                    events = []
                events.append(item)
        if events:
            frames.append(_publish_frame(events))
        if self._acks:
            acks, self._acks = self._acks, {}
            frames += [_ack_frame(place, offsets) for place, offsets in acks.items()]
        if frames:
            self._write(join(frames))


def _publish_frame(events: list[_Event]) -> bytes:
    if len(events) == 1:
        _, corr, event = events[0]
        return b'{"type":"PUBLISH","corr":%d,"event":%b}' % (corr, event)
    corrs = [corr for _, corr, _ in events]
    bodies = b",".join([event for _, _, event in events])
    named = _encode(events[0][0]), _encode(corrs), bodies
    return b'{"type":"PUBLISH","topic":%b,"corrs":%b,"events":[%b]}' % named


def _ack_frame(place: tuple[str, int, str], offsets: list[int]) -> bytes:
    topic, partition, group = place
    return dump(
        Ack(
            topic=topic,
            partition=partition,
            group=group,
            offset=offsets[0],
            offsets=offsets[1:] or None,
        )
    )
