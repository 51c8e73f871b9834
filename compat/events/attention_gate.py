"""The attention gate by its old verbs, over ``trunkline.cognition.gate``."""

from __future__ import annotations

from typing import Any

from events.types import Event, to_bus
from trunkline import SystemClock
from trunkline.cognition.decision import Action, Thresholds
from trunkline.cognition.salience import SalienceScorer, Scene, Score, to_score


class AttentionGate:
    """Judges events; exactly one of ``admit``, ``defer``, ``boost`` and ``drop`` is true of an
    event. ``trunkline.cognition.gate.AttentionGate`` stands before a group and acts on it.
    """

    def __init__(self, scorer: Any = None, thresholds: Thresholds | None = None) -> None:
        self._scorer = scorer or SalienceScorer()
        self._thresholds = thresholds or Thresholds()
        self._clock = SystemClock()

    def score(self, event: Event) -> Score:
        return to_score(self._scorer(to_bus(event), Scene(self._clock.now())))

    def decide(self, event: Event) -> str:
        """``admit``, ``defer``, ``boost`` or ``drop``; ``admit`` where the scorer fails."""
        try:
            return self._thresholds.action(self.score(event).salience).value
        except Exception:  # noqa: BLE001 -- the gate fails open
            return Action.ADMIT.value

    def admit(self, event: Event) -> bool:
        return self.decide(event) == "admit"

    def defer(self, event: Event) -> bool:
        return self.decide(event) == "defer"

    def boost(self, event: Event) -> bool:
        return self.decide(event) == "boost"

    def drop(self, event: Event) -> bool:
        return self.decide(event) == "drop"
