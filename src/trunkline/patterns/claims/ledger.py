"""The state of all claims: a fold over their events, in which no clock has a say.

A claim is a ``coord.claim`` event and its fencing token is that event's position in the log. **A
claim is held when it was granted and no earlier claim that overlaps it is open.** An open claim
ends in the log and nowhere else: by a ``coord.release``, or by a later claim that names it and
whose time is past its expiry. So the log alone decides, and every process that reads it comes to
the same answer.

A claim is granted by its own event, unless the event says that it waits, or says how much of the
log its author had read (``seen``) and an overlapping claim lies between. Such a claim is a place in
the queue with a short lease; its living author renews the lease and grants it with a renewal when
its turn has come. A dead author does neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from trunkline.errors import InvalidEvent, InvalidName
from trunkline.files.globs import clean, overlap
from trunkline.files.ndjson import CLAIM, RELEASE, find_ts, parse_ts
from trunkline.patterns.claims.process import Process
from trunkline.units import write_time

WAIT_S: Final = 8  # seconds: the lease of a place in the queue
Json = dict[str, Any]


class Claim(NamedTuple):
    """``expires_at`` is None for a claim that only a release ends. A claim that names a ``process``
    also ends with it; while it waits it ends with its ``waiter``.
    """

    token: int
    paths: tuple[str, ...]
    actor: str
    intent: str
    claimed_at: datetime
    expires_at: datetime | None
    event_id: str
    waiting: bool = False
    ended: bool = False
    process: Process | None = None
    waiter: Process | None = None

    @property
    def path(self) -> str:
        return " ".join(self.paths)

    def is_expired(self, now: datetime) -> bool:
        return self.expires_at is not None and now >= self.expires_at

    def ended_process(self) -> Process | None:
        """The process that the claim ends with, if it has ended."""
        named = (self.process, self.waiter if self.waiting else None)
        return next((one for one in named if one is not None and one.is_gone()), None)

    def left_s(self, now: datetime) -> float | None:
        """Seconds until the lease ends."""
        return None if self.expires_at is None else (self.expires_at - now).total_seconds()

    def to_json(self, state: str) -> Json:
        return {
            "path": self.paths[0],
            "paths": list(self.paths),
            "actor": self.actor,
            "token": self.token,
            "state": state,
            "intent": self.intent,
            "claimed_at": write_time(self.claimed_at),
            "expires_at": write_time(self.expires_at) if self.expires_at else None,
        }


def overlap_any(some: Iterable[str], others: Iterable[str]) -> bool:
    others = tuple(others)
    return any(overlap(one, other) for one in some for other in others)


def contends(earlier: Claim, later: Claim) -> bool:
    """Whether the earlier claim keeps the later one waiting."""
    return (
        not earlier.ended
        and earlier.actor != later.actor
        and overlap_any(earlier.paths, later.paths)
    )


class ClaimLedger:
    """All claims by token, the ended ones too."""

    def __init__(self) -> None:
        self.claims: dict[int, Claim] = {}
        self._tokens: dict[str, int] = {}
        self._early: dict[int, list[Json]] = {}

    def apply(self, position: int, event: Json) -> None:
        """Take in one event. Anything but a well-formed claim or release changes nothing."""
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
                self._renew(event, payload, moment)
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
            if other.token < claim.token and contends(other, claim)
        ]

    def in_the_way(self, paths: Iterable[str], actor: str) -> list[Claim]:
        """The open claims that a new claim would have to wait for."""
        paths = tuple(paths)
        return [
            claim
            for claim in self.open()
            if claim.actor != actor and overlap_any(claim.paths, paths)
        ]

    def circle(self, waiting: Claim) -> list[Claim]:
        """The waiting claims that wait for each other, ``waiting`` first; empty without a circle.

        An actor waits for another if one of its waiting claims is kept waiting by an open claim of
        the other.
        """
        queued = [claim for claim in self.open() if claim.waiting]

        def search(path: list[Claim]) -> list[Claim]:
            for blocker in self.blockers(path[-1]):
                if blocker.actor == waiting.actor:
                    return path
                for claim in queued:
                    if claim.actor == blocker.actor and claim not in path:
                        found = search([*path, claim])
                        if found:
                            return found
            return []

        found = search([waiting])
        return found if len(found) > 1 else []

    # -- what is saved -----------------------------------------------------------------------------

    def dump(self) -> Json:
        """The open claims, and releases whose claims are still to come."""
        return {
            "claims": [
                {
                    "token": claim.token,
                    "paths": list(claim.paths),
                    "actor": claim.actor,
                    "intent": claim.intent,
                    "claimed_at": write_time(claim.claimed_at),
                    "expires_at": None
                    if claim.expires_at is None
                    else write_time(claim.expires_at),
                    "event_id": claim.event_id,
                    "waiting": claim.waiting,
                    "process": None if claim.process is None else claim.process.to_json(),
                    "waiter": None if claim.waiter is None else claim.waiter.to_json(),
                }
                for claim in self.open()
            ],
            "early": [event for events in self._early.values() for event in events],
        }

    def load(self, state: Json) -> None:
        """Take the place of what ``dump`` gave. ``ValueError`` if it is something else."""
        claims: dict[int, Claim] = {}
        try:
            for row in state["claims"]:
                expires = row["expires_at"]
                claims[int(row["token"])] = Claim(
                    token=int(row["token"]),
                    paths=tuple(map(clean, row["paths"])),
                    actor=str(row["actor"]),
                    intent=str(row["intent"]),
                    claimed_at=parse_ts(row["claimed_at"]),
                    expires_at=None if expires is None else parse_ts(expires),
                    event_id=str(row["event_id"]),
                    waiting=bool(row["waiting"]),
                    process=Process.of(row["process"]),
                    waiter=Process.of(row["waiter"]),
                )
            early = [dict(event) for event in state["early"]]
        except (KeyError, TypeError, InvalidEvent, InvalidName) as error:
            raise ValueError(f"not a state of claims: {error}") from error
        self.claims = claims
        self._tokens = {claim.event_id: claim.token for claim in claims.values()}
        self._early = {}
        for event in early:
            self._early.setdefault(event["payload"]["token"], []).append(event)

    # -- what an event does ------------------------------------------------------------------------

    def _claim(self, position: int, event: Json, payload: Json, moment: datetime) -> None:
        actor, paths = event.get("actor"), _paths(event, payload)
        if not paths or not isinstance(actor, str) or not actor:
            return
        event_id = str(event.get("event_id") or position)
        claim = Claim(
            token=position,
            paths=paths,
            actor=actor,
            intent=str(payload.get("intent", "edit")),
            claimed_at=moment,
            expires_at=_expiry(moment, event.get("ttl_s")),
            event_id=event_id,
            waiting=payload.get("waiting") is True,
            process=Process.of(payload.get("process")),
            waiter=Process.of(payload.get("waiter")),
        )
        if self._lost_a_race(claim, payload.get("seen")):
            claim = claim._replace(waiting=True, expires_at=_expiry(moment, WAIT_S))
        self.claims[position] = claim
        self._tokens[event_id] = position
        for release in self._early.pop(position, []):
            self._release(release, release["payload"], moment)

    def _lost_a_race(self, claim: Claim, seen: Any) -> bool:
        """Whether an overlapping claim came between what its author had read and this claim."""
        return isinstance(seen, int) and any(
            seen <= other.token < claim.token
            and other.actor != claim.actor
            and overlap_any(other.paths, claim.paths)
            for other in self.claims.values()
        )

    def _renew(self, event: Json, payload: Json, moment: datetime) -> None:
        token = payload["renews"]
        claim = self.claims.get(token) if isinstance(token, int) else None
        if claim is None or claim.ended or claim.actor != event.get("actor"):
            return
        if not claim.is_expired(moment):
            process = Process.of(payload.get("process"))
            self._set(
                claim,
                process=claim.process if process is None else process,
                expires_at=_expiry(moment, event.get("ttl_s")),
                waiting=claim.waiting and payload.get("waiting") is True,
            )

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
        paths = _paths(event, payload)
        for claim in self.open():
            if claim.paths == paths and claim.actor == actor and claim.claimed_at <= moment:
                self._set(claim, ended=True)

    def _set(self, claim: Claim, **changes: Any) -> None:
        self.claims[claim.token] = claim._replace(**changes)


def _paths(event: Json, payload: Json) -> tuple[str, ...]:
    """The paths of an event in their one spelling; none if one of them is no path."""
    found = payload.get("paths") or [payload.get("path") or event.get("scope")]
    if not isinstance(found, list) or not all(isinstance(path, str) for path in found):
        return ()
    try:
        return tuple(map(clean, found))
    except InvalidName:
        return ()


def _expiry(moment: datetime, ttl_s: Any) -> datetime | None:
    if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or ttl_s <= 0:
        return None
    try:
        return moment + timedelta(seconds=ttl_s)
    except OverflowError:
        return None


def _exact(ts: Any, at: Any) -> datetime | None:
    """The time of an event; ``at`` only adds the fraction of the second that ``ts`` lacks."""
    moment, exact = find_ts(ts), find_ts(at)
    if moment is None or exact is None:
        return moment
    return exact if timedelta(0) <= exact - moment < timedelta(seconds=1) else moment
