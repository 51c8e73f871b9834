"""The workload of which power cuts are simulated: a program of its own, so that it can be traced.

::

    python -m crash.powered FOLDER PROMISES ROUNDS [planted bug]
"""

from __future__ import annotations

import os
import sys
from typing import Any

import msgspec

from trunkline.folder import Folder, upkeep
from trunkline.group import Group
from trunkline.options import GroupOptions, TopicOptions

from .plants import PLANTS
from .promises import Say, append, publish
from .scenes import GROUP, KEY, TOPIC, open_folder, take

_LAZY = "lazy"  # a topic that syncs when a segment is finished, not before


def settle(folder: Folder, say: Say, *offsets: int) -> None:
    """Settle and sync, and only then promise."""
    say("means", TOPIC, GROUP, offsets)
    folder.step(KEY, lambda group: group.settle(offsets))
    folder.sync_groups()
    say("settled", TOPIC, GROUP, offsets)


def write_lazily(folder: Folder, say: Say, *numbers: int) -> None:
    before = folder.head(_LAZY, 0).segment
    publish(folder, say, _LAZY, *numbers)
    head = folder.head(_LAZY, 0)
    if head.segment != before:
        say("sealed", _LAZY, head.next - head.records)


def bury(folder: Folder, say: Say, offset: int) -> None:
    """A dead letter, durable before its record is settled."""
    letter = {"dlq-topic": TOPIC, "dlq-partition": "0", "dlq-offset": str(offset)}
    letter |= {"dlq-group": GROUP, "dlq-attempts": "1", "dlq-reason": "retries"}
    append(folder, "t.DLQ", [100 + offset], headers=letter | {"dlq-error": "", "dlq-at": ""})
    folder.step(KEY, lambda group: group.settle([offset]))
    folder.sync_groups()
    say("settled", TOPIC, GROUP, [offset])


def publish_and_settle(folder: Folder, say: Say) -> None:
    folder.define(TOPIC, TopicOptions(segment_records=3))
    folder.define(_LAZY, TopicOptions(segment_records=3, durability="os"))
    publish(folder, say, TOPIC, 1, key="k1")
    publish(folder, say, TOPIC, 2, 3, key="k2")
    folder.step(KEY, lambda group: group.define(GroupOptions(ordering="none"), 0))
    take(folder, 3)
    settle(folder, say, 2)
    publish(folder, say, TOPIC, 4, key="k1")
    for number in range(51, 56):
        write_lazily(folder, say, number)
    publish(folder, say, TOPIC, 5, 6, 7, key="k2")
    settle(folder, say, 1)
    bury(folder, say, 3)
    for number in range(56, 59):
        write_lazily(folder, say, number)


def grow_journal(folder: Folder, say: Say) -> None:
    """Two new generations of the journal."""
    for lease in take(folder, 4):
        for now in range(6):

            def extend(group: Group, now: float = now) -> Any:
                return group.extend(lease, now=now)  # noqa: B023 -- called at once

            folder.step(KEY, extend)
        settle(folder, say, lease.offset)


def tidy(folder: Folder, say: Say) -> None:
    publish(folder, say, TOPIC, 8, key="k1")
    publish(folder, say, TOPIC, 9, key="k3")
    say("compacts", TOPIC)
    upkeep.compact(folder, TOPIC, 0)
    publish(folder, say, TOPIC, 10, key="k3")
    upkeep.pack_segments(folder, TOPIC, 0)
    say("trims", TOPIC, 4)
    upkeep.trim(folder, TOPIC, 0, 4)
    publish(folder, say, TOPIC, 11, key="k4")


def another_round(folder: Folder, say: Say, base: int) -> None:
    """More of the same on a log that has a history."""
    for number in range(base, base + 6):
        publish(folder, say, TOPIC, number, number + 10, key=f"k{number % 3}")
        write_lazily(folder, say, number + 20)
    grow_journal(folder, say)
    upkeep.compact(folder, TOPIC, 0)
    upkeep.pack_segments(folder, TOPIC, 0)


def main(root: str, told: str, rounds: str = "0", plant: str = "") -> None:
    fd = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(*what: Any) -> None:
        os.write(fd, msgspec.json.encode(what) + b"\n")

    if plant:
        PLANTS[plant]()
    folder = open_folder(root)
    publish_and_settle(folder, say)
    grow_journal(folder, say)
    tidy(folder, say)
    folder.close()
    folder = open_folder(root)
    publish(folder, say, TOPIC, 12, key="k4")
    for number in range(int(rounds)):
        another_round(folder, say, 1000 + 100 * number)
    folder.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
