"""A policy: which events an actor may publish and read, by role and attribute.

A policy file names roles and gives them to actors::

    [actors]
    anna = ["clerk"]
    "till-*" = ["service"]

    [[roles.clerk.allow]]
    actions = ["publish", "read"]
    topics = ["orders.>"]
    spaces = ["sales"]
    band = "AMBER"
    caps = ["orders.write"]
    hours = "08:00-18:00"
    days = ["mon", "tue", "wed", "thu", "fri"]
    zone = "Europe/Berlin"
    devices = ["till-*"]

Nothing is allowed unless a rule of one of the actor's roles allows it, and a rule below ``deny``
beats every rule that allows. A rule that leaves an attribute out does not ask for it, but for the
band and the capabilities: events above GREEN, and events that demand a capability, need a rule that
says so. Dead letters and topics below ``system`` are matched only by patterns that name them; a
denial of a topic is one of its dead letters as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, time
from fnmatch import fnmatchcase
from typing import Any, Final, Literal, NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec

from trunkline.access import covers, touches
from trunkline.errors import InvalidOption
from trunkline.event import BANDS, Band, Event
from trunkline.guard.config import convert
from trunkline.names import DEAD_SUFFIX, check_pattern, is_dead

Action = Literal["publish", "read", "admin"]
DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
_HOURS = re.compile(r"([01]\d|2[0-4]):([0-5]\d)-([01]\d|2[0-4]):([0-5]\d)")


class PolicyRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry below ``allow`` or ``deny``. Empty lists, and None, ask for nothing."""

    actions: tuple[Action, ...]
    topics: tuple[str, ...]
    spaces: tuple[str, ...] = ()
    band: Band = "GREEN"
    caps: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    hours: str | None = None
    days: tuple[Day, ...] = ()
    zone: str = "UTC"


class Role(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    allow: tuple[PolicyRule, ...] = ()
    deny: tuple[PolicyRule, ...] = ()
    includes: tuple[str, ...] = ()


class Question(NamedTuple):
    """What somebody wants to do. ``event`` is None where the question is about the topic alone:
    then a rule's space, band and capabilities are not asked for.
    """

    actor: str
    action: Action
    topic: str
    now: datetime
    device: str = ""
    event: Event | None = None


class Ruling(NamedTuple):
    """``rule`` names the rule that decided. ``missing`` says which grant would be needed."""

    allowed: bool
    rule: str = ""
    missing: str = ""


class Named(NamedTuple):
    name: str  # roles.clerk.allow[0]
    rule: PolicyRule


class Policy:
    """Made by ``Policy.parse`` from the tables of a file. It never changes."""

    def __init__(self, actors: dict[str, tuple[str, ...]], roles: dict[str, Role]) -> None:
        self.actors = actors
        self.roles = roles
        self._of: dict[str, tuple[list[Named], list[Named]]] = {}
        for actor, names in actors.items():
            for name in names:
                self._check_role(name, f"actors.{actor}")
        for name, role in roles.items():
            for other in role.includes:
                self._check_role(other, f"roles.{name}.includes")
            for number, (kind, rule) in enumerate(_rules(role)):
                _check_rule(rule, f"roles.{name}.{kind} (rule {number + 1})")

    @classmethod
    def parse(cls, tables: dict[str, Any]) -> Policy:
        """``InvalidOption`` names the table and the field that is wrong."""
        found = convert(
            {name: tables[name] for name in ("actors", "roles") if name in tables}, _File, "policy"
        )
        return cls(found.actors, found.roles)

    def roles_of(self, actor: str) -> list[str]:
        """The names of the actor's roles, with the roles that these include."""
        found: list[str] = []
        ahead = [
            role
            for pattern, roles in self.actors.items()
            if fnmatchcase(actor, pattern)
            for role in roles
        ]
        while ahead:
            name = ahead.pop(0)
            if name not in found:
                found.append(name)
                ahead += self.roles[name].includes
        return found

    def decide(self, ask: Question) -> Ruling:
        """Whether a policy allows it, by which rule, or which grant is missing."""
        allow, deny = self._rules_of(ask.actor)
        for name, rule in deny:
            if ask.action in rule.actions and _is_hit(rule, ask):
                return Ruling(False, name, f"{_asked(ask)}: {name} denies it")
        nearest: tuple[int, str, str] | None = None
        for name, rule in allow:
            if ask.action not in rule.actions:
                continue
            if not any(_fits_topic(pattern, ask) for pattern in rule.topics):
                continue
            unmet = list(_unmet(rule, ask))
            if not unmet:
                return Ruling(True, name)
            if nearest is None or len(unmet) < nearest[0]:
                nearest = (len(unmet), name, "; ".join(unmet))
        if nearest is not None:
            return Ruling(False, nearest[1], f"{_asked(ask)}: {nearest[2]} ({nearest[1]})")
        roles = ", ".join(self.roles_of(ask.actor)) or "none"
        return Ruling(False, "", f"{_asked(ask)}: no rule of {ask.actor!r} (roles: {roles})")

    def _rules_of(self, actor: str) -> tuple[list[Named], list[Named]]:
        found = self._of.get(actor)
        if found is None:
            if len(self._of) > 10_000:  # names come from outside
                self._of.clear()
            found = self._of[actor] = ([], [])
            for role in self.roles_of(actor):
                for number, rule in enumerate(self.roles[role].allow):
                    found[0].append(Named(f"roles.{role}.allow[{number}]", rule))
                for number, rule in enumerate(self.roles[role].deny):
                    found[1].append(Named(f"roles.{role}.deny[{number}]", rule))
        return found

    def _check_role(self, name: str, where: str) -> None:
        if name not in self.roles:
            hint = f"roles: {', '.join(sorted(self.roles)) or 'none'}"
            raise InvalidOption(f"{where}: there is no role {name!r}", name=where, hint=hint)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    actors: dict[str, tuple[str, ...]] = {}
    roles: dict[str, Role] = {}


def _rules(role: Role) -> Iterator[tuple[str, PolicyRule]]:
    yield from (("allow", rule) for rule in role.allow)
    yield from (("deny", rule) for rule in role.deny)


def _check_rule(rule: PolicyRule, where: str) -> None:
    if not rule.actions or not rule.topics:
        raise InvalidOption(f"{where}: a rule has actions and topics", name=where)
    for pattern in rule.topics:
        check_pattern(pattern)
    if rule.hours is not None:
        _hours(rule.hours, where)
    try:
        ZoneInfo(rule.zone)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        hint = "a name such as Europe/Berlin or UTC"
        raise InvalidOption(f"{where}: no time zone {rule.zone!r}", name=where, hint=hint) from None


def _hours(text: str, where: str = "hours") -> tuple[int, int]:
    """The minutes of a day from which and up to which a rule holds."""
    found = _HOURS.fullmatch(text)
    numbers = [int(part) for part in found.groups()] if found else []
    minutes = [60 * hour + minute for hour, minute in zip(numbers[::2], numbers[1::2], strict=True)]
    if not minutes or max(minutes) > 24 * 60 or minutes[0] == minutes[1]:
        hint = "for example 08:00-18:00, or 22:00-06:00 over midnight"
        raise InvalidOption(f"{where}: not hours: {text!r}", name=where, hint=hint)
    return minutes[0], minutes[1]


def _fits_topic(pattern: str, ask: Question) -> bool:
    """For a subscription by a pattern it is enough that the two can match one topic: each record
    is asked about before it is delivered.
    """
    if ask.event is None and ("*" in ask.topic or ">" in ask.topic):
        return touches(pattern, ask.topic)
    return covers(pattern, ask.topic)


def _is_hit(rule: PolicyRule, ask: Question) -> bool:
    """Whether a denial holds: for the topic alone, only one that asks for nothing of an event."""
    origin = ask.topic
    while is_dead(origin):  # dead letters hold what their topic held
        origin = origin.removesuffix(DEAD_SUFFIX)
    if not any(covers(p, ask.topic) or covers(p, origin) for p in rule.topics):
        return False
    event = ask.event
    if event is None:
        of_event = rule.spaces or rule.caps or rule.band != "GREEN"
        return not of_event and not list(_unmet_place(rule, ask))
    if rule.spaces and not any(fnmatchcase(event.space or "", one) for one in rule.spaces):
        return False
    if rule.band != "GREEN" and BANDS.index(event.band) < BANDS.index(rule.band):
        return False
    if rule.caps and not set(rule.caps) & set(event.caps):
        return False
    return not list(_unmet_place(rule, ask))


def _unmet(rule: PolicyRule, ask: Question) -> Iterator[str]:
    """What an allowing rule asks for and does not get."""
    event = ask.event
    if event is not None:
        if rule.spaces and not any(fnmatchcase(event.space or "", one) for one in rule.spaces):
            yield f"space {event.space or 'none'} is not in {', '.join(rule.spaces)}"
        if BANDS.index(event.band) > BANDS.index(rule.band):
            yield f"band {event.band} is above {rule.band}"
        if missing := sorted(set(event.caps) - set(rule.caps)):
            yield f"capability {', '.join(missing)} is missing"
    yield from _unmet_place(rule, ask)


def _unmet_place(rule: PolicyRule, ask: Question) -> Iterator[str]:
    """The attributes of the moment and the device."""
    if rule.devices and not any(fnmatchcase(ask.device, one) for one in rule.devices):
        yield f"device {ask.device or 'unknown'} is not in {', '.join(rule.devices)}"
    if rule.hours is None and not rule.days:
        return
    local = ask.now.astimezone(ZoneInfo(rule.zone))
    if rule.days and DAYS[local.weekday()] not in rule.days:
        yield f"day {DAYS[local.weekday()]} is not in {', '.join(rule.days)}"
    if rule.hours is not None and not _is_within(local.time(), *_hours(rule.hours)):
        yield f"time {local:%H:%M} {rule.zone} is outside {rule.hours}"


def _is_within(now: time, start: int, end: int) -> bool:
    minute = 60 * now.hour + now.minute
    return start <= minute < end if start < end else minute >= start or minute < end


def _asked(ask: Question) -> str:
    event = ask.event
    said = f"{ask.action} on {ask.topic}"
    if event is not None and event.space:
        said += f" in {event.space}"
    return said
