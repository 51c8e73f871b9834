"""A store in MongoDB, shared by members on several machines.

**One document is one batch.** Its ``_id`` holds topic, partition and first offset, and its insert
is the compare-and-append: a writer that did not know the true end meets a duplicate key, reads
what it missed and tries again. A writer that is killed leaves no hole, no double, and nobody waits
for it: ``append``.

**One document is one group**: a snapshot, the changes since, a sequence number and a lock with a
lease. A step takes the lock, applies the changes of other members, and writes its own changes and
the release of the lock in one update that names the sequence number; a step whose lock ran out is
``Raced``: ``groups``.

A person finds the names of the older service: ``events`` (a view with a row for each event),
``counters``, ``group_offsets`` and ``topic_configs``.
"""

from trunkline.store.mongo.store import MongoStore

__all__ = ["MongoStore"]
