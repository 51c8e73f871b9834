"""How much one agent may ask for."""

from __future__ import annotations


class Bucket:
    """``rate`` tokens a second, and as many at once as one second gives."""

    __slots__ = ("_at", "_left", "rate")

    def __init__(self, rate: float, now: float) -> None:
        self.rate = rate
        self._left = rate
        self._at = now

    def take(self, now: float) -> float:
        """0 if there was one; else how many seconds to wait for it."""
        self._left = min(self.rate, self._left + (now - self._at) * self.rate)
        self._at = now
        if self._left < 1:
            return (1 - self._left) / self.rate
        self._left -= 1
        return 0.0
