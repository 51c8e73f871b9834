"""Errors between two processes: one table of errors, codes on the wire and statuses in HTTP."""

from __future__ import annotations

from typing import Any, Final

from trunkline import errors
from trunkline.errors import InvalidEvent, ProtocolError, TrunklineError
from trunkline.wire.frames import Corr, Failure

# One table for both doors: the error, its code on the wire, its status in HTTP. The first that fits
# is taken; the client raises the first whose code it reads.
CODES: Final[tuple[tuple[type[TrunklineError], str, int], ...]] = (
    (errors.InvalidName, "invalid_name", 400),
    (errors.InvalidOption, "invalid_option", 400),
    (errors.InvalidFilter, "invalid_filter", 400),
    (errors.InvalidEvent, "invalid_event", 400),
    (errors.Invalid, "invalid", 400),
    (errors.OutOfRange, "out_of_range", 404),
    (errors.NotFound, "not_found", 404),
    (errors.NoBus, "no_bus", 404),
    (errors.Duplicate, "duplicate", 409),
    (errors.Conflict, "conflict", 409),
    (errors.Denied, "denied", 403),
    (errors.StorageFull, "storage_full", 507),
    (errors.LockTimeout, "busy", 503),
    (errors.StorageError, "storage", 503),
    (errors.Closed, "closing", 503),
    (errors.ConnectionLost, "closing", 503),
    (errors.ProtocolError, "bad_frame", 400),
    (errors.TrunklineError, "failed", 500),
)


def code_of(error: TrunklineError) -> str:
    own = error.fields.get("code")
    if isinstance(own, str):
        return own
    return next(code for kind, code, _ in CODES if isinstance(error, kind))


def status_of(error: TrunklineError) -> int:
    own = error.fields.get("status")
    if isinstance(own, int):
        return own
    return next(status for kind, _, status in CODES if isinstance(error, kind))


def failure_of(error: TrunklineError, corr: Corr | None = None, **fields: Any) -> Failure:
    path = error.fields.get("path") if code_of(error) == "schema" else None
    return Failure(
        corr=corr,
        code=code_of(error),
        message=error.message,
        hint=error.hint or None,
        path=path,
        retry_s=error.fields.get("retry_s"),
        **fields,
    )


def error_of(failure: Failure) -> TrunklineError:
    """The error that the other side had."""
    kind = next((kind for kind, code, _ in CODES if code == failure.code), None)
    kind = kind or _OTHERS.get(failure.code, ProtocolError)
    fields = {"path": failure.path} if failure.path is not None else {}
    if failure.retry_s is not None:
        fields["retry_s"] = failure.retry_s  # type: ignore[assignment]
    return kind(failure.message, hint=failure.hint or "", code=failure.code, **fields)


_OTHERS: Final[dict[str, type[TrunklineError]]] = {
    "schema": InvalidEvent,
    "unauthenticated": errors.Denied,
    "rate": errors.Conflict,
    "slow": errors.ConnectionLost,
    "internal": TrunklineError,
}
