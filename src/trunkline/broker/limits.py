"""How much one agent may ask for."""

from __future__ import annotations


class Bucket:
    """``rate`` tokens a second, and as many at once as one second gives."""

    __slots__ = ("_at", "_left", "rate")

    def __init__(self, rate: float, now: float) -> None:
        self.rate = rate
        self._left = rate
        self._at = now

    def take(self, count: int, now: float) -> float:
        """0 if there was enough; else how many seconds to wait, and nothing was taken."""
        self._left = min(self.rate, self._left + (now - self._at) * self.rate)
        self._at = now
        if self._left < min(count, self.rate):
            return (min(count, self.rate) - self._left) / self.rate
        self._left -= count
        return 0.0
