"""What a store or a bus promises: one value for both plugs.

A test of anything else is skipped. What can be asked for by an argument must then be refused, never
just ignored: a backend that promises less says so, it does not differ in silence.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Attempts = Literal["failed", "delivered"]
Promise = Literal["none", "os", "fsync", "replicated"]


class Features(msgspec.Struct, frozen=True, kw_only=True):
    """Each field is a promise; the defaults are those of a bus in a folder."""

    persistent: bool = True  # records and groups survive close and reopen
    shared: bool = True  # several processes may have it open at once
    durability: Promise = "fsync"  # the strongest an acknowledgement can mean
    consecutive: bool = True  # the offsets of a partition have no holes: 1, 2, 3, ...
    partitions: bool = True  # a topic may have several
    partitions_max: int | None = None  # of one topic; None: as many as TopicOptions allows
    batch_max: int | None = None  # events in one append; more are refused, and none is kept
    batch_bytes: int | None = None  # bytes in one append, likewise
    dedup: bool = True  # by idem_key, in a topic's window
    atomic_dedup: bool = True  # a batch with a repeated key is still kept all or none
    replay: bool = True  # a new group may begin at an offset or a time
    priority: bool = True
    delay: bool = True
    ttl: bool = True
    ordering: tuple[str, ...] = ("key", "partition", "none")
    shared_keys: bool = (
        True  # members share a partition in order of keys; else one has it at a time
    )
    patterns: bool = True
    dead_letters: bool = True  # they can be listed, redriven and dropped
    compact_on_request: bool = False  # a topic can be compacted now: a folder says True
    attempts: Attempts = "failed"  # what counts as a try: a failure, or every delivery
    member_timeout_s: float = 0.0  # the leases of a killed member are free after it; 0: at once
    ledgers: bool = True  # a group can be looked at and changed on one partition alone, by offset
    handles: bool = True  # a record can be leased to a handle, which another process settles
