"""Claims: leases on paths, which one actor holds until a time. Any append-only log carries them.

No lock is involved: an agent appends a claim, reads the log back, and sees whether it holds the
claim. ``ledger`` has the rules. Earlier claims go first, so waiting is a queue.

A holder that let its lease run out may still be open in the log, but it is not a holder: renewing,
releasing and ``verify`` refuse it, and the next one in the queue ends it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from typing import Any, Final, Literal, Protocol

from trunkline.clock import SystemClock
from trunkline.errors import Conflict, Denied, InvalidOption, NoBus, NotFound
from trunkline.files import ndjson
from trunkline.files.globs import clean, covers, expand
from trunkline.files.ndjson import CLAIM, RELEASE
from trunkline.patterns.claims.carriers import BusCarrier, Carrier, FolderCarrier, NdjsonCarrier
from trunkline.patterns.claims.ledger import WAIT_S, Claim, ClaimLedger, Json, contends
from trunkline.patterns.claims.process import Process
from trunkline.patterns.claims.table import check_actor, export_table, import_table
from trunkline.units import write_time

__all__ = [
    "TTL_S",
    "WAIT_S",
    "Claim",
    "Claims",
    "ClaimLedger",
    "NdjsonCarrier",
    "Process",
    "State",
    "check_actor",
    "export_table",
    "import_table",
    "open_claims",
]

TTL_S: Final = 600
POLL_S: Final = 0.1
_CHECKPOINT_EVERY: Final = 200  # events between two checkpoints
State = Literal["held", "waiting", "expired"]


class Time(Protocol):
    """The part of a clock that claims need."""

    def now(self) -> datetime: ...

    def monotonic(self) -> float: ...


class Claims:
    """Claims of one actor on one carrier. Close it when done."""

    def __init__(self, carrier: Carrier, actor: str, clock: Time | None = None) -> None:
        self.actor = check_actor(actor)
        self._carrier = carrier
        self._clock = clock or SystemClock()
        self._ledger = ClaimLedger()
        self._folded = 0  # events since the last checkpoint
        state = carrier.restore()
        if state is not None:
            self._ledger.load(state)

    def __enter__(self) -> Claims:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._folded >= _CHECKPOINT_EVERY:
                self._carrier.save(self._ledger.dump())
        finally:
            self._carrier.close()

    def claim(
        self,
        path: str,
        *more: str,
        ttl_s: int = TTL_S,
        intent: str = "edit",
        wait_s: float | None = 0,
        process: Process | None = None,
    ) -> Claim:
        """Hold all of the paths for ``ttl_s`` seconds, or none. Claiming again what one holds
        renews it.

        ``wait_s`` says how long to queue, None for ever. ``Conflict`` names the holder when that
        was not long enough, or when the wait would never end because the holder waits for this
        actor; the queue then keeps no place for it. A claim with a ``process`` ends with it.
        """
        paths = _paths((path, *more))
        if ttl_s < 1:
            raise InvalidOption(f"ttl_s={ttl_s}: a lease lasts a second at least", name="ttl_s")
        self._refresh()
        own = next((claim for claim in self._own() if claim.paths == paths), None)
        if own is not None:
            return self.renew(own.token, ttl_s=ttl_s)
        in_the_way = self._ledger.in_the_way(paths, self.actor)
        live = [claim for claim in in_the_way if not self._is_over(claim)]
        if wait_s == 0 and live:
            raise self._taken(paths, live)
        until = None if wait_s is None else self._clock.monotonic() + wait_s
        claim = self._enter(paths, ttl_s, intent, waiting=bool(live), process=process)
        return self._queue(claim, ttl_s, until)

    def renew(self, token: int, *, ttl_s: int = TTL_S, process: Process | None = None) -> Claim:
        """Extend a lease that has not run out. ``Denied`` when it has, or was never held. With a
        ``process`` the claim ends with that one from now on.
        """
        self.verify(token)
        self._append_renewal(self._ledger.claims[token], ttl_s, process=process)
        return self.verify(token)

    def verify(self, token: int, path: str | None = None) -> Claim:
        """The claim of ``token`` if it is held at this moment, and covers ``path`` if one is given.

        ``Denied`` otherwise. A resource asks this before it lets a holder in.
        """
        self._refresh()
        claim = self._ledger.claims.get(token)
        if claim is None:
            raise NotFound(f"there is no claim with token {token}", token=token)
        if path is not None and not any(covers(pattern, path) for pattern in claim.paths):
            raise Denied(f"claim {token} is on {claim.path}, not on {path}", token=token)
        if claim.ended or self._is_over(claim):
            raise Denied(
                f"claim {token} on {claim.path} by {claim.actor} has ended",
                token=token,
                hint="claim it again",
            )
        if claim.waiting or self._ledger.blockers(claim):
            raise Denied(f"claim {token} on {claim.path} is still waiting", token=token)
        return claim

    def release(
        self,
        *paths: str | None,
        token: int | None = None,
        mine: bool = False,
        force: bool = False,
    ) -> list[Claim]:
        """Give back the claims of this actor on one of ``paths``, under ``token``, or with ``mine``
        all of them; with ``force`` also the claims of others. ``NotFound`` when there is none.
        """
        self._refresh()
        wanted = _paths(path for path in paths if path is not None)
        now = self._clock.now()
        found = [
            claim
            for claim in self._ledger.open()
            if (force or claim.actor == self.actor)
            and (not wanted or claim.paths == wanted or set(claim.paths) & set(wanted))
            and (token is None or claim.token == token)
            and (force or not claim.is_expired(now))
        ]
        if not (wanted or token is not None or mine) or not (found or mine):
            what = f"token {token}" if not wanted else " ".join(wanted)
            raise NotFound(f"{self.actor} has no claim on {what}", hint="see: trunkline claims")
        for claim in found:
            self._leave(claim, force=force)
        self._refresh()
        return found

    def table(self, *, every: bool = False) -> list[tuple[Claim, State]]:
        """The open claims in the order of their tokens; those that ran out only with ``every``."""
        self._refresh()
        live = [claim for claim in self._ledger.open() if not self._is_over(claim)]
        rows: list[tuple[Claim, State]] = []
        for claim in self._ledger.open():
            if self._is_over(claim):
                rows.append((claim, "expired"))
            elif claim.waiting or any(c.token < claim.token and contends(c, claim) for c in live):
                rows.append((claim, "waiting"))
            else:
                rows.append((claim, "held"))
        return [row for row in rows if every or row[1] != "expired"]

    def conflicts(self, paths: Iterable[str]) -> list[tuple[str, Claim]]:
        """Which of ``paths`` somebody else holds."""
        held = [c for c, state in self.table() if state == "held" and c.actor != self.actor]
        return [(path, claim) for path in paths for claim in held if _covers(claim, path)]

    def unheld(self, paths: Iterable[str]) -> list[str]:
        """Which of ``paths`` this actor does not hold."""
        own = [c for c, state in self.table() if state == "held" and c.actor == self.actor]
        return [path for path in paths if not any(_covers(claim, path) for claim in own)]

    # -- the queue ---------------------------------------------------------------------------------

    def _own(self) -> list[Claim]:
        return [
            claim
            for claim in self._ledger.open()
            if claim.actor == self.actor
            and not claim.waiting
            and not self._is_over(claim)
            and not self._ledger.blockers(claim)
        ]

    def _enter(
        self,
        paths: tuple[str, ...],
        ttl_s: int,
        intent: str,
        *,
        waiting: bool,
        process: Process | None,
    ) -> Claim:
        """Append a claim, which takes its place in the queue, and read it back."""
        payload: Json = {"path": paths[0], "intent": intent, "seen": self._carrier.seen}
        if len(paths) > 1:
            payload["paths"] = list(paths)
        if waiting:
            payload["waiting"] = True
            if (waiter := Process.by_pid(os.getpid())) is not None:
                payload["waiter"] = waiter.to_json()
        if process is not None:
            payload["process"] = process.to_json()
        in_the_way = self._ledger.in_the_way(paths, self.actor)
        self._end_dead(in_the_way)
        if over := self._run_out(in_the_way):
            payload["supersedes"] = over
        event_id = self._new_id()
        try:
            lease_s = WAIT_S if waiting else ttl_s
            self._append(CLAIM, paths[0], payload, lease_s, event_id)
            self._refresh()
        except BaseException:
            self._refresh()  # a signal may have come right behind the append
            if (claim := self._ledger.by_event(event_id)) is not None:
                self._leave(claim)
            raise
        claim = self._ledger.by_event(event_id)
        if claim is None:
            raise NotFound("the claim was appended and cannot be read back", event_id=event_id)
        return claim

    def _queue(self, claim: Claim, ttl_s: int, until: float | None) -> Claim:
        try:
            while True:
                blockers = self._ledger.blockers(claim)
                if blockers:
                    self._wait(claim, blockers, until)
                    self._refresh()
                elif not claim.waiting:
                    return self.verify(claim.token)
                else:
                    self._append_renewal(claim, ttl_s)
                    with suppress(Denied):
                        return self.verify(claim.token)
                claim = self._ledger.claims[claim.token]
                if claim.ended or claim.is_expired(self._clock.now()):
                    # We stood still for longer than a lease: the place in the queue is gone.
                    claim = self._enter(
                        claim.paths, ttl_s, claim.intent, waiting=True, process=claim.process
                    )
        except BaseException:
            self._leave(claim)
            raise

    def _wait(self, claim: Claim, blockers: list[Claim], until: float | None) -> None:
        """One look at the claims in front: pass those that are over, else stay in line."""
        now = self._clock.now()
        if self._end_dead(blockers):
            return
        if over := self._run_out(blockers):
            self._append_renewal(claim, WAIT_S, supersedes=over, waiting=True)
            return
        if until is not None and self._clock.monotonic() >= until:
            raise self._taken(claim.paths, blockers, hint="it was waited for in vain")
        self._refuse_circle(claim)
        left_s = claim.left_s(now)
        if left_s is not None and left_s < WAIT_S / 2:
            self._append_renewal(claim, WAIT_S, waiting=True)
        time.sleep(POLL_S)

    def _refuse_circle(self, claim: Claim) -> None:
        """The youngest claim of a circle gives up: the others would wait for ever."""
        circle = self._ledger.circle(claim)
        if not circle or any(other.token > claim.token for other in circle):
            return
        told = "; ".join(f"{other.actor} waits for {other.path}" for other in circle)
        raise Conflict(
            f"waiting for {claim.path} would never end: {told}",
            path=claim.path,
            claim=self._ledger.blockers(claim)[0],
            circle=[other.actor for other in circle],
            hint="release what you hold, or claim all paths at once",
        )

    def _taken(
        self, paths: tuple[str, ...], blockers: list[Claim], hint: str = "wait for it with --wait"
    ) -> Conflict:
        holder = blockers[0]
        left_s = holder.left_s(self._clock.now())
        until = f" until {write_time(holder.expires_at)}" if holder.expires_at else ""
        return Conflict(
            f"{' '.join(paths)} is claimed: {holder.actor} holds {holder.path}{until}, "
            f"token {holder.token}",
            path=paths[0],
            claim=holder,
            left_s=left_s,
            ahead=len(blockers),
            hint=hint,
        )

    def _append_renewal(
        self,
        claim: Claim,
        ttl_s: int,
        *,
        supersedes: list[int] | None = None,
        waiting: bool = False,
        process: Process | None = None,
    ) -> None:
        payload: Json = {"path": claim.paths[0], "intent": claim.intent, "renews": claim.token}
        if process is not None:
            payload["process"] = process.to_json()
        if supersedes:
            payload["supersedes"] = supersedes
        if waiting:
            payload["waiting"] = True
        self._append(CLAIM, claim.paths[0], payload, ttl_s)

    def _leave(self, claim: Claim, *, force: bool = False, reason: str = "") -> None:
        payload: Json = {"path": claim.paths[0], "token": claim.token}
        if force and claim.actor != self.actor:
            payload["force"] = True
        if reason:
            payload["reason"] = reason
        self._append(RELEASE, claim.paths[0], payload, TTL_S)

    def _end_dead(self, claims: list[Claim]) -> bool:
        """Release the claims whose process has ended; whether there was one."""
        dead = False
        for claim in claims:
            process = None if claim.ended else claim.ended_process()
            if process is not None:
                self._leave(claim, force=True, reason=f"process {process.pid} has ended")
                dead = True
        if dead:
            self._refresh()
        return dead

    def _is_over(self, claim: Claim) -> bool:
        """Whether its lease has run out or its process has ended."""
        return claim.is_expired(self._clock.now()) or claim.ended_process() is not None

    def _run_out(self, claims: list[Claim]) -> list[int]:
        now = self._clock.now()
        return [claim.token for claim in claims if not claim.ended and claim.is_expired(now)]

    # -- the log -----------------------------------------------------------------------------------

    def _new_id(self) -> str:
        return f"evt_{self._clock.now():%Y%m%dT%H%M%SZ}_{os.urandom(6).hex()}"

    def _append(
        self, topic: str, path: str, payload: Json, ttl_s: int, event_id: str | None = None
    ) -> None:
        now = self._clock.now()
        event_id = event_id or self._new_id()
        self._carrier.append(
            {
                "event_id": event_id,
                "ts": write_time(now),
                "topic": topic,
                "scope": path,
                "actor": self.actor,
                "payload": payload,
                "ttl_s": ttl_s,
                "idempotency_key": event_id,
            }
        )

    def _refresh(self) -> None:
        for position, event in self._carrier.read():
            self._ledger.apply(position, event)
            self._folded += 1


def _paths(patterns: Iterable[str]) -> tuple[str, ...]:
    """The one spelling of each path, with braces expanded, each once."""
    return tuple(dict.fromkeys(clean(one) for pattern in patterns for one in expand(pattern)))


def _covers(claim: Claim, path: str) -> bool:
    return any(covers(pattern, path) for pattern in claim.paths)


def open_claims(
    url: str,
    actor: str,
    clock: Time | None = None,
    *,
    create: bool = True,
    allow_network: bool = False,
    **options: Any,
) -> Claims:
    """Claims carried by ``ndjson:FILE``, ``file:FOLDER`` or any other bus, for example ``ws://…``,
    for which ``options`` are those of ``connect``.

    ``NoBus`` when there is nothing at that place and ``create`` is off.
    """
    scheme, _, place = url.partition(":")
    carrier: Carrier
    if scheme == "ndjson":
        file = os.path.expanduser(place) or ndjson.EVENTS_FILE
        if not create and not os.path.exists(file):
            raise NoBus(f"there is no event log at {file}", path=file)
        carrier = NdjsonCarrier(file)
    elif scheme == "file":
        from trunkline.log.layout import folder_path

        carrier = FolderCarrier(folder_path(place), create=create, allow_network=allow_network)
    else:
        carrier = BusCarrier(url, **options)
    try:
        return Claims(carrier, actor, clock)
    except BaseException:
        carrier.close()
        raise
