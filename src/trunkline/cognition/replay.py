"""Replay of thresholds: what a gate would have done with other thresholds, from its decisions.

Every first decision on ``system.attention`` holds the salience, so other thresholds can be applied
to it. A record that was over budget stays deferred where the new thresholds admit it: the budget
was full at that moment. So does a record that was in line when its process ended. A decision that
failed open stays as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from trunkline.cognition.decision import Action, By, Decision, Thresholds
from trunkline.errors import InvalidOption


class Replayed(NamedTuple):
    decision: Decision
    action: Action  # with the other thresholds

    @property
    def is_changed(self) -> bool:
        return self.action is not self.decision.action


def parse_thresholds(text: str) -> Thresholds:
    """``drop,admit,boost``, for example ``0.2,0.6,0.8``."""
    try:
        drop, admit, boost = (float(part) for part in text.split(","))
    except ValueError:
        raise InvalidOption(
            f"not thresholds: {text!r}", name="thresholds", hint="three numbers: 0.2,0.6,0.8"
        ) from None
    if not 0 <= drop <= admit <= boost <= 1:
        raise InvalidOption(
            f"not thresholds: {text!r}", name="thresholds", hint="0 <= drop <= admit <= boost <= 1"
        )
    return Thresholds(drop, admit, boost)


def replayed(decisions: Iterable[Decision], thresholds: Thresholds) -> Iterator[Replayed]:
    """Each first decision with the action that other thresholds give."""
    for decision in decisions:
        if decision.is_first:
            yield Replayed(decision, _action(decision, thresholds))


def _action(decision: Decision, thresholds: Thresholds) -> Action:
    if decision.by is By.FAIL_OPEN:
        return decision.action
    action = thresholds.action(decision.salience)
    if decision.by in (By.BUDGET, By.STOP) and action in (Action.ADMIT, Action.BOOST):
        return Action.DEFER
    return action


def summed(found: Iterable[Replayed]) -> Counter[tuple[str, str, Action, Action]]:
    """How many decisions, by topic, group, the action then and the action now."""
    return Counter(
        (one.decision.topic, one.decision.group, one.decision.action, one.action) for one in found
    )
