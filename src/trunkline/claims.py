"""Claims: who may touch which paths, until when. Leases on globs, carried by any append-only log.

A claim is a ``coord.claim`` event and its fencing token is that event's position in the log. **A
claim is held when no earlier claim that overlaps it is open.** An open claim ends in the log and
nowhere else: by a ``coord.release``, or by a later claim that names it and whose time is past its
expiry, as the log had it at that point. So the log alone decides, every process that reads it comes
to the same answer, and no lock is needed: append, read back, and see whether you hold it. Because
earlier claims go first, claims that overlap are granted in the order of their tokens, and waiting
is a queue.

A holder that let its lease run out may still be open in the log, but it is not a holder: renewing,
releasing and ``verify`` refuse it, and the next one in the queue ends it.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, Protocol

from trunkline import sync
from trunkline.clock import SystemClock
from trunkline.errors import (
    Conflict,
    Denied,
    InvalidEvent,
    InvalidName,
    InvalidOption,
    NoBus,
    NotFound,
)
from trunkline.event import Event
from trunkline.files import ndjson
from trunkline.files.globs import clean, covers, overlap
from trunkline.files.ndjson import CLAIM, RELEASE

TTL_S: Final = 600
POLL_S: Final = 0.1
Json = dict[str, Any]
State = Literal["held", "waiting", "expired"]

_ROW = re.compile(r"^\|?\s*([^|]+?)\s*\|\s*([^|]+?)\s*\|\s*([^|]+?)\s*(?:\|.*)?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """``expires_at`` is None for a claim that only a release ends."""

    token: int
    path: str
    actor: str
    intent: str
    claimed_at: datetime
    expires_at: datetime | None
    event_id: str
    ended: bool = False

    def is_expired(self, now: datetime) -> bool:
        return self.expires_at is not None and now >= self.expires_at

    def to_json(self, state: str) -> Json:
        return {
            "path": self.path,
            "actor": self.actor,
            "token": self.token,
            "state": state,
            "intent": self.intent,
            "claimed_at": _iso(self.claimed_at),
            "expires_at": _iso(self.expires_at) if self.expires_at else None,
        }


class Time(Protocol):
    """The part of a clock that claims need."""

    def now(self) -> datetime: ...

    def monotonic(self) -> float: ...


class Carrier(Protocol):
    """A log that carries claims. ``read`` gives what was appended since the last call, in order,
    each with its position; positions rise and are never used twice.
    """

    def append(self, event: Json) -> None: ...

    def read(self) -> Iterator[tuple[int, Json]]: ...

    def close(self) -> None: ...


class Ledger:
    """The state of all claims: a fold over their events, in which no clock has a say."""

    def __init__(self) -> None:
        self.claims: dict[int, Claim] = {}
        self._tokens: dict[str, int] = {}
        self._early: dict[int, list[Json]] = {}

    def apply(self, position: int, event: Json) -> None:
        """Take in one event. What is no claim or release, or a malformed one, changes nothing."""
        payload = event.get("payload")
        if not isinstance(payload, dict):
            return
        moment = _exact(event.get("ts"), payload.get("at"))
        if moment is None:
            return
        if event.get("topic") == RELEASE:
            self._release(event, payload, moment)
        elif event.get("topic") == CLAIM:
            self._supersede(payload.get("supersedes"), moment)
            if "renews" in payload:
                self._renew(event, payload["renews"], moment)
            else:
                self._claim(position, event, payload, moment)

    def by_event(self, event_id: str) -> Claim | None:
        return self.claims.get(self._tokens.get(event_id, 0))

    def open(self) -> list[Claim]:
        return [claim for claim in self.claims.values() if not claim.ended]

    def blockers(self, claim: Claim) -> list[Claim]:
        """The open claims that go before ``claim``: earlier ones of others that overlap it."""
        return [
            other
            for other in self.claims.values()
            if other.token < claim.token and _contends(other, claim)
        ]

    def in_the_way(self, path: str, actor: str) -> list[Claim]:
        """The open claims that a new claim would have to wait for."""
        return [
            claim for claim in self.open() if claim.actor != actor and overlap(claim.path, path)
        ]

    def _claim(self, position: int, event: Json, payload: Json, moment: datetime) -> None:
        path, actor = payload.get("path") or event.get("scope"), event.get("actor")
        if not isinstance(path, str) or not isinstance(actor, str) or not actor:
            return
        try:
            path = clean(path)
        except InvalidName:
            return
        event_id = str(event.get("event_id") or position)
        claim = Claim(
            token=position,
            path=path,
            actor=actor,
            intent=str(payload.get("intent", "edit")),
            claimed_at=moment,
            expires_at=_expiry(moment, event.get("ttl_s")),
            event_id=event_id,
        )
        self.claims[position] = claim
        self._tokens[event_id] = position
        for release in self._early.pop(position, []):
            self._release(release, release["payload"], moment)

    def _renew(self, event: Json, token: Any, moment: datetime) -> None:
        claim = self.claims.get(token) if isinstance(token, int) else None
        if claim is None or claim.ended or claim.actor != event.get("actor"):
            return
        if not claim.is_expired(moment):
            self._set(claim, expires_at=_expiry(moment, event.get("ttl_s")))

    def _supersede(self, seen: Any, moment: datetime) -> None:
        for token in seen if isinstance(seen, list) else ():
            claim = self.claims.get(token) if isinstance(token, int) else None
            # A renewal that came first moved the expiry: then nothing has run out.
            if claim is not None and claim.is_expired(moment):
                self._set(claim, ended=True)

    def _release(self, event: Json, payload: Json, moment: datetime) -> None:
        actor, token = event.get("actor"), payload.get("token")
        force = payload.get("force") is True
        if isinstance(token, int):
            claim = self.claims.get(token)
            if claim is None:  # two topics have no common order: its claim is still to come
                self._early.setdefault(token, []).append(event)
            elif force or claim.actor == actor:
                self._set(claim, ended=True)
            return
        path = payload.get("path") or event.get("scope")
        try:
            path = clean(path) if isinstance(path, str) else ""
        except InvalidName:
            return
        for claim in self.open():
            if claim.path == path and claim.actor == actor and claim.claimed_at <= moment:
                self._set(claim, ended=True)

    def _set(self, claim: Claim, **changes: Any) -> None:
        self.claims[claim.token] = replace(claim, **changes)


class Claims:
    """Claims of one actor on one carrier. Close it when done."""

    def __init__(self, carrier: Carrier, actor: str, clock: Time | None = None) -> None:
        self.actor = check_actor(actor)
        self._carrier = carrier
        self._clock = clock or SystemClock()
        self._ledger = Ledger()

    def __enter__(self) -> Claims:
        return self

    def __exit__(self, *_: object) -> None:
        self._carrier.close()

    def claim(
        self, path: str, *, ttl_s: int = TTL_S, intent: str = "edit", wait_s: float | None = 0
    ) -> Claim:
        """Hold ``path`` for ``ttl_s`` seconds. Claiming again what one holds renews it.

        ``wait_s`` says how long to queue for it, None for ever; ``Conflict`` names who holds it
        when that was not long enough, and leaves nothing behind.
        """
        path = clean(path)
        if ttl_s < 1:
            raise InvalidOption(f"ttl_s={ttl_s}: a lease lasts a second at least", name="ttl_s")
        self._refresh()
        own = next((claim for claim in self._own() if claim.path == path), None)
        if own is not None:
            return self.renew(own.token, ttl_s=ttl_s)
        if wait_s == 0:
            self._refuse(path)
        until = None if wait_s is None else self._clock.monotonic() + wait_s
        return self._queue(self._enter(path, ttl_s, intent), ttl_s, until)

    def renew(self, token: int, *, ttl_s: int = TTL_S) -> Claim:
        """Extend a lease that has not run out. ``Denied`` when it has, or was never held."""
        self.verify(token)
        self._append_renewal(self._ledger.claims[token], ttl_s)
        return self.verify(token)

    def verify(self, token: int, path: str | None = None) -> Claim:
        """The claim of ``token`` if it is held at this moment, and covers ``path`` if one is given.

        ``Denied`` otherwise: what a resource asks before it lets a holder in.
        """
        self._refresh()
        claim = self._ledger.claims.get(token)
        if claim is None:
            raise NotFound(f"there is no claim with token {token}", token=token)
        if path is not None and not covers(claim.path, path):
            raise Denied(f"claim {token} is on {claim.path}, not on {path}", token=token)
        if claim.ended or claim.is_expired(self._clock.now()):
            raise Denied(
                f"claim {token} on {claim.path} by {claim.actor} has ended",
                token=token,
                hint="claim it again",
            )
        if self._ledger.blockers(claim):
            raise Denied(f"claim {token} on {claim.path} is still waiting", token=token)
        return claim

    def release(
        self, path: str | None = None, *, token: int | None = None, force: bool = False
    ) -> list[Claim]:
        """Give back what this actor claimed on ``path`` or under ``token``; with ``force``, what
        anyone did. ``NotFound`` when there is nothing of it left.
        """
        self._refresh()
        wanted = None if path is None else clean(path)
        now = self._clock.now()
        found = [
            claim
            for claim in self._ledger.open()
            if (force or claim.actor == self.actor)
            and (wanted is None or claim.path == wanted)
            and (token is None or claim.token == token)
            and (force or not claim.is_expired(now))
        ]
        if not found or (path is None and token is None):
            what = f"token {token}" if path is None else path
            raise NotFound(f"{self.actor} has no claim on {what}", hint="see: trunkline claims")
        for claim in found:
            self._leave(claim, force=force)
        self._refresh()
        return found

    def table(self, *, every: bool = False) -> list[tuple[Claim, State]]:
        """The open claims in the order of their tokens, those that ran out only with ``every``."""
        self._refresh()
        now = self._clock.now()
        live = [claim for claim in self._ledger.open() if not claim.is_expired(now)]
        rows: list[tuple[Claim, State]] = []
        for claim in self._ledger.open():
            if claim.is_expired(now):
                rows.append((claim, "expired"))
            elif any(c.token < claim.token and _contends(c, claim) for c in live):
                rows.append((claim, "waiting"))
            else:
                rows.append((claim, "held"))
        return [row for row in rows if every or row[1] != "expired"]

    def conflicts(self, paths: Iterable[str]) -> list[tuple[str, Claim]]:
        """Which of ``paths`` someone else holds."""
        held = [c for c, state in self.table() if state == "held" and c.actor != self.actor]
        return [(path, claim) for path in paths for claim in held if covers(claim.path, path)]

    def _own(self) -> list[Claim]:
        now = self._clock.now()
        return [
            claim
            for claim in self._ledger.open()
            if claim.actor == self.actor
            and not claim.is_expired(now)
            and not self._ledger.blockers(claim)
        ]

    def _refuse(self, path: str) -> None:
        now = self._clock.now()
        for claim in self._ledger.in_the_way(path, self.actor):
            if not claim.is_expired(now):
                raise _taken(path, claim)

    def _enter(self, path: str, ttl_s: int, intent: str) -> Claim:
        """Append a claim, which takes its place in the queue, and read it back."""
        payload: Json = {"path": path, "intent": intent}
        over = self._run_out(self._ledger.in_the_way(path, self.actor))
        if over:
            payload["supersedes"] = over
        event_id = self._append(CLAIM, path, payload, ttl_s)
        self._refresh()
        claim = self._ledger.by_event(event_id)
        if claim is None:
            raise NotFound("the claim was appended and cannot be read back", event_id=event_id)
        return claim

    def _queue(self, claim: Claim, ttl_s: int, until: float | None) -> Claim:
        waited = False
        try:
            while True:
                if blockers := self._ledger.blockers(claim):
                    waited = True
                    self._wait(claim, ttl_s, blockers, until)
                    self._refresh()
                elif not waited:
                    return claim
                else:
                    with suppress(Denied):
                        return self.renew(claim.token, ttl_s=ttl_s)
                claim = self._ledger.claims[claim.token]
                if claim.ended or claim.is_expired(self._clock.now()):
                    # We stood still for longer than a lease: the place in the queue is gone.
                    claim = self._enter(claim.path, ttl_s, claim.intent)
        except BaseException:
            self._leave(claim)
            raise

    def _wait(self, claim: Claim, ttl_s: int, blockers: list[Claim], until: float | None) -> None:
        """One look at who is in front: pass those whose time is up, else stay in line."""
        now = self._clock.now()
        if self._run_out(blockers):
            self._append_renewal(claim, ttl_s, blockers)
        elif until is not None and self._clock.monotonic() >= until:
            raise _taken(claim.path, blockers[0], hint="it was waited for in vain")
        else:
            if claim.expires_at and claim.expires_at - now < timedelta(seconds=ttl_s / 2):
                self._append_renewal(claim, ttl_s)
            time.sleep(POLL_S)

    def _append_renewal(self, claim: Claim, ttl_s: int, over: list[Claim] | None = None) -> None:
        payload: Json = {"path": claim.path, "intent": claim.intent, "renews": claim.token}
        supersedes = self._run_out(over or [])
        if supersedes:
            payload["supersedes"] = supersedes
        self._append(CLAIM, claim.path, payload, ttl_s)

    def _leave(self, claim: Claim, *, force: bool = False) -> None:
        payload: Json = {"path": claim.path, "token": claim.token}
        if force and claim.actor != self.actor:
            payload["force"] = True
        self._append(RELEASE, claim.path, payload, TTL_S)

    def _run_out(self, claims: list[Claim]) -> list[int]:
        now = self._clock.now()
        return [claim.token for claim in claims if claim.is_expired(now)]

    def _append(self, topic: str, path: str, payload: Json, ttl_s: int) -> str:
        now = self._clock.now()
        event_id = f"evt_{now:%Y%m%dT%H%M%SZ}_{secrets.token_hex(6)}"
        self._carrier.append(
            {
                "event_id": event_id,
                "ts": _iso(now),
                "topic": topic,
                "scope": path,
                "actor": self.actor,
                "payload": payload,
                "ttl_s": ttl_s,
                "idempotency_key": event_id,
            }
        )
        return event_id

    def _refresh(self) -> None:
        for position, event in self._carrier.read():
            self._ledger.apply(position, event)


class NdjsonCarrier:
    """Claims in an NDJSON file; a token is a line number."""

    def __init__(self, events_file: str = ndjson.EVENTS_FILE) -> None:
        self._file = events_file
        self._mark = ndjson.Mark()

    def append(self, event: Json) -> None:
        # The line's ts has whole seconds; a lease needs to be exact to the one that waits for it.
        payload = {**event["payload"], "at": event["ts"]}
        whole = ndjson.format_ts(ndjson.parse_ts(event["ts"]))
        ndjson.publish({**event, "ts": whole, "payload": payload}, self._file)

    def read(self) -> Iterator[tuple[int, Json]]:
        while True:
            lines, self._mark = ndjson.read_batch(self._file, self._mark)
            if not lines:
                return
            for number, line in lines:
                # Decoding is what costs, and most lines of a shared log are about something else.
                event = ndjson.decode_line(line) if b"coord." in line else None
                if event is not None and event.get("topic") in (CLAIM, RELEASE):
                    yield number, event

    def close(self) -> None:
        pass


class BusCarrier:
    """Claims in the topics ``coord.claim`` and ``coord.release`` of a bus; a token is an offset of
    the first, which therefore has one partition.
    """

    def __init__(self, url: str, *, create: bool = True, allow_network: bool = False) -> None:
        is_folder = not url.startswith(("ws://", "wss://"))  # else the folder is the broker's
        options = {"create": create, "allow_network": allow_network} if is_folder else {}
        self._bus = sync.open(url, **options)
        self._next = {CLAIM: 1, RELEASE: 1}
        defined = self._bus.topics().get(CLAIM)
        if defined is not None and defined.partitions > 1:
            self._bus.close()
            raise InvalidOption(
                f"{CLAIM} has {defined.partitions} partitions, claims need one order",
                name="partitions",
            )

    def append(self, event: Json) -> None:
        self._bus.publish(
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
            first, end = self._bus.bounds(topic)
            self._next[topic] = max(self._next[topic], first)
            while self._next[topic] < end:
                for record in self._bus.read(topic, self._next[topic]):
                    self._next[topic] = record.offset + 1
                    yield record.offset, _as_line(record.event)

    def close(self) -> None:
        self._bus.close()


def open_claims(
    url: str,
    actor: str,
    clock: Time | None = None,
    *,
    create: bool = True,
    allow_network: bool = False,
) -> Claims:
    """Claims carried by ``ndjson:FILE`` or by any bus: ``file:FOLDER``, ``ws://…``.

    ``NoBus`` when there is nothing at that place and ``create`` is off.
    """
    scheme, _, place = url.partition(":")
    if scheme == "ndjson":
        file = os.path.expanduser(place) or ndjson.EVENTS_FILE
        if not create and not os.path.exists(file):
            raise NoBus(f"there is no event log at {file}", path=file)
        return Claims(NdjsonCarrier(file), actor, clock)
    return Claims(BusCarrier(url, create=create, allow_network=allow_network), actor, clock)


def check_actor(actor: str) -> str:
    if not actor or any(ord(char) < 32 for char in actor):
        raise InvalidName(f"not an actor: {actor!r}", name=actor)
    return actor


def import_table(text: str) -> list[tuple[str, str, datetime]]:
    """(path, actor, time) of every row of a ``coord_claims.md``: ``path | actor | time``, with or
    without bars around it. Headings, rulers and anything else are passed over.
    """
    found: list[tuple[str, str, datetime]] = []
    for line in text.splitlines():
        row = _ROW.match(line.strip())
        moment = _moment(row.group(3)) if row else None
        if row is None or moment is None:
            continue
        with suppress(InvalidName):
            found.append((clean(row.group(1).strip("`")), check_actor(row.group(2)), moment))
    return found


def export_table(rows: Iterable[tuple[Claim, State]], *, header: bool = False) -> str:
    """Who holds what as lines of a ``coord_claims.md``; a heading makes it a Markdown table, which
    the programs that read the bare lines would complain about.
    """
    lines = ["path | actor | claimed at", "--- | --- | ---"] if header else []
    lines += [
        f"{claim.path} | {claim.actor} | {ndjson.format_ts(claim.claimed_at)}"
        for claim, state in rows
        if state == "held" and "|" not in claim.path + claim.actor
    ]
    return "".join(line + "\n" for line in lines)


def _as_line(event: Event) -> Json:
    return {
        "event_id": event.id,
        "ts": _iso(event.ts),
        "topic": event.topic,
        "scope": event.subject or event.key,
        "actor": event.actor,
        "payload": event.payload,
        "ttl_s": event.ttl_s,
    }


def _contends(earlier: Claim, later: Claim) -> bool:
    return not earlier.ended and earlier.actor != later.actor and overlap(earlier.path, later.path)


def _taken(path: str, claim: Claim, hint: str = "wait for it with --wait") -> Conflict:
    until = f" until {_iso(claim.expires_at)}" if claim.expires_at else ""
    return Conflict(
        f"{path} is claimed: {claim.actor} holds {claim.path}{until}, token {claim.token}",
        path=path,
        claim=claim,
        hint=hint,
    )


def _expiry(moment: datetime, ttl_s: Any) -> datetime | None:
    if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or ttl_s <= 0:
        return None
    try:
        return moment + timedelta(seconds=ttl_s)
    except OverflowError:
        return None


def _moment(text: Any) -> datetime | None:
    if not isinstance(text, str):
        return None
    try:
        return ndjson.parse_ts(text)
    except InvalidEvent:
        return None


def _exact(ts: Any, at: Any) -> datetime | None:
    """The time of an event; ``at`` only adds the fraction of the second that ``ts`` lacks."""
    moment, exact = _moment(ts), _moment(at)
    if moment is None or exact is None:
        return moment
    return exact if timedelta(0) <= exact - moment < timedelta(seconds=1) else moment


def _iso(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")
