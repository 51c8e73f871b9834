"""Retention: which records of a topic have been kept long enough."""

from __future__ import annotations

import os
from datetime import timedelta

from trunkline.folder import Folder
from trunkline.folder.trim import last_offset, trim

LAKE_GROUP = "pipeline.lake"  # its floor is the last record that Spark has copied to its tables


def retain(folder: Folder, topic: str, partition: int) -> int:
    """Apply the topic's retention. Returns how many records are gone."""
    options = folder.topic(topic)
    reader = folder.fresh_reader(topic, partition)
    try:
        head = reader.head()
        before = head.start
        if options.retention_records is not None:
            before = max(before, head.next - options.retention_records)
        if options.retention_age_s is not None:
            oldest = folder.clock.now() - timedelta(seconds=options.retention_age_s)
            before = max(before, reader.seek(oldest))
        if options.retention_bytes is not None:
            room = options.retention_bytes
            segments = reader.files()
            for at, segment in reversed(list(enumerate(segments))):
                room -= os.stat(segment.path).st_size
                if room < 0 and segment.number < head.segment and not segment.bad:
                    before = max(before, last_offset(segments[at:], head) + 1)
                    break
    finally:
        reader.close()
    before = min(before, free(folder, topic, partition, before - 1) + 1)
    return trim(folder, topic, partition, before) if before > head.start else 0


def free(folder: Folder, topic: str, partition: int, limit: int) -> int:
    """The last offset up to ``limit`` that nobody waits for, by the topic's options."""
    options = folder.topic(topic)
    if options.retain_unsettled:
        limit = min([limit, *folder.floors(topic, partition)])
    if options.retain_for_lake:
        limit = min([limit, *(folder.floors(topic, partition, LAKE_GROUP) or [0])])
    return limit
