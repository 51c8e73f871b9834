"""Durations as Prometheus has them: how many were at most so long, by bounds that never change."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

BOUNDS: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
    float("inf"),
)


class Spans:
    """A histogram of seconds."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * len(BOUNDS)
        self.total_s = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += count
        self.total_s += seconds * count
