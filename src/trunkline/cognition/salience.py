"""Salience: how much an event matters now, as a number from 0 to 1.

A scorer is any callable ``scorer(event, scene)``. It may be asynchronous. It returns a number, a
number with a reason, or a ``Score``. A scorer proposes; the gate alone acts.

``SalienceScorer`` is the ready one. Its formula::

    base     = sum(weight * feature) / sum(weight of the features that the event has)
    salience = base * (1 - load_weight * load)

    priority   critical 1.0, high 0.8, normal 0.5, low 0.2
    band       BLACK 1.0, RED 0.8, AMBER 0.6, GREEN 0.5
    novelty    1 - max over recent events of the key of (likeness * decay(their age))
    recency    decay(age of the event)
    affect     arousal * (1 + |valence|) / 2, only where the event has an arousal

    decay      "exp": 2 ** -(age / half_life_s)      "power": 1 / (1 + age / half_life_s)

Likeness is Jaccard's index over the leaves of the payloads. Both decays are 1 at age 0 and 0.5 at
the half-life; the power law forgets more slowly after that.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple

import msgspec

from trunkline.errors import InvalidOption
from trunkline.event import Event

PRIORITY: Final = {"critical": 1.0, "high": 0.8, "normal": 0.5, "low": 0.2}
BAND: Final = {"BLACK": 1.0, "RED": 0.8, "AMBER": 0.6, "GREEN": 0.5}
WEIGHTS: Final = {"priority": 0.4, "band": 0.1, "novelty": 0.25, "recency": 0.25, "affect": 0.3}
_LEAVES_MAX = 64

Decay = Literal["exp", "power"]


class Scene(NamedTuple):
    """What a scorer knows besides the event: the time, the load from 0 to 1, and the group, which
    is empty before the append.
    """

    now: datetime
    load: float = 0.0
    group: str = ""


class Score(NamedTuple):
    salience: float
    features: Mapping[str, float] = {}
    reason: str = ""


Scored = Score | float | tuple[float, str]
Scorer = Callable[[Event, Scene], Scored | Awaitable[Scored]]


def to_score(found: Any) -> Score:
    """The answer of a scorer as a ``Score`` from 0 to 1; ``ValueError`` for any other answer."""
    if isinstance(found, Score):
        score = found
    elif isinstance(found, tuple) and len(found) == 2:
        score = Score(found[0], {}, str(found[1]))
    else:
        score = Score(found)
    number = score.salience
    if isinstance(number, bool) or not isinstance(number, int | float) or math.isnan(number):
        raise ValueError(f"a scorer returns a number from 0 to 1, not {number!r}")
    return score._replace(salience=min(1.0, max(0.0, float(number))))


def decayed(age_s: float, half_life_s: float, decay: Decay) -> float:
    """The share of 1 that is left after ``age_s``."""
    ages = max(0.0, age_s) / half_life_s
    return float(2.0**-ages) if decay == "exp" else 1 / (1 + ages)


class _Seen(NamedTuple):
    id: str
    at: datetime
    leaves: frozenset[int]


class SalienceScorer:
    """The ready scorer. ``keys`` bounds the keys it remembers, ``recent`` the events of each."""

    def __init__(
        self,
        *,
        weights: Mapping[str, float] | None = None,
        half_life_s: float = 60.0,
        decay: Decay = "exp",
        load_weight: float = 0.25,
        keys: int = 4096,
        recent: int = 8,
    ) -> None:
        self.weights = {**WEIGHTS, **(weights or {})}
        if unknown := self.weights.keys() - WEIGHTS.keys():
            raise InvalidOption(
                f"no feature {', '.join(sorted(unknown))}", hint=f"features: {', '.join(WEIGHTS)}"
            )
        if min(self.weights.values()) < 0 or not any(self.weights.values()):
            raise InvalidOption("weights are numbers from 0 on, and one is more", name="weights")
        if half_life_s <= 0 or decay not in ("exp", "power"):
            raise InvalidOption(f"no decay {decay!r} of {half_life_s} s", hint="exp or power")
        if not 0 <= load_weight <= 1 or keys < 1 or recent < 1:
            raise InvalidOption("load_weight is from 0 to 1, keys and recent from 1 on")
        self._half_life_s = half_life_s
        self._decay: Decay = decay
        self._load_weight = load_weight
        self._keys = keys
        self._recent = recent
        self._seen: OrderedDict[tuple[str, str], deque[_Seen]] = OrderedDict()

    def __call__(self, event: Event, scene: Scene) -> Score:
        features = {
            "priority": PRIORITY[event.priority],
            "band": BAND[event.band],
            "novelty": self._novelty(event, scene.now),
            "recency": self._left((scene.now - event.ts).total_seconds()),
        }
        affect = affect_of(event)
        if affect is not None:
            features["affect"] = affect
        total = sum(self.weights[name] for name in features)
        base = sum(self.weights[name] * value for name, value in features.items()) / (total or 1.0)
        salience = base * (1 - self._load_weight * scene.load)
        most = max(features, key=lambda name: self.weights[name] * features[name])
        features["load"] = scene.load
        shown = {name: round(value, 6) for name, value in features.items()}
        return Score(round(salience, 6), shown, f"mostly {most}")

    def _left(self, age_s: float) -> float:
        return decayed(age_s, self._half_life_s, self._decay)

    def _novelty(self, event: Event, now: datetime) -> float:
        place = (event.topic, event.key or event.type or "")
        seen = self._seen.get(place)
        if seen is None:
            seen = self._seen[place] = deque(maxlen=self._recent)
            if len(self._seen) > self._keys:
                self._seen.popitem(last=False)
        else:
            self._seen.move_to_end(place)
        leaves = _leaves(event.payload)
        known = 0.0
        again = False
        for one in seen:
            if one.id == event.id:
                again = True  # a repeated delivery is not less novel for that
                continue
            both = len(leaves | one.leaves)
            likeness = len(leaves & one.leaves) / both if both else 1.0
            known = max(known, likeness * self._left((now - one.at).total_seconds()))
        if not again:
            seen.append(_Seen(event.id, now, leaves))
        return 1.0 - known


def affect_of(event: Event) -> float | None:
    """The affect of an event from 0 to 1: from ``payload.affect``, the payload, or the headers."""
    payload = event.payload if isinstance(event.payload, dict) else {}
    inner = payload.get("affect")
    for place in (inner if isinstance(inner, dict) else {}, payload, event.headers):
        arousal = _number(place.get("arousal"))
        if arousal is not None:
            valence = _number(place.get("valence")) or 0.0
            return min(1.0, max(0.0, arousal)) * (1 + min(1.0, abs(valence))) / 2
    return None


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _leaves(payload: Any) -> frozenset[int]:
    """Each value of a payload with its path, as a digest: bounded, whatever the payload."""
    found: set[int] = set()
    ahead: list[tuple[str, Any]] = [("", payload)]
    while ahead and len(found) < _LEAVES_MAX:
        path, value = ahead.pop()
        if isinstance(value, dict):
            ahead += [(f"{path}.{name}", inner) for name, inner in value.items()]
        elif isinstance(value, list | tuple):
            ahead += [(path, inner) for inner in value]
        else:
            text = msgspec.json.encode([path, value])
            found.add(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big"))
    return frozenset(found)
