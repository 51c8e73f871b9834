"""One connection: frames in by ``receive``, frames out through its wire.

A session holds no rules of delivery. Each SUBSCRIBE is a subscription of the bus, each MESSAGE one
of its deliveries, each ACK or NACK that delivery's outcome. When the connection goes, so do its
subscriptions, and what it held is delivered to others at once.

``receive`` never waits. Publishes that arrive together are published together; what a client sends
faster than the bus can take is left in its socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any, Protocol

import msgspec

from trunkline import access
from trunkline.access import Principal
from trunkline.batcher import Batcher
from trunkline.broker.hub import Hub
from trunkline.broker.publisher import Publisher
from trunkline.broker.subscriber import Held, Subscriber
from trunkline.bus import Delivery, Outcome
from trunkline.delivery.deadletters import TRACEBACK
from trunkline.delivery.suspects import SuspectSlot
from trunkline.errors import (
    Closed,
    Conflict,
    Denied,
    NotFound,
    ProtocolError,
    TrunklineError,
)
from trunkline.names import SYSTEM_PREFIX
from trunkline.patterns.audit import settled
from trunkline.wire.cloudevents import read_cloudevents
from trunkline.wire.codes import failure_of
from trunkline.wire.frames import (
    Ack,
    Auth,
    Bad,
    Call,
    Corr,
    Credit,
    Extend,
    Frame,
    Nack,
    Ok,
    Ping,
    Pong,
    Publish,
    Subscribe,
    Unsubscribe,
    dump,
    join,
    read_asked,
)

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 64 * 1024
_ORDERS_MAX = 1000

# Close codes: those of RFC 6455, and 4401 where HTTP would say 401.
GOING_AWAY, POLICY, TRY_LATER, UNAUTHORIZED = 1012, 1008, 1013, 4401

Place = tuple[str, int, str]
Op = Callable[["Session", dict[str, Any]], Any]


class Wire(Protocol):
    """The connection, as a session sees it."""

    def send(self, data: bytes) -> None: ...

    def pending(self) -> int:
        """Bytes that the other side has not taken."""

    def pause(self) -> None:
        """Read no more for now."""

    def resume(self) -> None: ...

    def ping(self) -> None:
        """Ask whether the other side is alive; ``Session.alive`` hears the answer."""

    def close(self, code: int, reason: str, *, abort: bool = False) -> None:
        """Say goodbye, or with ``abort`` not even that."""


class SessionLife(Enum):
    OPEN = "open"
    LEAVING = "leaving"  # the broker ends the connection; ACKs are still taken
    CLOSED = "closed"


_OPEN, _LEAVING, _CLOSED = SessionLife  # a global name costs less than a member of an enum


class Session:
    def __init__(
        self,
        hub: Hub,
        wire: Wire,
        who: Principal | None,
        *,
        batch: bool = False,
        cloudevents: bool = False,
        ops: dict[str, Op] | None = None,
        client: str | None = None,
    ) -> None:
        self.hub = hub
        self.who = who or access.NOBODY
        self.is_known = who is not None
        self.batch = batch
        self.cloudevents = cloudevents
        self.credits: int | None = None
        self.held: dict[Place, dict[int, Held]] = {}
        self.writable = asyncio.Event()
        self.writable.set()
        self.slot = SuspectSlot()  # the client's
        self._wire = wire
        self._ops = ops or {}
        self._loop = asyncio.get_running_loop()
        self._subscribers: dict[str | tuple[str, str], Subscriber] = {}
        self._publisher = Publisher(self)
        self._taken_bytes = 0  # read since nothing was being published
        self._out: Batcher[bytes] = Batcher(self._send, size_max=_CHUNK_BYTES)
        self._said_bytes = 0
        self._orders: asyncio.Queue[Subscribe | Unsubscribe | Call | Credit] = asyncio.Queue()
        self._coming: list[str | None] = []  # the names in SUBSCRIBE and FLOW frames among these
        self._clerk: asyncio.Task[None] | None = None
        self._paused = False
        self.heard_at = hub.clock.monotonic()
        self._life: SessionLife = _OPEN
        self._settled = asyncio.Event()  # nothing is in the client's hands
        self._may: set[tuple[str, str]] = set()
        self._rights = hub.rights.version
        self._limbo: asyncio.TimerHandle | None = None
        self._name = client
        self._client: tuple[str, str] | None = None
        hub.sessions.add(self)
        hub.counts.connected += 1
        if self.is_known:
            self._follow()
        else:
            self._limbo = self._loop.call_later(hub.options.auth_timeout_s, self._unknown)

    # -- in --------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        """Take one wire message. A bad frame is answered and harms nothing else."""
        if self._life is _CLOSED:
            return
        self._taken_bytes += len(data)
        self.alive()
        frames = read_cloudevents(data) if self.cloudevents else read_asked(data)
        is_limited = self.hub.options.rate_frames_s > 0
        quick = self.is_known and not is_limited
        for frame in _each(frames) if is_limited else frames:
            try:
                if quick and type(frame) is Publish:
                    self._publisher.take(frame)
                else:
                    self._take(frame)
            except TrunklineError as error:
                self._answer(error, frame)
            except Exception:
                logger.exception("a frame could not be handled")
                self._answer(TrunklineError("internal error", code="internal"), frame)
        if self._publisher.underway and not self._has_room(self.hub.options.publish_inflight):
            self.hold_up()

    @property
    def label(self) -> str:
        """The agent, and the name that the client gave itself: for people."""
        return "/".join(filter(None, (self.who.agent, self._name)))

    def alive(self) -> None:
        """The client said something, if only that it is there."""
        self.heard_at = self.hub.clock.monotonic()
        for subscriber in self._subscribers.values():
            subscriber.heard()

    def probe(self) -> None:
        if self._life is not _CLOSED:
            self._wire.ping()

    def _answer(self, error: TrunklineError, frame: Any) -> None:
        topic = getattr(frame, "topic", None) or None
        for corr in getattr(frame, "corrs", None) or [frame.corr]:
            self.fail(error, corr, topic=topic, group=getattr(frame, "group", None))

    def _take(self, frame: Any) -> None:
        if isinstance(frame, Bad):
            self.hub.counts.bad_frames += 1
            raise frame.error
        if not self.is_known:
            self._introduce(frame)
            return
        wait_s = self.hub.rate(self.who)
        if wait_s and not isinstance(frame, Ack | Nack | Extend | Credit):
            raise Conflict("too many requests", code="rate", retry_s=round(wait_s, 3))
        match frame:
            case Publish():
                self._publisher.take(frame)
            case Ack():
                self._ack(frame)
            case Nack():
                self._nack(frame)
            case Subscribe() | Unsubscribe() | Call():
                self._order(frame)
            case Credit() if frame.sub in self._coming:
                self._order(frame)  # not for the one that had its name before
            case Credit():
                self._flow(frame)
            case Extend():
                self._extend(frame)
            case Ping():
                self.tell(Pong(corr=frame.corr))
            case Auth():
                self._introduce(frame)

    def _introduce(self, frame: Any) -> None:
        who = self.hub.rights.known(frame.token) if isinstance(frame, Auth) else None
        if who is None:
            self.hub.denied(self.who, "connect", "")
            self.fail(Denied("not authenticated", code="unauthenticated"), frame.corr, fatal=True)
            self.leave(UNAUTHORIZED, "not authenticated")
            return
        self.is_known = True
        if self._limbo is not None:
            self._limbo.cancel()
        self.tell(Ok(corr=frame.corr))
        self._become(who)
        self._follow()

    def _unknown(self) -> None:
        if not self.is_known:
            self.leave(UNAUTHORIZED, "not authenticated in time")

    def require(self, action: access.Action, topic: str, group: str = "") -> None:
        if (action, topic) in self._may and not group:
            return
        self.hub.require(self.who, action, topic, group)
        if not group and len(self._may) < 1000:
            self._may.add((action, topic))

    # -- how much is read --------------------------------------------------------------------------

    def hold_up(self) -> None:
        """Read no more for now; once the broker is closing, until the goodbye."""
        if not self._paused:
            self._paused = True
            self._wire.pause()

    def _has_room(self, publishes: int) -> bool:
        """Whether more may be read: by number, by size, and by what the client leaves unread."""
        size = self.hub.options.pending_bytes // 2
        return (
            self._publisher.underway < publishes and self._taken_bytes < size > self._wire.pending()
        )

    def let_go_on(self) -> None:
        if not self._publisher.underway:
            self._taken_bytes = 0
            if self._life is _CLOSED:
                self._forget_client()
        if (
            self._paused
            and self._has_room(self.hub.options.publish_inflight // 2)
            and self._orders.qsize() < _ORDERS_MAX
            and self._life is not _CLOSED
            and self.hub.is_open
        ):
            self._paused = False
            self._wire.resume()

    # -- what takes its time, in order -------------------------------------------------------------

    def _order(self, frame: Subscribe | Unsubscribe | Call | Credit) -> None:
        self._orders.put_nowait(frame)
        if isinstance(frame, Subscribe | Credit) and frame.sub:
            self._coming.append(frame.sub)
        if self._orders.qsize() >= _ORDERS_MAX:
            self.hold_up()
        if self._clerk is None:
            self._clerk = self.hub.spawn(self._work())

    async def _work(self) -> None:
        while not self._orders.empty():
            frame = self._orders.get_nowait()
            try:
                match frame:
                    case Subscribe():
                        await self._subscribe(frame)
                    case Unsubscribe():
                        await self._unsubscribe(frame)
                    case Call():
                        await self._call(frame)
                    case Credit():
                        self._flow(frame)
            except TrunklineError as error:
                self._answer(error, frame)
            except Exception:
                logger.exception("a frame could not be handled")
                self._answer(TrunklineError("internal error", code="internal"), frame)
            if isinstance(frame, Subscribe | Credit) and frame.sub:
                self._coming.remove(frame.sub)
            self.let_go_on()
        self._clerk = None

    async def _subscribe(self, frame: Subscribe) -> None:
        name = frame.sub or (frame.topic, frame.group)
        if self._life is _CLOSED:
            return
        if self._life is _LEAVING:
            raise Closed("the broker is closing", hint="connect again")
        if name in self._subscribers:
            raise Conflict(f"subscribed already: {frame.topic} as {frame.group}")
        if len(self._subscribers) >= self.hub.options.subscriptions:
            raise Conflict("too many subscriptions on one connection", code="too_many")
        self.require("subscribe", frame.topic, frame.group)
        if frame.where is not None:
            await self.hub.load_conditions()
        subscriber = Subscriber(self, frame)
        await subscriber.start()
        try:
            linger_s = await subscriber.linger_s()
        except BaseException:
            await subscriber.close()
            raise
        if self._life is _CLOSED:
            await subscriber.close()
            return
        self._subscribers[name] = subscriber
        answer = Ok(corr=frame.corr, topic=frame.topic, group=frame.group, sub=frame.sub)
        self.tell(msgspec.structs.replace(answer, linger_s=linger_s))
        self.flush()
        subscriber.begin()

    async def _unsubscribe(self, frame: Unsubscribe) -> None:
        name = frame.sub or (frame.topic, frame.group)
        subscriber = self._subscribers.pop(name, None)
        if subscriber is None:
            raise NotFound(f"not subscribed: {frame.topic} as {frame.group}")
        await subscriber.close(frame.unread or ())
        self.tell(Ok(corr=frame.corr, topic=frame.topic, group=frame.group, sub=frame.sub))

    async def _call(self, frame: Call) -> None:
        op = self._ops.get(frame.op)
        if op is None:
            raise ProtocolError(f"there is no {frame.op[:40]!r} to call", code="bad_frame")
        if "where" in frame.args:
            await self.hub.load_conditions()
        result = await op(self, frame.args)
        self.tell(Ok(corr=frame.corr, result=result))

    # -- deliveries --------------------------------------------------------------------------------

    def _ack(self, frame: Ack) -> None:
        """An ACK speaks of the open frame of its offset. With ``ack: "upto"`` it settles the frames
        that were sent before that one too, see ``trunkline.broker.sent``.
        """
        held = self.held.get((frame.topic, frame.partition, frame.group))
        count = 0
        first = held.get(frame.offset) if held else None
        if first is None:  # an ack of its own makes final what that of another covered
            self._uncover(frame)
        if held:
            found = first.subscriber.acked(first) if first is not None else []
            for one in found:
                self._let_go(one)
            for offset in frame.offsets or ():  # to name offsets is to ack each of them alone
                if (other := held.pop(offset, None)) is not None:
                    other.subscriber.close_frame(other)
                    found.append(other)
            self._drop_empty((frame.topic, frame.partition, frame.group))
            count = self._ack_all(frame, found)
        if frame.corr is not None:
            self.tell(Ok(corr=frame.corr, count=count))

    def _ack_all(self, frame: Ack, found: list[Held]) -> int:
        """Ack what was let go of; how many of these records were not finished before."""
        by_subscriber: dict[Subscriber, list[Held]] = {}
        for one in found:
            mine = by_subscriber.get(one.subscriber)
            if mine is None:
                mine = by_subscriber[one.subscriber] = []
            if one.delivery.outcome is None:
                mine.append(one)
        now, count = self.hub.clock.monotonic(), 0
        for subscriber, mine in by_subscriber.items():
            count += subscriber.subscription.inbox.ack_all([one.delivery for one in mine])
            if mine:
                held_s = [now - one.since for one in mine]
                self.hub.counts.finished(frame.topic, frame.group, "ack", held_s)
            if self.hub.options.audit:
                for one in mine:
                    self._audit(one, "ack", "", now)
            subscriber.refill()
        return count

    def _nack(self, frame: Nack) -> None:
        one = self.held.get((frame.topic, frame.partition, frame.group), {}).get(frame.offset)
        outcome = Outcome.TERM if frame.dead else Outcome.NACK
        reason = frame.reason or "nack"
        count = 0
        if one is not None:
            one.subscriber.heard_of(one)
            count += self.finish(one, outcome, frame.delay_s, reason)
            one.subscriber.refill()
        else:
            count += self._bring_back(frame, outcome, reason)
        if frame.corr is not None:
            self.tell(Ok(corr=frame.corr, count=count))

    def _bring_back(self, frame: Nack, outcome: Outcome, reason: str) -> int:
        """A NACK of a record that only the ACK of another one covered."""
        found = self._uncover(frame)
        if found is None:
            return 0
        subscriber, delivery = found
        subscriber.subscription.bring_back(delivery, outcome, frame.delay_s, reason)
        return 1

    def _uncover(self, frame: Ack | Nack) -> tuple[Subscriber, Delivery] | None:
        """The record of this frame, if only the ACK of another one covered it. It is no longer."""
        for subscriber in self._subscribers.values():
            if not subscriber.upto or subscriber.frame.group != frame.group:
                continue
            delivery = subscriber.uncover(frame.topic, frame.partition, frame.offset)
            if delivery is not None:
                return subscriber, delivery
        return None

    def _extend(self, frame: Extend) -> None:
        one = self.held.get((frame.topic, frame.partition, frame.group), {}).get(frame.offset)
        if one is not None:
            one.subscriber.extend(one)
        if frame.corr is not None:
            self.tell(Ok(corr=frame.corr, count=int(one is not None)))

    def _flow(self, frame: Credit) -> None:
        if frame.sub is not None:
            if subscriber := self._subscribers.get(frame.sub):
                subscriber.flow(frame.credits, frame.hands)
            if frame.corr is not None:
                self.tell(Ok(corr=frame.corr, sub=frame.sub))
            return
        self.credits = (self.credits or 0) + frame.credits
        self.refill()
        if frame.corr is not None:
            self.tell(Ok(corr=frame.corr, count=self.credits))

    def refill(self) -> None:
        for subscriber in self._subscribers.values():
            subscriber.refill()

    def forget(self, one: Held) -> None:
        record = one.delivery.record
        place = (record.event.topic, record.partition, one.delivery.group)
        mine = self.held.get(place)
        if mine is not None and mine.get(record.offset) is one:
            del mine[record.offset]
            self._drop_empty(place)

    def _drop_empty(self, place: tuple[str, int, str]) -> None:
        """Forget a place of which the client holds nothing more."""
        if place in self.held and not self.held[place]:
            del self.held[place]
            if not self.held:
                self._settled.set()

    def finish(
        self, one: Held, outcome: Outcome, delay_s: float | None = None, reason: str = ""
    ) -> bool:
        self._let_go(one)
        delivery = one.delivery
        done = delivery.finish(outcome, delay_s, reason)
        if done:
            now = self.hub.clock.monotonic()
            held_s = [now - one.since]
            self.hub.counts.finished(delivery.topic, delivery.group, outcome.value, held_s)
            if self.hub.options.audit:
                self._audit(one, outcome.value, reason, now)
        return done

    def _let_go(self, one: Held) -> None:
        self.forget(one)
        one.subscriber.let_go(one)

    def _audit(self, one: Held, outcome: str, reason: str, now: float) -> None:
        hub, delivery = self.hub, one.delivery
        if not delivery.topic.startswith(SYSTEM_PREFIX):
            facts = settled(delivery, now - one.since, hub.clock.now())
            told = reason.partition(TRACEBACK)[0]
            hub.system.audit(outcome, **facts, agent=self.who.agent, reason=told)

    @property
    def subscriptions(self) -> int:
        return len(self._subscribers)

    @property
    def inflight(self) -> int:
        return sum(map(len, self.held.values()))

    # -- out -------------------------------------------------------------------------------------

    def tell(self, frame: Frame) -> None:
        self.put(dump(frame))

    def put(self, data: bytes) -> None:
        """Send an encoded frame, with whatever else this turn of the loop says."""
        if self._life is _CLOSED:
            return
        self._out.add(data, len(data))

    def flush(self) -> None:
        self._out.flush()

    def _send(self, out: list[bytes], size: int) -> None:
        if self._life is _CLOSED:
            return
        # What was there before counts, not what is said now: one answer may be large.
        if self._wire.pending() > self.hub.options.pending_bytes:
            self.evict("too much is waiting for it")
            return
        self._said_bytes += size
        if self.batch:
            self._wire.send(join(out))
        else:
            for data in out:
                self._wire.send(data)

    @property
    def taken(self) -> int:
        """About how many bytes the other side has taken."""
        return self._said_bytes - self._wire.pending()

    def fail(self, error: TrunklineError, corr: Corr | None = None, **fields: Any) -> None:
        self.tell(failure_of(error, corr, **fields))

    def ended(self, subscriber: Subscriber, error: TrunklineError) -> None:
        """A subscription failed by itself."""
        frame = subscriber.frame
        self._subscribers.pop(frame.sub or (frame.topic, frame.group), None)
        self.fail(error, topic=frame.topic, group=frame.group, sub=frame.sub)
        self.hub.spawn(subscriber.close())

    def pause_writing(self) -> None:
        self.writable.clear()
        self.hold_up()

    def resume_writing(self) -> None:
        self.writable.set()
        self.let_go_on()

    def evict(self, why: str) -> None:
        """Let go of a consumer that does not keep up; the log keeps what it missed."""
        if self._life is _OPEN:
            self.hub.counts.evicted += 1
            self.hub.system.audit("evicted", agent=self.who.agent, reason=why)
            logger.warning("a slow consumer was evicted (%s): %s", self.who.agent, why)
            self.leave(TRY_LATER, "slow consumer", abort=True)

    # -- the end ---------------------------------------------------------------------------------

    def review(self) -> None:
        """Rights may have changed: hold this connection to those it has now."""
        if not self.is_known:
            return
        who = self.hub.rights.current(self.who)
        if who is None:
            self.fail(Denied("not authenticated", code="unauthenticated"), fatal=True)
            self.leave(UNAUTHORIZED, "no longer authenticated")
            return
        if who == self.who and self._rights == self.hub.rights.version:
            return
        self._become(who)

    def _become(self, who: Principal) -> None:
        """Hold this connection to the rights of ``who`` from here on."""
        self.who, self._rights = who, self.hub.rights.version
        self._may.clear()
        for subscriber in list(self._subscribers.values()):
            frame = subscriber.frame
            if not self.hub.allows(who, "subscribe", frame.topic, frame.group):
                self.ended(subscriber, Denied("access denied"))

    def leave(
        self, code: int = GOING_AWAY, reason: str = "the broker is closing", *, abort: bool = False
    ) -> None:
        """End the connection from this side. Where the broker closes, deliveries end at once, and
        ACKs are taken until the client holds nothing, goes, or the drain time is over.
        """
        if self._life is not _OPEN:
            return
        self._life = _LEAVING
        if code == GOING_AWAY and not abort:
            self.hub.spawn(self._drain(reason))
            return
        if not abort:
            self.flush()
        self._wire.close(code, reason, abort=abort)
        self.hub.spawn(self.close())

    async def _drain(self, reason: str) -> None:
        for subscriber in self._subscribers.values():
            subscriber.stop()
        if self.held:
            self._settled.clear()
            self._wire.resume()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.hub.options.drain_s or None):
                    await self._settled.wait()
        self.fail(Closed(reason), fatal=True)
        self.flush()
        self._wire.close(GOING_AWAY, reason)
        await self.close()

    def _follow(self) -> None:
        """Take the place of the connection that this client had before: one of the same agent, for
        a name alone proves nothing.
        """
        if self._name is not None and self._client is None:
            self._client = (self.who.agent, self._name)
            if (before := self.hub.clients.get(self._client)) is not None:
                before.succeed()
            self.hub.clients[self._client] = self

    def succeed(self) -> None:
        """Its client has a new connection, on which it says all of this again: what came on this
        one and is not on its way to the log would be there twice.
        """
        self._publisher.drop()
        self.leave(abort=True)

    def _forget_client(self) -> None:
        """As soon as there is nothing left that a new connection of it could say again."""
        if self._client is not None and not self._publisher.underway:
            if self.hub.clients.get(self._client) is self:
                del self.hub.clients[self._client]
            self._name = self._client = None

    async def close(self) -> None:
        """The connection is gone: give back what it held."""
        if self._life is _CLOSED:
            return
        self._life = _CLOSED
        if self._limbo is not None:
            self._limbo.cancel()
        self.hub.sessions.discard(self)
        self._forget_client()
        self.writable.set()
        self._settled.set()
        subscribers, self._subscribers = list(self._subscribers.values()), {}
        counts = self.hub.is_open  # a broker that closes is nobody's failure
        ends = [one.close(counts=counts, crashed=counts) for one in subscribers]
        await asyncio.gather(*ends)
        self.held.clear()


def _each(frames: Iterable[Any]) -> Iterator[Any]:
    """With several publishes in one frame as frames of their own, each of which has its rate."""
    for frame in frames:
        if type(frame) is Publish and frame.corrs and len(frame.corrs) == len(frame.events or ()):
            for corr, event in zip(frame.corrs, frame.events or (), strict=True):
                yield msgspec.structs.replace(frame, corrs=[corr], events=[event])
        else:
            yield frame
