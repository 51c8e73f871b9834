"""What one subscription on the wire was sent, and what its acks mean.

Frames are numbered as they are sent. With ``ack: "upto"`` an ACK of offset n speaks of the open
frame of n: it settles each open frame of its partition that was sent up to that one and whose
offset is at most n. A client that works in the order of the frames has worked on all of these.
Frames before it with a higher offset stay leased but leave the window: the client has read past
them. A record that only the ACK of another one covered is remembered for a while: a NACK brings it
back.

When a connection ends without a word, the client may have begun as many of the first open frames as
its handlers can have at once, of each lane the first one before any other. A client that does not
say how many that is may have begun the frames that follow the last one it spoke of, as many as it
was ever late by. It cannot have begun the rest.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

Place = Hashable

_SPARE_WINDOWS = 2


class SentFrame(Protocol):
    """A frame in a client's hands."""

    number: int

    @property
    def place(self) -> Place: ...

    @property
    def offset(self) -> int: ...

    @property
    def lane(self) -> Hashable | None: ...


class Sent:
    """The open frames of a subscription by their numbers."""

    __slots__ = ("_covered", "_late_by", "_next", "_open", "_read_to", "_window", "hands", "passed")

    def __init__(self, window: int) -> None:
        self._window = window
        self._open: dict[int, SentFrame] = {}
        self._covered: dict[tuple[Place, int], SentFrame] = {}  # by the ACK of another
        self._next = 1
        self._read_to = 0  # the last frame that an ACK or a NACK spoke of
        self._late_by = 1  # the most frames that the client was late by
        self.hands = 0  # records that the client's handlers may have at once; 0: not known
        self.passed = 0  # open frames that the client has read past

    def add(self, frame: SentFrame) -> None:
        """The frame is sent now."""
        if self._covered:
            self._covered.pop((frame.place, frame.offset), None)
        frame.number = self._next
        self._open[self._next] = frame
        self._next += 1

    def spare(self) -> int:
        """How many frames more than the window may be open: those that the client has read past.
        Else a client that acks every tenth frame would wait for its tenth, and the broker for it.
        """
        return min(self.passed, _SPARE_WINDOWS * self._window)

    def remove(self, frame: SentFrame) -> None:
        """The frame is open no more."""
        if self._open.pop(frame.number, None) is not None and frame.number <= self._read_to:
            self.passed -= 1

    def speak(self, frame: SentFrame) -> None:
        """The client spoke of this frame: it has read so far."""
        number = frame.number
        if number <= self._read_to:
            return
        late_by, opened = number - self._read_to, self._open
        if late_by == 1:  # most often
            past = int(number in opened)
        else:
            self._late_by = max(self._late_by, late_by)
            past = sum(n in opened for n in range(self._read_to + 1, number + 1))
        self.passed += past
        self._read_to = number

    def close(self, frame: SentFrame) -> None:
        """The client spoke of this frame, and it is open no more."""
        if frame.number == self._read_to + 1:  # most often
            self._read_to += 1
            self._open.pop(frame.number, None)
        else:
            self.speak(frame)
            self.remove(frame)

    def upto(self, frame: SentFrame) -> list[SentFrame]:
        """What an ACK of this frame settles, the frame itself last."""
        found = []
        for number, other in self._open.items():
            if number >= frame.number:
                break
            if other.offset < frame.offset and other.place == frame.place:
                found.append(other)
                self._covered[other.place, other.offset] = other
        while len(self._covered) > self._window:
            del self._covered[next(iter(self._covered))]
        return [*found, frame]

    def uncover(self, place: Place, offset: int) -> SentFrame | None:
        """The frame of a record that only the ACK of another one settled."""
        return self._covered.pop((place, offset), None)

    def begun(self) -> set[int]:
        """The numbers of open frames that the client may have begun."""
        if self.hands:
            firsts: dict[object, int] = {}
            for number, frame in self._open.items():
                lane = number if frame.lane is None else frame.lane
                firsts.setdefault(lane, number)
            others = self._open.keys() - firsts.values()
            return set([*firsts.values(), *sorted(others)][: self.hands])
        reach = self._read_to + self._late_by
        return {number for number in self._open if number <= reach}
