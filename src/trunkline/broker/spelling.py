"""How members of JSON answers and bodies are spelt: one case, one format of time.

Names are ``snake_case`` and times are RFC 3339 in UTC (``2026-05-04T12:00:00Z``). A body may use an
older name in camelCase. An answer has the names of the older Node.js service beside ours, for the
clients of that service.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from trunkline.delivery.deadletters import Letter
from trunkline.errors import InvalidOption
from trunkline.event import Record
from trunkline.units import read_time
from trunkline.wire.envelope import envelope_of

# Our name of a member, and the older one that a body may have in its place.
ALIASES: Final = {
    "retention_ms": "retentionMs",
    "max_attempts": "maxAttempts",
    "ack_timeout_ms": "ackTimeoutMs",
    "publish_acl": "publishACL",
    "subscribe_acl": "subscribeACL",
    "dry_run": "dryRun",
    "max_redrives": "maxRedrives",
}
# Our name of a member of an answer, and the name by which the older service's clients read it.
SHOWN: Final = {
    "retention_ms": "retentionMs",
    "max_attempts": "maxAttempts",
    "publish_acl": "publishACL",
    "subscribe_acl": "subscribeACL",
    "last_committed": "lastCommitted",
    "by_topic": "byTopic",
}
_OLDER: Final = {older: name for name, older in ALIASES.items()}


def our_names(body: Any) -> Any:
    """A body with our names in the place of older ones; both at once are refused."""
    if not isinstance(body, dict):
        return body
    found: dict[str, Any] = {}
    for name, value in body.items():
        ours = str(_OLDER.get(name, name))
        if ours in found:
            raise InvalidOption(
                f"{ours} and {ALIASES[ours]} are one member, given twice", name=ours
            )
        found[ours] = value
    return found


def with_aliases(row: Mapping[str, Any]) -> dict[str, Any]:
    """An answer's object, with the older names beside ours."""
    return {**row, **{older: row[name] for name, older in SHOWN.items() if name in row}}


def moment(epoch_s: float | None) -> datetime | None:
    """A time as every answer has it."""
    return None if epoch_s is None else datetime.fromtimestamp(epoch_s, UTC)


def event_row(record: Record, attempt: int | None = None) -> dict[str, Any]:
    """A record in an answer: its envelope, and its time in the format of every other time. ``ts``,
    in epoch milliseconds, is the older service's.
    """
    envelope = envelope_of(record) if attempt is None else envelope_of(record, attempt)
    row: dict[str, Any] = msgspec.structs.asdict(envelope)
    payload = row.pop("payload")
    kept = {k: v for k, v in row.items() if v is not None and v is not msgspec.UNSET}
    return {**kept, "time": record.event.ts.astimezone(UTC), "payload": payload}


def letter_row(letter: Letter) -> dict[str, Any]:
    """A dead letter in an answer, its event spelt as everywhere else."""
    event = event_row(Record(letter.event, letter.partition, letter.origin))
    at = read_time(letter.at).astimezone(UTC)
    return {**msgspec.structs.asdict(letter), "at": at, "event": event}
