"""Every option, once: one frozen value per concept, its defaults and bounds here and nowhere else.

What belongs to a topic or a group is stored with it; a conflicting redefinition is an error.
"""

from __future__ import annotations

import re
from functools import cache
from shlex import quote
from typing import (
    Annotated,
    Any,
    Literal,
    Self,
    TypedDict,
    TypeVar,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta

from trunkline.errors import Conflict, InvalidOption
from trunkline.explain import nearest, reason, spelt

MIB = 1024 * 1024
LONGEST_S = 1e10  # three centuries: what JSON and a calendar can hold, and no infinity
PARTITIONS_MAX = 1024
WORKERS_MAX = 100_000  # of one handler: as many as may be in flight over WebSocket

Durability = Literal["fsync", "os"]
Ordering = Literal["key", "partition", "none"]
TtlPolicy = Literal["drop", "dlq", "deliver"]
OnFull = Literal["raise", "wait"]
OnConflict = Literal["raise", "update", "keep"]

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]
Interval = Annotated[float, Meta(ge=0.001)]


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of all options: a wrong type, value or name raises ``InvalidOption``."""

    def __post_init__(self) -> None:
        for name, kind in _kinds(type(self)).items():
            value = getattr(self, name)
            if value is msgspec.UNSET:
                continue
            try:
                found = msgspec.convert(value, kind)
            except (msgspec.ValidationError, UnicodeError) as error:
                raise InvalidOption(
                    f"{name}={spelt(value)}: {reason(error)}",
                    hint=_choices(type(self), {name: value}),
                    name=name,
                    value=value,
                ) from None
            if isinstance(found, float) and found > LONGEST_S:
                said = f"{name}={spelt(value)}: it must be a number <= {LONGEST_S:g}"
                raise InvalidOption(said, name=name, value=value)


@cache
def _kinds(cls: type[Options]) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def _choices(cls: type[Options], values: Any) -> str:
    """What may stand in place of a value that is none of its option's choices."""
    for name, value in values.items() if isinstance(values, dict) else ():
        choices = _kinds(cls).get(name)
        if get_origin(choices) is Literal and value not in get_args(choices):
            return f"{name} is one of {', '.join(get_args(choices))}"
    return ""


T = TypeVar("T", bound=Options)


def make(cls: type[T], values: dict[str, Any]) -> T:
    """Build ``cls`` from plain values, as read from a file, a URL or keyword arguments."""
    if isinstance(values, dict):
        values = {name: value for name, value in values.items() if value is not msgspec.UNSET}
    try:
        return msgspec.convert(values, cls)
    except (msgspec.ValidationError, UnicodeError) as error:
        named = values if isinstance(values, dict) else {}
        unknown = [name for name in named if name not in cls.__struct_fields__]
        hint, said = _choices(cls, values), reason(error)
        if unknown:
            said = f"there is no option {unknown[0]}"
            guess = nearest(str(unknown[0]), cls.__struct_fields__)
            known = f"known options: {', '.join(cls.__struct_fields__)}"
            hint = f"did you mean {guess}?" if guess else known
        whose = cls.__name__.removesuffix("Options").lower()
        raise InvalidOption(f"{said} (an option of the {whose})", hint=hint) from error


def changed(options: Options) -> dict[str, Any]:
    """The options that differ from their defaults."""
    defaults = msgspec.structs.asdict(type(options)())
    return {k: v for k, v in msgspec.structs.asdict(options).items() if v != defaults[k]}


def merged(options: T, values: dict[str, Any]) -> T:
    """These options with other values for some of them."""
    return make(type(options), {**msgspec.structs.asdict(options), **values})


def differences(old: Options, new: Options) -> list[tuple[str, Any, Any]]:
    """Each option in which they differ, with both values."""
    pairs = ((name, getattr(old, name), getattr(new, name)) for name in old.__struct_fields__)
    return [pair for pair in pairs if pair[1] != pair[2]]


def check_policy(policy: object) -> None:
    if not isinstance(policy, GroupOptions):
        raise InvalidOption(f"a policy is GroupOptions, not {policy!r}", name="policy")


def check_on_conflict(on_conflict: object) -> None:
    if on_conflict not in get_args(OnConflict):
        raise InvalidOption(
            f"on_conflict={spelt(on_conflict)}",
            name="on_conflict",
            hint=f"on_conflict is one of {', '.join(get_args(OnConflict))}",
        )


def other_policy(topic: str, group: str, have: Options, want: Options) -> Conflict:
    changes = differences(have, want)
    told = (f"{option} {old} -> {new}" for option, old, new in changes)
    flags = (f"--{option.replace('_', '-')} {quote(str(new))}" for option, _, new in changes)
    name = f"group {group} on {topic}" if group else "the group"
    return Conflict(
        f"{name} has another policy: {', '.join(told)}",
        have=have,
        want=want,
        hint="leave the policy out to keep the old one, or change it for every member: "
        f"trunkline group edit {topic or 'TOPIC'} {group or 'GROUP'} {' '.join(flags)}",
    )


class Limits(Options, frozen=True):
    """How large one event may be."""

    record_bytes: Positive = 1 * MIB
    depth: Positive = 64
    headers: Count = 64
    header_bytes: Positive = 1024
    text_bytes: Positive = 1024  # type, key, actor, subject, idem_key, trace, cause: each


class TopicOptions(Options, frozen=True):
    """What belongs to a topic. Stored in ``topics.json``."""

    partitions: Annotated[int, Meta(ge=1, le=PARTITIONS_MAX)] = 1
    durability: Durability = "fsync"
    segment_bytes: Annotated[int, Meta(ge=MIB, le=100 * MIB)] = 64 * MIB
    segment_records: Positive | None = None
    compress: bool = False
    dedup_window_s: Seconds = 120.0
    dedup_keys: Positive = 100_000
    ttl_policy: TtlPolicy = "drop"
    retention_age_s: Seconds | None = None
    retention_bytes: Count | None = None
    retention_records: Count | None = None
    retain_unsettled: bool = True
    retain_for_lake: bool = False
    compact: bool = False


class GroupOptions(Options, frozen=True):
    """What belongs to a group: its durable policy. Stored with the group."""

    ack_timeout_s: Interval = 30.0
    max_retries: Count = 5
    backoff_base_s: Seconds = 0.5
    backoff_mult: Annotated[float, Meta(ge=1, le=10_000)] = 2.0
    backoff_max_s: Seconds = 30.0
    ordering: Ordering = "key"
    aging_s: Interval = 5.0
    lookahead: Positive = 4096
    where: str | msgspec.UnsetType = msgspec.UNSET  # written only if it is set

    @classmethod
    def patient(cls, **options: Unpack[GroupFields]) -> Self:
        """A policy for handlers that call a provider: its retries last longer than ten minutes."""
        chosen: GroupFields = {
            "backoff_base_s": 1.0,
            "backoff_max_s": 120.0,
            "max_retries": 13,
            **options,
        }
        return make(cls, {**chosen})


class Flow(Options, frozen=True):
    """What belongs to one subscription, for as long as it lives."""

    max_inflight: Positive = 100


class StoreOptions(Options, frozen=True):
    """What belongs to one opening of a store."""

    limits: Limits = Limits()
    create: bool = True
    lock_timeout_s: Interval = 10.0
    publish_inflight: Positive = 10_000
    inline_commit_s: Seconds = 0.002
    on_full: OnFull = "raise"
    reserve_bytes: Count = 1 * MIB
    index_bytes: Annotated[int, Meta(ge=1024)] = 128 * 1024
    poll_s: Interval = 0.1
    journal_sync_s: Interval = 1.0
    upkeep_s: Interval = 30.0
    snapshot_bytes: Annotated[int, Meta(ge=1024)] = 4 * MIB
    allow_network: bool = False


class MongoOptions(Options, frozen=True):
    """What belongs to one opening of a store in MongoDB."""

    limits: Limits = Limits()
    create: bool = True
    poll_s: Interval = 0.1  # where the server has no change streams
    upkeep_s: Interval = 30.0
    patience_s: Seconds = 30.0  # how long a call waits for a server that is away; 0: it fails soon


class ClientOptions(Options, frozen=True):
    """What belongs to one client of a broker."""

    buffer: Positive = 10_000  # publishes that wait for their answer
    patience_s: Seconds = 30.0  # how long a publish waits for a broker that is away
    connect_timeout_s: Interval = 5.0
    backoff_base_s: Interval = 0.5
    backoff_max_s: Interval = 10.0
    ping_s: Interval = 10.0
    frame_bytes: Positive = 64 * MIB  # the largest frame that is read
    send_bytes: Positive = 4 * MIB  # the largest publish; a broker takes no more by default


class BusOptions(Options, frozen=True):
    """What belongs to one bus."""

    drain_timeout_s: Seconds = 5.0
    audit: Annotated[float, Meta(ge=0, le=1)] = 0.0  # share of decisions on system.bus.audit


class NatsOptions(Options, frozen=True):
    """What belongs to one connection to NATS."""

    publish_inflight: Positive = 256  # publishes that wait for their acknowledgement
    ack_deadline_s: Interval = 1.0  # a publish without an acknowledgement is sent again then
    patience_s: Annotated[float, Meta(ge=1)] = 30.0  # how long a call waits for the server
    when_away: Literal["wait", "raise"] = "wait"  # what a publish does while no server is there
    connect_timeout_s: Interval = 5.0
    heartbeat_s: Annotated[float, Meta(ge=0.1, le=30)] = 0.5  # of a pull that waits
    replicas: Annotated[int, Meta(ge=1, le=5)] | None = None  # None: 3 in a cluster, else 1
    delayed_max: Positive = 10_000  # delayed records that a group parks on one topic
    monitor: str | None = None  # the server's monitoring address: http://127.0.0.1:8222


Port = Annotated[int, Meta(ge=0, le=65535)]
_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/*\s]+/?")


class BrokerOptions(Options, frozen=True):
    """What belongs to one broker."""

    url: str = "file:.bus"
    host: str = "127.0.0.1"
    port: Port = 7070
    auth: bool = False  # deny what no token allows; also on as soon as there is a token
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None  # ask clients for a certificate signed by this
    origins: tuple[str, ...] = ()  # of web pages that may connect, besides our own
    hosts: tuple[str, ...] = ()  # names under which the broker may be addressed
    max_inflight: Positive = 32
    max_inflight_limit: Positive = 10_000
    ack_timeout_s: Interval | None = None
    frame_bytes: Annotated[int, Meta(ge=1024)] = 4 * MIB
    connections: Positive = 10_000
    subscriptions: Positive = 1_000  # on one connection
    publish_inflight: Positive = 4_096  # on one connection
    pending_bytes: Positive = 8 * MIB  # unsent, on one connection
    stall_s: Interval = 10.0  # a consumer that takes nothing for so long is let go
    rate_frames_s: Count = 0  # frames a second from one agent; 0 for no limit
    auth_timeout_s: Interval = 5.0
    ping_s: Interval = 20.0
    rights_s: Interval = 1.0  # how often changed rights are looked for
    drain_s: Seconds = 3.0
    poll_s: Interval = 20.0  # a long poll of a stream waits so long
    policy: str | None = None  # a TOML file with the rights of each actor
    metrics_s: Seconds = 10.0  # between two events of system.metrics; 0 for none
    audit: Annotated[float, Meta(ge=0, le=1)] = 0.0  # share of decisions on system.bus.audit

    def __post_init__(self) -> None:
        super().__post_init__()
        for origin in self.origins:
            if not _ORIGIN.fullmatch(origin):  # it would be no page's, and nobody be told
                raise InvalidOption(
                    f"not the origin of a page: {origin!r}",
                    name="origins",
                    hint="each one as a browser sends it: https://app.example, http://localhost:3000",
                )


class OutboxOptions(Options, frozen=True):
    """What belongs to one drainer."""

    batch: Positive = 100
    max_attempts: Positive = 10
    poll_s: Interval = 0.5
    lease_s: Interval = 60.0


class TopicFields(TypedDict, total=False):
    """``TopicOptions`` as arguments of ``define``."""

    partitions: int
    durability: Durability
    segment_bytes: int
    segment_records: int | None
    compress: bool
    dedup_window_s: float
    dedup_keys: int
    ttl_policy: TtlPolicy
    retention_age_s: float | None
    retention_bytes: int | None
    retention_records: int | None
    retain_unsettled: bool
    retain_for_lake: bool
    compact: bool


class GroupFields(TypedDict, total=False):
    """``GroupOptions`` as arguments of ``edit``."""

    ack_timeout_s: float
    max_retries: int
    backoff_base_s: float
    backoff_mult: float
    backoff_max_s: float
    ordering: Ordering
    aging_s: float
    lookahead: int
    where: str


class StoreFields(TypedDict, total=False):
    """``StoreOptions`` as arguments of ``connect`` and ``open_store``."""

    limits: Limits
    create: bool
    lock_timeout_s: float
    publish_inflight: int
    inline_commit_s: float
    on_full: OnFull
    reserve_bytes: int
    index_bytes: int
    poll_s: float
    journal_sync_s: float
    upkeep_s: float
    snapshot_bytes: int
    allow_network: bool


class BusFields(TypedDict, total=False):
    """``BusOptions`` as arguments of ``connect``."""

    drain_timeout_s: float
    audit: float


class ClientFields(TypedDict, total=False):
    """``ClientOptions`` as arguments of ``connect``."""

    buffer: int
    patience_s: float
    connect_timeout_s: float
    backoff_base_s: float
    backoff_max_s: float
    ping_s: float
    frame_bytes: int
    send_bytes: int


class ConnectFields(StoreFields, BusFields, ClientFields, total=False):
    """Every option that ``connect`` takes. Which of them a bus knows depends on its URL."""
