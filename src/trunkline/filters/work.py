"""How much work filters do, in units that are counted and not timed.

A condition has a budget for one event (``where.WORK_MAX``). A reader that tries a filter on many
events has a share of the loop: after so many units it lets others have their turn.
"""

from __future__ import annotations

from typing import Final

SHARE: Final = 500_000  # units; a few milliseconds


class Meter:
    """The units that the filters of this process have spent."""

    __slots__ = ("units",)

    def __init__(self) -> None:
        self.units = 0


METER: Final = Meter()


class Share:
    """What one reader may spend before it gives the loop back."""

    __slots__ = ("_begun",)

    def __init__(self) -> None:
        self._begun = METER.units

    def is_spent(self) -> bool:
        """Whether it is others' turn. After True it begins anew."""
        if METER.units - self._begun < SHARE:
            return False
        self._begun = METER.units
        return True
