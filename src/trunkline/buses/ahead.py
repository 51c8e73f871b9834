"""How far ahead of its reader a subscription fetches."""

from __future__ import annotations

from time import monotonic

_SOON_S = 0.05


class Ahead:
    """How many deliveries may lie unread. What lies there is leased: that counts as a try, and its
    time runs. So a slow reader has few that it does not read yet, a quick one as many as it may.
    """

    __slots__ = ("limit", "most")

    def __init__(self, most: int) -> None:
        self.limit = 1
        self.most = most

    def took(self, came: float, left: int) -> None:
        """One that came at this time of the monotonic clock is read, so many are left."""
        if monotonic() - came > _SOON_S:  # real time, whatever the bus's clock
            self.limit = max(1, self.limit // 2)
        elif not left:
            self.limit = min(2 * self.limit, self.most)
