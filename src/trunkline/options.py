"""Every option, once: one frozen value per concept, its defaults and bounds here and nowhere else.

What belongs to a topic or a group is stored with it; a conflicting redefinition is an error.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from trunkline.errors import LONGEST_S, Conflict, InvalidOption, reason, spelt

MIB = 1024 * 1024
PARTITIONS_MAX = 1024
WORKERS_MAX = 100_000  # of one handler: as many as may be in flight over WebSocket

Durability = Literal["fsync", "os"]
Ordering = Literal["key", "partition", "none"]
TtlPolicy = Literal["drop", "dlq", "deliver"]

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]
Interval = Annotated[float, Meta(ge=0.001)]


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of all options: a wrong type, value or name raises ``InvalidOption``."""

    def __post_init__(self) -> None:
        for name, kind in _kinds(type(self)).items():
            value = getattr(self, name)
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
    try:
        return msgspec.convert(values, cls)
    except (msgspec.ValidationError, UnicodeError) as error:
        hint = _choices(cls, values) or f"known options: {', '.join(cls.__struct_fields__)}"
        raise InvalidOption(f"{cls.__name__}: {reason(error)}", hint=hint) from error


def changed(options: Options) -> dict[str, Any]:
    """The options that differ from their defaults."""
    defaults = msgspec.structs.asdict(type(options)())
    return {k: v for k, v in msgspec.structs.asdict(options).items() if v != defaults[k]}


def differences(old: Options, new: Options) -> list[tuple[str, Any, Any]]:
    """Each option in which they differ, with both values."""
    pairs = ((name, getattr(old, name), getattr(new, name)) for name in old.__struct_fields__)
    return [pair for pair in pairs if pair[1] != pair[2]]


def check_policy(policy: object) -> None:
    if not isinstance(policy, GroupOptions):
        raise InvalidOption(f"a policy is GroupOptions, not {policy!r}", name="policy")


def other_policy(topic: str, group: str, have: Options, want: Options) -> Conflict:
    changes = differences(have, want)
    told = (f"{option} {old} -> {new}" for option, old, new in changes)
    flags = (f"--{option.replace('_', '-')} {new}" for option, _, new in changes)
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
    dedup_window_s: Seconds = 0.0
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
    on_full: Literal["raise", "wait"] = "raise"
    reserve_bytes: Count = 1 * MIB
    index_bytes: Annotated[int, Meta(ge=1024)] = 128 * 1024
    poll_s: Interval = 0.1
    journal_sync_s: Interval = 1.0
    upkeep_s: Interval = 30.0
    snapshot_bytes: Annotated[int, Meta(ge=1024)] = 4 * MIB
    allow_network: bool = False


class BusOptions(Options, frozen=True):
    """What belongs to one bus."""

    drain_timeout_s: Seconds = 5.0
    audit: Annotated[float, Meta(ge=0, le=1)] = 0.0  # share of decisions on system.bus.audit
