"""Encryption at rest: payloads are sealed before the append and opened before the handler.

A sealed payload is a compact JWE in place of the payload; the header ``jwe`` names its data key and
the rest of the event stays as it is, so grep, filters on meta, retention and compaction work as
ever. Everything between publisher and handler carries the sealed payload: the log, dead letters,
bridges, backups, the lake. A null payload, which is a tombstone, stays null; of a refusal the
reason, which a handler wrote, is sealed in place of it.

The key is that of the event's space, or with ``per="subject"`` that of the space's subject, if the
event has one. Shredding it erases every payload that it sealed.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Collection, Sequence
from typing import Any, Final, Literal

import msgspec

from trunkline.bus import Delivery
from trunkline.codec import check_value, decode_payload, encode_value
from trunkline.crypto.jwe import Sealer, data_key, header_of
from trunkline.crypto.keyring import KeyRing, open_payload
from trunkline.errors import (
    Erased,
    InvalidEvent,
    InvalidOption,
    Reject,
    Retry,
    TrunklineError,
    WrongKey,
)
from trunkline.event import Event, Receipt, Record
from trunkline.guard.order import GuardReject, check_order
from trunkline.middleware import HandleNext, PublishNext
from trunkline.names import SYSTEM_PREFIX, is_dead, matches
from trunkline.options import Limits

HEADER: Final = "jwe"
_REFUSAL: Final = "error"  # the header of an answer that is a refusal
_WITHHELD: Final = "the reason is withheld"
_decode = msgspec.json.Decoder().decode
_DEPTH: Final = Limits().depth


class HandlerFailed(TrunklineError):
    """A handler of a sealed event failed; its text, which may quote the payload, is withheld."""


class Vault:
    """Middleware for both sides. Guards of publishing stand before it, guards of handling behind:
    ``[redactor, policy, vault, quarantine]``. So all of them see the plain payload.

    ``topics`` are the patterns of the topics to seal, all by default; those below ``system`` only
    by patterns that begin with it. ``withhold_errors`` keeps the
    text of an error that a handler raised over a sealed event out of logs and dead letters, since
    it may quote the payload; the error's type is kept.
    """

    stage: Final = "seal"

    def __init__(
        self,
        ring: KeyRing,
        *,
        per: Literal["space", "subject"] = "space",
        topics: Collection[str] = (">",),
        withhold_errors: bool = True,
    ) -> None:
        if per not in ("space", "subject"):
            raise InvalidOption(f"per is space or subject, not {per!r}", name="per")
        self.ring = ring
        self._by_subject = per == "subject"
        self._topics = tuple(topics)
        self._withhold = withhold_errors
        self._sealers: dict[tuple[str, str], Sealer] = {}

    def placed(self, outer: Sequence[object]) -> None:
        check_order(self.stage, outer)

    # -- sealing -------------------------------------------------------------------------------

    def seal(self, event: Event) -> Event:
        """The event with its payload sealed; the same object if there is nothing to seal."""
        if self.ring.refresh():
            self._sealers.clear()
        return self._seal(event)

    def _seal(self, event: Event) -> Event:
        if not self._is_mine(event.topic):
            return event
        if event.payload is None:
            if event.key is not None or event.headers.get(_REFUSAL, _WITHHELD) == _WITHHELD:
                return event
            headers = {**event.headers, _REFUSAL: _WITHHELD}
            reason = {_REFUSAL: event.headers[_REFUSAL]}
            event = msgspec.structs.replace(event, payload=reason, headers=headers)
        if HEADER in event.headers:
            _check_sealed(event)  # a bridge carries it
            return event
        owner = event.space or "", (event.subject or "") if self._by_subject else ""
        sealer = self._sealers.get(owner)
        if sealer is None or not sealer.is_mine:
            key = self.ring.newest(*owner)
            if len(self._sealers) > 10_000:
                self._sealers.clear()
            sealer = self._sealers[owner] = Sealer(key.id, key.secret)
        text = sealer.seal(_plain(event.payload), event.id, event.topic)
        headers = {**event.headers, HEADER: sealer.kid}
        return msgspec.structs.replace(event, payload=text, headers=headers)

    def secret(self, space: str, subject: str) -> bytes:
        """32 bytes that stay the same until the owner's key is shredded, whatever is rotated. What
        is derived with them, such as the id of a memory, says nothing after that.
        """
        owner = space, subject if self._by_subject else ""
        self.ring.newest(*owner)  # made when it is first asked for
        return data_key(self.ring.keys_of(*owner)[0].secret, b"secret")

    def _is_mine(self, topic: str) -> bool:
        if topic.startswith(SYSTEM_PREFIX):  # what the bus says about itself, unless it is named
            return any(p.startswith(SYSTEM_PREFIX) and matches(p, topic) for p in self._topics)
        return self._topics == (">",) or any(matches(one, topic) for one in self._topics)

    async def publish(self, events: list[Event], call_next: PublishNext) -> list[Receipt]:
        if self.ring.refresh():
            self._sealers.clear()
        return await call_next([self._seal(event) for event in events])

    # -- opening -------------------------------------------------------------------------------

    def open(self, event: Event) -> Event:
        """The event with its payload opened; the same object if it is not sealed. ``KeyMissing``,
        ``WrongKey`` and ``Erased`` say why it cannot be.
        """
        return open_event(event, self.ring)

    def open_record(self, record: Record) -> Record:
        return Record(self.open(record.event), record.partition, record.offset)

    async def opened(self, deliveries: AsyncIterable[Delivery]) -> AsyncIterator[Delivery]:
        """The deliveries of a subscription with their payloads opened."""
        async for delivery in deliveries:
            yield _opened(delivery, self.open(delivery.event))

    async def handle(self, delivery: Delivery, call_next: HandleNext) -> Any:
        sealed = delivery.event
        if HEADER not in sealed.headers:
            return await call_next(delivery)
        try:
            event = self.open(sealed)
        except Erased as error:
            raise Reject(error.message) from None  # it never opens again
        if not self._withhold:
            return await call_next(_opened(delivery, event))
        try:
            return await call_next(_opened(delivery, event))
        except Retry as signal:
            raise Retry(signal.delay_s) from None
        except GuardReject:
            raise  # a guard's reason quotes no payload
        except Reject:
            raise Reject("rejected: the reason is withheld") from None
        except Exception as error:  # noqa: BLE001 -- a handler may fail in any way
            said = f"{type(error).__name__}: the text is withheld"
            raise HandlerFailed(said).with_traceback(error.__traceback__) from None


def open_event(event: Event, ring: KeyRing) -> Event:
    """The event with its payload opened by the keys of a ring."""
    if HEADER not in event.headers:
        return event
    plain = open_payload(
        event.payload,
        ring,
        id=event.headers.get("dlq-id", event.id) if is_dead(event.topic) else event.id,
        topic=event.headers.get("dlq-topic", "") if is_dead(event.topic) else event.topic,
        space=event.space or "",
        subject=event.subject or "",
    )
    headers = {name: value for name, value in event.headers.items() if name != HEADER}
    payload = _decode(plain)
    if headers.get(_REFUSAL) == _WITHHELD and isinstance(payload, dict):
        headers[_REFUSAL], payload = str(payload.get(_REFUSAL, _WITHHELD)), None
    return msgspec.structs.replace(event, payload=payload, headers=headers)


def _opened(delivery: Delivery, event: Event) -> Delivery:
    """A delivery of the opened event. It settles the one that is given, which stays sealed: a dead
    letter is written from that.
    """

    return delivery.with_event(event)


def _plain(payload: Any) -> bytes:
    """The payload as JSON; ``InvalidEvent`` for what the bus itself would refuse."""
    if isinstance(payload, msgspec.Raw):
        payload = decode_payload(bytes(payload))
    try:
        plain = encode_value(payload)
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise InvalidEvent(f"the payload is no JSON value: {error}", field="payload") from None
    # Both are rare, and a walk costs more than the encoding: look only on a sign of them.
    if plain.count(b"[") + plain.count(b"{") > _DEPTH or b"null" in plain:
        check_value(payload, _DEPTH)
    return plain


def _check_sealed(event: Event) -> None:
    """Refuse a plain payload that only claims to be sealed: it would be on disk in plain text."""
    try:
        kid = header_of(event.payload).kid
    except WrongKey:
        kid = ""
    if not kid or kid != event.headers[HEADER]:
        raise InvalidEvent(
            f"the header {HEADER} belongs to sealed payloads, and this payload is not sealed",
            field="headers",
            hint="leave the header out",
        )
