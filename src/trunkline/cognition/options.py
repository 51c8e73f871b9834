"""The options of the attention gate and of the memory, with their defaults and bounds."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from trunkline.errors import InvalidOption
from trunkline.options import Count, Interval, Options, Positive, Seconds

Share = Annotated[float, Meta(ge=0, le=1)]


class GateOptions(Options, frozen=True):
    """What belongs to one attention gate."""

    stands: Literal["delivery", "ingest"] = "delivery"
    drop_below: Share = 0.2
    admit_from: Share = 0.6
    boost_from: Share = 0.8
    items: Positive | None = None  # in the handler at once; None for the number of workers
    bytes: Positive | None = None  # of payloads in the handler at once
    waiting: Count = 32  # admitted events that wait for room, by rank
    deciders: Positive = 16  # deliveries that are judged at once
    defer_s: Seconds = 5.0
    return_below: Share = 0.5  # a load below this brings deferred records back early
    window_s: Interval = 1.0  # at ingest, the budget holds for one window

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.drop_below <= self.admit_from <= self.boost_from:
            raise InvalidOption(
                f"the thresholds {self.drop_below}, {self.admit_from}, {self.boost_from} "
                "are out of order",
                name="thresholds",
                hint="drop_below <= admit_from <= boost_from",
            )


class MemoryOptions(Options, frozen=True):
    """What belongs to one memory: its write workflow and its consolidation."""

    confidence: Share = 0.6  # of a write that does not say
    promote_from: Share = 0.6  # a lower confidence needs a review
    reinforce: Share = 0.1  # more confidence with each further source
    forget_below: Share = 0.05  # strength = confidence * decay of the age
    half_life_s: Interval = 30 * 86_400.0
    decay: Literal["exp", "power"] = "power"
    after_writes: Positive | None = 100  # consolidate after so many writes,
    after_s: Interval | None = 3600.0  # so long after the first of them,
    idle_s: Interval | None = 60.0  # or when nothing was written for so long
