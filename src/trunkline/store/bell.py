"""The bell of a store: pumps listen to it for records and changes that they did not make."""

from __future__ import annotations

from collections.abc import Callable

from trunkline.names import GroupKey

Listener = Callable[[str | None], None]


class Bell:
    """Tells listeners that a topic, or anything (None), may have changed. Rings cost little and
    may be false; a missed one is made up for by polling.
    """

    def __init__(self) -> None:
        self._listeners: dict[Listener, str | None] = {}
        self._groups: dict[Listener, GroupKey] = {}

    def listen(
        self, listener: Listener, topic: str | None = None, group: GroupKey | None = None
    ) -> None:
        """Call ``listener`` for rings of ``topic``, or for all, and for news of ``group``."""
        self._listeners[listener] = topic
        if group is not None:
            self._groups[listener] = group

    def ignore(self, listener: Listener) -> None:
        self._listeners.pop(listener, None)
        self._groups.pop(listener, None)

    def groups(self) -> set[GroupKey]:
        """The groups that somebody listens for."""
        return set(self._groups.values())

    def ring(self, topic: str | None = None) -> bool:
        """Whether there was a listener."""
        heard = False
        for listener, wanted in list(self._listeners.items()):
            if wanted is None or topic is None or wanted == topic:
                listener(topic)
                heard = True
        return heard

    def tell(self, group: GroupKey) -> None:
        """Ring for the pumps of one group alone: there may be many others."""
        for listener in [one for one, wanted in self._groups.items() if wanted == group]:
            listener(None)

    def remind(self, turn: int, turns: int) -> None:
        """Ring for no reason, for one share of the listeners a turn: all at once take long."""
        for listener in list(self._listeners)[turn % turns :: turns]:
            listener(None)
