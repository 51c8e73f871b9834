"""Figures of a bus, read from what is stored: no process that publishes or handles is asked.

``measure`` gives the same families to ``trunkline metrics``, to a Prometheus collector and to
any other caller. Names that begin with ``events_`` are those of the older programs; ``NAMES`` says
which stands for which.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from importlib import metadata
from typing import Any, Final, NamedTuple, TypeVar

from trunkline.bus import Bus, GroupInfo
from trunkline.bus.local import LocalBus
from trunkline.delivery.deadletters import DESK, is_hidden, keeps_books
from trunkline.errors import OutOfRange, TrunklineError
from trunkline.event import Record
from trunkline.middleware.flags import FlagChange
from trunkline.names import AUDIT, DEAD_SUFFIX, FLAGS, GroupKey, is_dead
from trunkline.options import TopicOptions
from trunkline.patterns.topic_table import TopicTable
from trunkline.store.file import FileStore
from trunkline.store.spans import BOUNDS, Spans

T = TypeVar("T")
_LOOK = 2_000  # records of one group that are looked at for those that are not due
_READ = 1000
_AT_ONCE = 50

# Each conventional name, and the older name that tells the same.
NAMES: Final = {
    "trunkline_published_total": "events_publish_count",
    'trunkline_settled_total{outcome="ack"}': "events_handle_ok_total",
    'trunkline_settled_total{outcome!="ack"}': "events_handle_err_total",
    "trunkline_dlq_total": "events_dlq_total",
    "trunkline_process_duration_seconds": "events_handle_latency_seconds",
    "trunkline_storage_full": "events_storage_full",
}
_BY_MIDDLEWARE: Final = {
    name.partition("{")[0].removesuffix("_total") for pair in NAMES.items() for name in pair
} | {"trunkline_feature_enabled"}


class Sample(NamedTuple):
    name: str
    labels: Mapping[str, str]
    value: float


class Family(NamedTuple):
    """One metric: ``kind`` is counter, gauge or histogram."""

    name: str
    kind: str
    about: str
    samples: list[Sample]


class Families:
    """Metrics as they are gathered, by name."""

    def __init__(self) -> None:
        self._found: dict[str, Family] = {}

    def add(self, name: str, kind: str, about: str, value: float, **labels: str) -> None:
        family = self._found.setdefault(name, Family(name, kind, about, []))
        family.samples.append(Sample(name, labels, value))

    def histogram(self, name: str, about: str, spans: Spans, **labels: str) -> None:
        family = self._found.setdefault(name, Family(name, "histogram", about, []))
        count = 0
        for bound, more in zip(BOUNDS, spans.counts, strict=True):
            count += more
            le = "+Inf" if bound == float("inf") else f"{bound:g}"
            family.samples.append(Sample(f"{name}_bucket", {**labels, "le": le}, count))
        family.samples.append(Sample(f"{name}_sum", labels, spans.total_s))
        family.samples.append(Sample(f"{name}_count", labels, count))

    def all(self) -> list[Family]:
        return [self._found[name] for name in sorted(self._found)]


async def measure(
    bus: Bus,
    outboxes: Mapping[str, Callable[[], int]] | None = None,
    *,
    audit: bool = True,
    groups_max: int = 1000,
    groups: Sequence[GroupInfo] | None = None,
    scans: Scans | None = None,
    turn: Callable[[], Awaitable[None]] | None = None,
) -> list[Family]:
    """The figures of a bus. ``outboxes`` has, by name, a function that counts the waiting rows.
    With ``audit`` the outcomes and durations of the audit are summed up, which reads all of it.
    ``turn`` is awaited between two topics or groups. Groups beyond ``groups_max`` are counted.
    ``groups`` has all groups, hidden ones too, where the caller knows them already; ``scans``
    saves the next call from reading what this one has read.
    """
    found = Families()
    turn = turn or _go_on
    topics = await all_topics(bus)
    now = bus.clock.now()
    if groups is None:
        desks = [one for one in await bus.groups(group=DESK) if keeps_books(_key(one))]
        groups = [*await bus.groups(), *desks]
    # A desk that nobody has used yet has closed no letter.
    closed = {one.topic: one for one in groups if keeps_books(_key(one))}
    groups = [one for one in groups if not is_hidden(_key(one))]
    # A bus asks for all topics to check a partition's number, which is known to be one here.
    bounds = bus.store.bounds if isinstance(bus, LocalBus) else bus.bounds
    for topic, options in sorted(topics.items()):
        await turn()
        records = 0
        for partition in range(options.partitions):
            _, end = await bounds(topic, partition)
            records += end - 1
        if is_dead(topic):
            of = topic.removesuffix(DEAD_SUFFIX)
            for name in ("trunkline_dlq_total", "events_dlq_total"):
                found.add(
                    name,
                    "counter",
                    "Dead letters of a topic that were ever written",
                    records,
                    topic=of,
                )
            letters = closed[topic].lag if topic in closed else records
            about = "Dead letters that are neither redriven nor dropped"
            found.add("trunkline_open_letters", "gauge", about, letters, topic=of)
        else:
            found.add(
                "trunkline_published_total",
                "counter",
                "Events that were ever appended to the log of a topic",
                records,
                topic=topic,
            )
            found.add(
                "events_publish_count",
                "gauge",
                "The older name of trunkline_published_total",
                records,
                topic=topic,
            )
    scans = scans or Scans()
    for info in groups[:groups_max]:
        await turn()
        ahead = await scans.ahead(bus, info, now, turn)
        _measure_group(found, info, ahead, now)
    scans.forget_unused()
    dropped = float(max(0, len(groups) - groups_max))
    found.add(
        "trunkline_series_dropped",
        "gauge",
        "Groups and partitions beyond those whose figures are shown",
        dropped,
    )
    for name, count in (outboxes or {}).items():
        waiting = await asyncio.to_thread(count)
        about = "Rows that wait to be published"
        found.add("trunkline_outbox_waiting", "gauge", about, waiting, outbox=name)
    found.add(
        "trunkline_build_info",
        "gauge",
        "Always 1; the labels say which version runs on which Python",
        1.0,
        version=_version(),
        python=platform.python_version(),
    )
    health = await bus.health()
    full = float(bool(health.get("events_storage_full")))
    for name in ("trunkline_storage_full", "events_storage_full"):
        found.add(name, "gauge", "1 while there is no room to publish", full)
    if (free := health.get("free_bytes")) is not None:
        found.add("trunkline_free_bytes", "gauge", "Room on the device of the folder", float(free))
    store = bus.store if isinstance(bus, LocalBus) else None
    if isinstance(store, FileStore):
        about = "Size of all log files in the folder, those of dead letters too"
        found.add(
            "trunkline_stored_bytes",
            "gauge",
            about,
            await asyncio.to_thread(_stored, store.folder.path),
        )
        about = "Bytes that this process has appended to logs since it began"
        found.add(
            "trunkline_published_bytes_total", "counter", about, store.committer.appended_bytes
        )
        about = "Time that a sync of a log took in this process; one for each batch of publishes"
        found.histogram("trunkline_fsync_duration_seconds", about, store.committer.syncs)
    if FLAGS in topics:
        await _measure_flags(bus, found)
    if audit and AUDIT in topics:
        await _measure_audit(bus, found)
    return found.all()


def _version() -> str:
    try:
        return metadata.version("trunkline")
    except metadata.PackageNotFoundError:  # it runs from a folder of sources
        return "unknown"


def _stored(path: str) -> float:
    total = 0
    for place in ("wal", "dlq"):
        with contextlib.suppress(OSError), os.scandir(os.path.join(path, place)) as found:
            for one in found:
                with contextlib.suppress(OSError):  # retention removed it meanwhile
                    total += one.stat().st_size
    return float(total)


async def all_topics(bus: Bus) -> dict[str, TopicOptions]:
    """As ``bus.topics()``; a folder of many is listed beside the loop."""
    store = bus.store if isinstance(bus, LocalBus) else None
    if isinstance(store, FileStore):
        return await beside(store, store.folder.topics)
    return await bus.topics()


async def beside(store: FileStore, look: Callable[[], T]) -> T:
    """What a folder says, asked in a thread; an error of the system as its store tells it."""
    try:
        return await asyncio.to_thread(look)
    except OSError as error:
        raise store.folder.storage_error(error) from error


async def _go_on() -> None:
    """Nobody else waits for the loop."""


def _key(info: GroupInfo) -> GroupKey:
    return GroupKey(info.topic, info.partition, info.group)


def _measure_group(
    found: Families, info: GroupInfo, ahead: tuple[int, float], now: datetime
) -> None:
    labels = {"topic": info.topic, "partition": str(info.partition), "group": info.group}
    found_ahead, oldest_s = ahead
    late = 0 if info.scheduled else found_ahead  # the lag leaves out those that the group knows
    scheduled = info.scheduled or found_ahead
    ready = max(0, info.lag - info.leases - info.waiting - late)
    next_due_s = max(0.0, (info.next_due or 0.0) - now.timestamp())
    figures = {
        "lag_records": ("Records that are due and not settled", info.lag - late),
        "ready_records": ("Records that can be delivered now", ready),
        "scheduled_records": ("Records that are not due yet", scheduled + info.waiting),
        "next_due_seconds": (
            "Time until the first scheduled record is due; 0 without one",
            next_due_s,
        ),
        "in_flight_records": ("Records in consumers' hands", info.leases),
        "members": ("Members that are subscribed, idle ones too", info.members),
        "oldest_age_seconds": ("Age of the oldest record that is not settled", oldest_s),
    }
    for name, (about, value) in figures.items():
        found.add(f"trunkline_group_{name}", "gauge", about, float(value), **labels)


class _Scan:
    """What was read from where a group stands on."""

    def __init__(self, start: int) -> None:
        self.next = start
        self.seen = 0
        self.oldest: datetime | None = None
        self.later: list[datetime] = []  # when those are due that were not

    def add(self, records: Sequence[Record], now: datetime) -> None:
        if self.oldest is None:
            self.oldest = records[0].event.ts
        due = (one.event.not_before for one in records)
        self.later += [at for at in due if at is not None and at > now]
        self.seen += len(records)
        self.next = records[-1].offset + 1


class Scans:
    """Reads ahead of groups. Those that stand at the same record share what was read, also in the
    next round, for as long as they stand there.
    """

    def __init__(self) -> None:
        self._before: dict[tuple[str, int, int], _Scan] = {}
        self._now: dict[tuple[str, int, int], _Scan] = {}

    def forget_unused(self) -> None:
        """Forget what nobody asked for since the last call."""
        self._before, self._now = self._now, {}

    async def ahead(
        self, bus: Bus, info: GroupInfo, now: datetime, turn: Callable[[], Awaitable[None]]
    ) -> tuple[int, float]:
        """How many unsettled records are not due, and the age of the first one."""
        if not info.lag:
            return 0, 0.0
        local = bus.store if isinstance(bus, LocalBus) else None
        place = info.topic, info.partition
        first, _ = await (bus.bounds(*place) if local is None else local.bounds(*place))
        start = max(info.floor + 1, first)
        at = *place, start
        scan = self._now[at] = self._now.get(at) or self._before.get(at) or _Scan(start)
        while scan.seen < min(_LOOK, info.lag + _READ):
            try:
                if local is None:
                    records = await bus.read(place[0], scan.next, _READ, partition=place[1])
                else:  # on this loop: not many at once
                    records = await local.read(*place, scan.next, _AT_ONCE)
            except OutOfRange:
                break
            if not records:
                break
            scan.add(records, now)
            await turn()
        scheduled = sum(at > now for at in scan.later)
        oldest_s = 0.0 if scan.oldest is None else max(0.0, (now - scan.oldest).total_seconds())
        return min(scheduled, info.lag), oldest_s


async def _measure_flags(bus: Bus, found: Families) -> None:
    """The flags that were ever set, as they were set last."""
    last: dict[str, FlagChange] = {}
    table = TopicTable(bus, FLAGS, FlagChange, lambda change: last.update({change.flag: change}))
    await table.refresh()
    for flag, change in sorted(last.items()):
        about = "1 while the middleware is on"
        found.add("trunkline_feature_enabled", "gauge", about, float(change.on), feature=flag)


async def _measure_audit(bus: Bus, found: Families) -> None:
    """Outcomes and durations, where the audit tells of them."""
    outcomes: Counter[tuple[str, str, str]] = Counter()
    held: dict[tuple[str, str], Spans] = {}
    start = None
    while records := await bus.read(AUDIT, start, _READ):
        start = records[-1].offset + 1
        for record in records:
            told = record.event.payload
            if not isinstance(told, dict) or told.get("what") not in ("ack", "nack", "term"):
                continue
            place = (str(told.get("topic", "")), str(told.get("group", "")))
            outcomes[(*place, told["what"])] += 1
            with contextlib.suppress(TypeError, ValueError):
                held.setdefault(place, Spans()).add(float(told["held_s"]))
    for (topic, group, outcome), count in sorted(outcomes.items()):
        labels = {"topic": topic, "group": group}
        about = "Deliveries that were settled, by outcome: ack, nack or term"
        found.add("trunkline_settled_total", "counter", about, count, **labels, outcome=outcome)
    for topic, group in sorted(held):
        ok = outcomes[topic, group, "ack"]
        err = outcomes[topic, group, "nack"] + outcomes[topic, group, "term"]
        labels = {"topic": topic, "group": group}
        found.add(
            "events_handle_ok_total",
            "counter",
            "Deliveries that were acked; the older name",
            ok,
            **labels,
        )
        found.add(
            "events_handle_err_total",
            "counter",
            "Deliveries that failed; the older name",
            err,
            **labels,
        )
        for name in ("trunkline_process_duration_seconds", "events_handle_latency_seconds"):
            found.histogram(
                name, "Time that the handling of a delivery took", held[topic, group], **labels
            )


def to_text(families: Iterable[Family]) -> str:
    """Prometheus' text format, version 0.0.4."""
    lines: list[str] = []
    for family in families:
        lines.append(f"# HELP {family.name} {_escaped(family.about)}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        for name, labels, value in family.samples:
            told = ",".join(f'{label}="{_quoted(text)}"' for label, text in labels.items())
            number = f"{value:.0f}" if float(value).is_integer() else repr(float(value))
            lines.append(f"{name}{{{told}}} {number}" if told else f"{name} {number}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', '\\"')


class BusCollector:
    """A collector for ``prometheus_client``: figures that are at most ``every_s`` old. What the
    registry has already from the middleware of this process is left to that.

    ::

        async with BusCollector(bus, registry) as collector: ...
    """

    def __init__(
        self,
        bus: Bus,
        registry: Any = None,
        *,
        every_s: float = 5.0,
        outboxes: Mapping[str, Callable[[], int]] | None = None,
    ) -> None:
        self._bus = bus
        self._registry = registry
        self._every_s = every_s
        self._outboxes = outboxes
        self._families: list[Family] = []
        self._counted: set[str] = set()  # by middleware that the registry had before
        self._task: asyncio.Task[None] | None = None
        self.measured_at = 0.0  # of ``time.monotonic``

    async def refresh(self) -> None:
        self._families = await measure(self._bus, self._outboxes)
        self.measured_at = time.monotonic()

    async def __aenter__(self) -> BusCollector:
        from prometheus_client import REGISTRY

        await self.refresh()
        self._registry = self._registry or REGISTRY
        self._counted = _BY_MIDDLEWARE & {metric.name for metric in self._registry.collect()}
        self._registry.register(self)
        self._task = asyncio.get_running_loop().create_task(self._keep())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._registry.unregister(self)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self) -> None:
        while True:
            await self._bus.clock.sleep(self._every_s)
            with contextlib.suppress(TrunklineError, OSError):  # the next look may do
                await self.refresh()

    def collect(self) -> Iterator[Any]:
        for metric in to_metrics(self._families):
            if metric.name not in self._counted:
                yield metric


def to_metrics(families: Iterable[Family]) -> Iterator[Any]:
    """The families as ``prometheus_client`` has them."""
    from prometheus_client.core import Metric

    for family in families:
        name = family.name.removesuffix("_total") if family.kind == "counter" else family.name
        metric = Metric(name, family.about, family.kind)
        for sample in family.samples:
            metric.add_sample(sample.name, dict(sample.labels), sample.value)
        yield metric
