"""Publish bytes by subject."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from trunkline.bus import Bus
from trunkline.errors import Closed
from trunkline.event import Event, Receipt, new_id
from trunkline.names import check_topic
from trunkline.options import TopicFields
from trunkline.pubsub.hooks import Hook, tell
from trunkline.pubsub.message import FORM, check_subject, payload_of
from trunkline.pubsub.streams import ensure_stream


class Publisher:
    """Publishes to one stream. ``prefix`` goes before every subject. ``on_publish`` is called after
    every attempt, failed ones included.

    The stream is made with ``options`` if it is not there, unless ``create`` is False.
    """

    def __init__(
        self,
        bus: Bus,
        stream: str,
        *,
        prefix: str | None = None,
        on_publish: Hook | None = None,
        create: bool = True,
        options: TopicFields | None = None,
    ) -> None:
        self._bus = bus
        self._stream = check_topic(stream)
        self._prefix = None if prefix is None else check_subject(prefix)
        self._on_publish = on_publish
        self._create = create
        self._options = options
        self._ready = False
        self._closed = False

    async def publish(
        self,
        subject: str,
        data: bytes,
        *,
        key: str | None = None,
        id: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> Receipt:
        """Publish one message; returns once it is durable."""
        started = time.perf_counter()
        whole = f"{self._prefix}.{subject}" if self._prefix is not None else subject
        error: BaseException | None = None
        try:
            return await self._publish(whole, data, key, id, headers)
        except BaseException as failure:
            error = failure
            raise
        finally:
            tell(self._on_publish, whole, error, time.perf_counter() - started)

    async def _publish(
        self,
        subject: str,
        data: bytes,
        key: str | None,
        name: str | None,
        headers: dict[str, str] | None,
    ) -> Receipt:
        if self._closed:
            raise Closed("the publisher is closed")
        check_subject(subject)
        payload, form = payload_of(data)
        event = Event(
            id=name or new_id(),
            topic=self._stream,
            subject=subject,
            key=key,
            payload=payload,
            headers={**(headers or {}), FORM: form},
        )
        if not self._ready:
            await ensure_stream(self._bus, self._stream, self._create, self._options)
            self._ready = True
        return await self._bus.publish(event)

    async def close(self) -> None:
        """Publish nothing more. The bus stays open."""
        self._closed = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
