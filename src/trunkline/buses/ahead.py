"""How far ahead of its reader a subscription fetches."""

from __future__ import annotations

from time import monotonic

_SOON_S = 0.05


class Ahead:
    """How many deliveries may lie unread. What lies there is leased: that counts as a try, and its
    time runs. So a slow reader has few that it does not read yet, a quick one as many as it may.
    """

    __slots__ = ("_read_at", "limit", "most")

    def __init__(self, most: int) -> None:
        self.limit = 1
        self.most = most
        self._read_at = 0.0

    def took(self, came: float, left: int) -> bool:
        """One that came at this time of the monotonic clock is read, so many are left. True if it
        lay there for long: its time should begin anew.
        """
        now = monotonic()  # real time, whatever the bus's clock
        is_quick = now - self._read_at <= _SOON_S
        self._read_at = now
        if now - came > _SOON_S:
            self.limit = max(1, self.limit // 2)
            return True
        if is_quick and not left:
            self.limit = max(1, min(2 * self.limit, self.most))
        return False
