"""What can happen to a group, one value each: the lines of its journal."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from trunkline.options import GroupOptions

Spans = Sequence[tuple[int, int]]


class Op(msgspec.Struct, frozen=True, tag_field="op", tag=str.lower, omit_defaults=True):
    """A change of a group."""


class Created(Op, frozen=True):
    """The group begins behind ``floor``, with this policy. ``era`` tells its leases from
    those of one that had the name before.
    """

    floor: int
    options: GroupOptions
    era: int = 0


class Leased(Op, frozen=True):
    """``by`` holds these until ``until``. Those in ``held`` are not delivered: it only keeps them
    while it writes their dead letters, so no attempt is counted.
    """

    by: str
    until: float
    offsets: Spans = ()
    held: Spans = ()


class Settled(Op, frozen=True):
    """``dropped`` is for the books of dead letters: these were dropped, and not redriven.
    ``filtered``: the group's filter refused them.
    """

    offsets: Spans
    dropped: bool = False
    filtered: bool = False


class Failed(Op, frozen=True):
    """Each ``(offset, at)`` may be leased again from ``at`` on. ``crashed``: the process or client
    that had them ended without settling them.
    """

    again: Sequence[tuple[int, float]]
    crashed: bool = False


class Returned(Op, frozen=True):
    """Leased but never handed out: free again, and the attempt does not count."""

    offsets: Spans


class Extended(Op, frozen=True):
    until: float
    offsets: Spans


class Freed(Op, frozen=True):
    """The member is gone: what it held is free again."""

    by: str


class Sought(Op, frozen=True):
    """Everything at or below ``floor`` counts as settled, nothing above it."""

    floor: int


class Redriven(Op, frozen=True):
    """Settled offsets that are to be delivered once more, with all their attempts before them."""

    offsets: Spans


class Paused(Op, frozen=True):
    on: bool


class Edited(Op, frozen=True):
    """The group has another policy from here on, and keeps its place."""

    options: GroupOptions


class Anchored(Op, frozen=True):
    """What the clocks said together: makes monotonic times readable under another boot."""

    boot: str
    mono: float
    wall: float


Change = (
    Created
    | Leased
    | Settled
    | Failed
    | Returned
    | Extended
    | Freed
    | Sought
    | Redriven
    | Paused
    | Edited
    | Anchored
)
AnyOp = Change
