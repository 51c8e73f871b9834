"""Everything that can go wrong, in one tree.

::

    TrunklineError
    ├── Invalid                                  the caller's fault; nothing was written
    │   ├── InvalidEvent · InvalidName · InvalidOption · InvalidFilter
    ├── NoBus                                    there is no bus at that place
    ├── NotFound                                 the bus has no such topic, group, record, ...
    │   └── OutOfRange                           the offset was trimmed, or is not written yet
    ├── Conflict                                 someone else got there first
    │   ├── Duplicate                            the same event is there already
    │   └── Raced                                another member committed first; try again
    ├── StorageError                             the disk
    │   ├── Corrupt                              damaged bytes; names the file and the position
    │   ├── StorageFull                          no room; publishing resumes by itself
    │   ├── LockTimeout                          another process holds the lock for too long
    │   └── UnsupportedFormat                    written by a newer version
    ├── Closed                                   used after close, or in a forked child
    ├── ConnectionLost · ProtocolError           the wire
    ├── Denied                                   access
    │   └── QuotaExceeded                        too much for now; says when to try again
    ├── Sealed                                   a payload is encrypted and cannot be opened
    │   ├── KeyMissing                           the key ring, or the key, is not here
    │   ├── WrongKey                             the key does not open it, or it was changed
    │   └── Erased                               the key was shredded
    └── Tampered                                 the log is not the one that was signed

    HandlerSignal                                what a handler raises on purpose; never logged
    ├── Retry                                    deliver again, later
    └── Reject                                   dead letter at once
        └── FatalError                           the same, by its other common name

Each error carries the facts as fields and, where a person can act, a ``hint``.
"""

from __future__ import annotations

from typing import Any


class TrunklineError(Exception):
    """Something failed in Trunkline."""

    def __init__(self, message: str = "", *, hint: str = "", **fields: Any) -> None:
        self.message = message or (type(self).__doc__ or "").strip()
        self.hint = hint
        self.fields = fields
        super().__init__(self.message)

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(name)

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.hint, self.fields)


def _rebuild(
    cls: type[TrunklineError], message: str, hint: str, fields: dict[str, Any]
) -> TrunklineError:
    return cls(message, hint=hint, **fields)


class Invalid(TrunklineError):
    """The input is not valid; nothing was written."""


class InvalidEvent(Invalid):
    """The event is not valid."""


class InvalidName(Invalid):
    """The name is not valid."""


class InvalidOption(Invalid):
    """The option is not valid."""


class InvalidFilter(Invalid):
    """The filter is not valid."""


class NoBus(TrunklineError):
    """There is no bus here."""


class NotFound(TrunklineError):
    """There is no such thing on this bus."""


class OutOfRange(NotFound):
    """The offset is outside what the log holds."""


class Conflict(TrunklineError):
    """It conflicts with what is there."""


class Duplicate(Conflict):
    """The same event is there already."""


class Raced(Conflict):
    """Another member of the group committed first; nothing of this transaction happened."""


class StorageError(TrunklineError):
    """The storage failed."""


class Corrupt(StorageError):
    """Stored bytes are damaged."""


class StorageFull(StorageError):
    """There is no room left on the device."""


class LockTimeout(StorageError):
    """Another process holds the lock for too long."""


class UnsupportedFormat(StorageError):
    """The folder was written by a newer version."""


class Closed(TrunklineError):
    """It is closed."""


class ConnectionLost(TrunklineError):
    """The connection was lost."""


class ProtocolError(TrunklineError):
    """The other side broke the protocol."""


class Denied(TrunklineError):
    """Access was denied."""


class QuotaExceeded(Denied):
    """The producer or the space is over its quota."""


class Sealed(TrunklineError):
    """The payload is encrypted and cannot be opened here."""


class KeyMissing(Sealed):
    """There is no such key here."""


class WrongKey(Sealed):
    """The key does not open it."""


class Erased(Sealed):
    """The key was shredded."""


class Tampered(TrunklineError):
    """It is not what was signed."""


class HandlerSignal(Exception):
    """What a handler raises on purpose."""


class Retry(HandlerSignal):
    """Deliver the record again, after ``delay_s`` or after the group's own backoff."""

    def __init__(self, delay_s: float | None = None, reason: str = "") -> None:
        from trunkline.check import check_delay  # it raises the errors of this module

        check_delay(delay_s)
        super().__init__(reason or "retry asked for")
        self.delay_s = delay_s

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.delay_s, str(self))


class Reject(HandlerSignal):
    """Never deliver the record to this group again: it becomes a dead letter."""

    def __init__(self, reason: str = "rejected") -> None:
        super().__init__(reason)
        self.reason = reason


class FatalError(Reject):
    """Trying again cannot help."""
