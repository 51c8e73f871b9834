"""Which subscriptions an event goes to."""

from __future__ import annotations

from events.handlers import HandlerPipeline
from events.subscription import Subscription, SubscriptionRegistry
from events.types import Ack, Event, Nack


class EventDispatcher:
    """Hands an event to the subscriptions of a registry, without a log between."""

    def __init__(self, registry: SubscriptionRegistry) -> None:
        self._registry = registry

    def matching(self, event: Event) -> list[Subscription]:
        found = self._registry.subscriptions.values()
        return [one for one in found if one.topic == event.meta.topic and one.wants(event)]

    async def dispatch(self, event: Event) -> dict[str, Ack | Nack]:
        """What each group made of it."""
        return {
            one.group: await HandlerPipeline(one.handler).process_event(event)
            for one in self.matching(event)
        }
