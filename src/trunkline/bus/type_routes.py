"""Handlers of one group that share its records by type: ``bus.on(..., type="placed")``.

The group has one subscription. Its filter is what the routes want together, so every process of the
group must have the same routes: other ones are a ``Conflict``, as with any other filter. A handler
without a type is the default: it gets what no other route takes, and then the group has no filter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trunkline.bus import Delivery
from trunkline.delivery.worker import Call
from trunkline.errors import Conflict, InvalidOption
from trunkline.filters.event_types import condition


def check_types(types: str | Sequence[str]) -> tuple[str, ...]:
    """The types that a route takes."""
    found = (types,) if isinstance(types, str) else tuple(types)
    if not found or not all(isinstance(one, str) and one for one in found):
        hint = 'type="placed", or a list of types'
        raise InvalidOption(f"not a type of events: {types!r}", name="type", hint=hint)
    return found


class TypeRoutes:
    """The routes of one group of one topic or pattern."""

    def __init__(self, topic: str, group: str, options: Mapping[str, Any]) -> None:
        self._topic = topic
        self._group = group
        self._options = options  # of the subscription
        self._calls: dict[str, Call] = {}
        self._default: Call | None = None
        self.workers = 0
        self.has_begun = False

    def check(self, types: Sequence[str], options: Mapping[str, Any]) -> None:
        """Refuse a route that cannot be added."""
        place = f"group {self._group} on {self._topic}"
        if self.has_begun:
            raise Conflict(
                f"{place} has begun: a route would change its filter",
                hint="register the handlers of a group before the bus starts",
            )
        twice = sorted(one for one in types if one in self._calls)
        if twice or (not types and self._default is not None):
            what = f"of type {twice[0]}" if twice else "without a type"
            raise Conflict(f"{place} has a handler {what} already")
        if options["where"] is not None:
            hint = "the filter of a group with routes is the types of its routes"
            raise InvalidOption(f"{place} has routes by type: no where", name="where", hint=hint)
        for name, value in options.items():
            if value != self._options[name]:
                raise Conflict(
                    f"the routes of {place} have different values of {name}: "
                    f"{self._options[name]!r} and {value!r}",
                    hint="the routes of a group share one subscription",
                )

    def add(self, types: Sequence[str], call: Call, workers: int) -> None:
        """Add a route; without types, the default."""
        if types:
            self._calls |= dict.fromkeys(types, call)
        else:
            self._default = call
        self.workers += workers

    @property
    def where(self) -> str | None:
        """The group's filter."""
        return condition(self._calls) if self._default is None else None

    async def call(self, delivery: Delivery) -> Any:
        """Hand a delivery to its route."""
        found = self._calls.get(delivery.record.event.type or "", self._default)
        if found is None:  # another member changed the group's filter, and this process is older
            raise NoRoute(delivery.record.event.type, self._calls)
        return await found(delivery)


class NoRoute(Exception):
    """No handler of this process takes the type: the record is tried again, by any member."""

    def __init__(self, kind: str | None, routes: Mapping[str, Call]) -> None:
        super().__init__(f"no handler for type {kind!r}; there are {', '.join(sorted(routes))}")
