"""Partitions that stay with their connection: a member with ``sticky`` gets whole partitions.

Without it the members of a group share every partition. With it each partition has one owner among
the sticky members, and keeps it for as long as that member is there and has not more than its
share; what it held when it goes is taken over at once by the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from trunkline.bus.subscription import LocalSubscription
from trunkline.names import GroupKey


class Member(Protocol):
    @property
    def subscription(self) -> LocalSubscription: ...


M = TypeVar("M")


def share_out(
    partitions: Iterable[GroupKey], members: Sequence[M], owners: dict[GroupKey, M]
) -> dict[GroupKey, M]:
    """Give each partition an owner: the one it had if that one stays within its share, else the
    member with the fewest. No two members differ by more than one.
    """
    places = sorted(partitions)
    if not members:
        return {}
    least, extra = divmod(len(places), len(members))
    counts = {id(member): 0 for member in members}
    found: dict[GroupKey, M] = {}
    for place in places:
        owner = owners.get(place)
        if owner is None or id(owner) not in counts:
            continue
        count = counts[id(owner)]
        if count < least or (count == least and extra > 0):
            extra -= count == least
            counts[id(owner)] += 1
            found[place] = owner
    for place in places:
        if place not in found:
            owner = min(members, key=lambda member: counts[id(member)])
            counts[id(owner)] += 1
            found[place] = owner
    return found


class Assignments:
    """The owner of each partition, for each topic and group that has sticky members."""

    def __init__(self) -> None:
        self._members: dict[tuple[str, str], list[Member]] = {}
        self._owners: dict[tuple[str, str], dict[GroupKey, Member]] = {}

    def join(self, name: tuple[str, str], member: Member) -> None:
        self._members.setdefault(name, []).append(member)
        self._balance(name)

    def leave(self, name: tuple[str, str], member: Member) -> None:
        members = self._members.get(name, [])
        if member not in members:
            return
        members.remove(member)
        if members:
            self._balance(name)
        else:
            del self._members[name]
            self._owners.pop(name, None)

    def review(self) -> None:
        """Partitions may have been added."""
        for name, members in self._members.items():
            known = self._owners.get(name, {})
            if any(key not in known for m in members for key in m.subscription.partitions):
                self._balance(name)

    def owners(self, name: tuple[str, str]) -> dict[GroupKey, Member]:
        return dict(self._owners.get(name, {}))

    def _balance(self, name: tuple[str, str]) -> None:
        members = self._members[name]
        places = {key for member in members for key in member.subscription.partitions}
        owners = share_out(places, members, self._owners.get(name, {}))
        self._owners[name] = owners
        for member in members:
            member.subscription.draw_from([key for key in owners if owners[key] is member])
