"""Subscriptions as values, and a registry of them for ``EventBus(registry=...)``."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from events.filters import Filter
from events.types import Event, EventType
from trunkline import GroupOptions


@dataclass
class Subscription:
    topic: str
    group: str
    handler: Callable[[Event], Any]
    filters: tuple[Filter, ...] = ()
    max_inflight: int = 100
    workers: int = 1
    policy: GroupOptions | None = None
    deadline_ms: float | None = None
    begun: bool = False

    def wants(self, event: Event) -> bool:
        """Every filter must agree."""
        return all(one.matches(event) for one in self.filters)


class SubscriptionRegistry:
    def __init__(self) -> None:
        self.subscriptions: dict[str, Subscription] = {}

    def register_subscription(
        self,
        topic: str,
        handler: Callable[[Event], Any],
        advanced_filters: Sequence[Filter] = (),
        group: str | None = None,
        **options: Any,
    ) -> tuple[str, Subscription]:
        """``group`` is named after the handler unless it is given, so that a program that starts
        again goes on where it was.
        """
        name = topic.value if isinstance(topic, EventType) else topic
        subscription = Subscription(
            name, group or self._named(name, handler), handler, tuple(advanced_filters), **options
        )
        key = "sub-" + uuid4().hex
        self.subscriptions[key] = subscription
        return key, subscription

    def unregister_subscription(self, key: str) -> bool:
        return self.subscriptions.pop(key, None) is not None

    def not_begun(self) -> list[Subscription]:
        return [one for one in self.subscriptions.values() if not one.begun]

    def _named(self, topic: str, handler: Callable[[Event], Any]) -> str:
        name = getattr(handler, "__qualname__", type(handler).__name__)
        base = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[-80:] or "handler"
        taken = {one.group for one in self.subscriptions.values() if one.topic == topic}
        count = 1
        while (group := base if count == 1 else f"{base}-{count}") in taken:
            count += 1
        return group
