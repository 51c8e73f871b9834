"""Quotas: so many events and bytes a second for each producer and for each space.

A quota is a bucket that fills at its rate and holds ``burst_s`` seconds of it. Over the quota,
``publish`` waits for its turn, or raises ``QuotaExceeded`` with the seconds to wait.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Literal

import msgspec

from trunkline.clock import Clock, SystemClock
from trunkline.codec import encode_value
from trunkline.errors import InvalidOption, QuotaExceeded
from trunkline.event import Event, Receipt
from trunkline.middleware import PublishNext
from trunkline.names import SYSTEM_PREFIX

_BUCKETS_MAX = 10_000


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """``events_s`` and ``bytes_s`` a second; None for no limit."""

    events_s: float | None = None
    bytes_s: float | None = None
    burst_s: float = 1.0

    def __post_init__(self) -> None:
        for name in ("events_s", "bytes_s", "burst_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidOption(f"{name} is a number above 0, not {value!r}", name=name)
        if self.events_s is None and self.bytes_s is None:
            raise InvalidOption("a rate has events_s, bytes_s or both", name="rate")


class _Bucket:
    """Room for ``burst`` at most. A debt is paid back by waiting, so one large batch passes."""

    __slots__ = ("_at", "_burst", "_left", "_per_s")

    def __init__(self, per_s: float, burst_s: float, now: float) -> None:
        self._per_s = per_s
        self._burst = max(1.0, per_s * burst_s)
        self._left = self._burst
        self._at = now

    def wait_s(self, now: float) -> float:
        """How long until something may be taken."""
        self._left = min(self._burst, self._left + (now - self._at) * self._per_s)
        self._at = now
        return 0.0 if self._left >= 1.0 else (1.0 - self._left) / self._per_s

    def take(self, amount: float) -> None:
        self._left -= amount


class Quota:
    """Publish middleware. A producer is ``event.actor``; events without one share a quota, and so
    do events without a space. System topics have no quota.
    """

    def __init__(
        self,
        *,
        producer: Rate | None = None,
        space: Rate | None = None,
        over: Literal["wait", "raise"] = "wait",
        clock: Clock | None = None,
    ) -> None:
        if over not in ("wait", "raise"):
            raise InvalidOption(f"over={over!r}", name="over", hint="wait or raise")
        if producer is None and space is None:
            raise InvalidOption("a quota is for producers, for spaces or for both", name="producer")
        self._rates = {"producer": producer, "space": space}
        self._over = over
        self._clock = clock or SystemClock()
        self._buckets: OrderedDict[tuple[str, str, str], _Bucket] = OrderedDict()
        self.throttled: Counter[tuple[str, str]] = Counter()  # events, by kind and name

    async def publish(self, events: list[Event], call_next: PublishNext) -> list[Receipt]:
        if not events[0].topic.startswith(SYSTEM_PREFIX):
            counts: Counter[tuple[str, str]] = Counter()
            sizes: Counter[tuple[str, str]] = Counter()
            weigh = any(rate and rate.bytes_s for rate in self._rates.values())
            for event in events:
                size = len(encode_value(event.payload)) if weigh else 0
                for who in (("producer", event.actor or ""), ("space", event.space or "")):
                    counts[who] += 1
                    sizes[who] += size
            await self._pass(counts, sizes)
        return await call_next(events)

    async def _pass(
        self, counts: Counter[tuple[str, str]], sizes: Counter[tuple[str, str]]
    ) -> None:
        wanted = [
            (bucket, amount, who)
            for who in counts
            for bucket, amount in self._of(who, counts[who], sizes[who])
        ]
        is_first = True
        while True:
            now = self._clock.monotonic()
            waits = [(bucket.wait_s(now), who) for bucket, _, who in wanted]
            longest, (kind, name) = max(waits, default=(0.0, ("", "")))
            if longest <= 0:
                break
            if is_first:
                self.throttled[kind, name] += counts[kind, name]
                is_first = False
            if self._over == "raise":
                raise QuotaExceeded(
                    f"{kind} {name or '(none)'} is over its quota",
                    hint=f"try again in {longest:.3g} s",
                    kind=kind,
                    name=name,
                    retry_after_s=longest,
                )
            await self._clock.sleep(longest)
        for bucket, amount, _ in wanted:  # nothing was awaited since the last look
            bucket.take(amount)

    def _of(self, who: tuple[str, str], count: int, size: int) -> list[tuple[_Bucket, float]]:
        rate = self._rates[who[0]]
        found = []
        if rate is not None and rate.events_s is not None:
            found.append((self._bucket(who, "events", rate.events_s, rate.burst_s), float(count)))
        if rate is not None and rate.bytes_s is not None:
            found.append((self._bucket(who, "bytes", rate.bytes_s, rate.burst_s), float(size)))
        return found

    def _bucket(self, who: tuple[str, str], what: str, per_s: float, burst_s: float) -> _Bucket:
        key = (*who, what)
        found = self._buckets.get(key)
        if found is None:
            found = self._buckets[key] = _Bucket(per_s, burst_s, self._clock.monotonic())
            if len(self._buckets) > _BUCKETS_MAX:
                self._buckets.popitem(last=False)
        else:
            self._buckets.move_to_end(key)
        return found
