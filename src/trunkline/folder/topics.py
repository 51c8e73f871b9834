"""The topics of a bus folder: those that were defined, and those that were published to."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from msgspec.structs import replace

from trunkline.folder import topics_file
from trunkline.folder.root import Root
from trunkline.log import atomic, layout
from trunkline.names import check_topic
from trunkline.options import TopicOptions

DEFAULT = TopicOptions()
_LOOK_S = 0.1
_NONE = (-1, -1)
# Inode and time of topics.json, and what was read from it: one value, as any thread may replace it.
_Read = tuple[tuple[int, int], dict[str, TopicOptions]]


class FolderTopics:
    def __init__(self, root: Root) -> None:
        self._root = root
        self._path = os.path.join(root.path, "topics.json")
        self._read: _Read = (_NONE, {})
        self._look_at = 0.0

    def all(self) -> dict[str, TopicOptions]:
        """Every topic, also where a head or ``topics.json`` was lost since."""
        found = dict(self._defined())
        for folder in ("wal", "dlq"):
            for topic, partition in layout.partitions(self._root.names(folder), folder == "dlq"):
                options = found.setdefault(topic, DEFAULT)
                if partition >= options.partitions:
                    found[topic] = replace(options, partitions=partition + 1)
        return found

    def options(self, name: str) -> TopicOptions:
        """A topic's options. Every publish asks, so a change by another process is seen within a
        tenth of a second and not at once.
        """
        now = time.monotonic()
        if now > self._look_at:
            self._defined()  # a damaged file refuses every publish, not one now and then
            self._look_at = now + _LOOK_S
        return self._read[1].get(name, DEFAULT)

    def has(self, name: str) -> bool:
        stem = layout.log_stem(check_topic(name), 0)
        head = os.path.join(self._root.path, stem + ".head")
        return name in self._defined() or os.path.exists(head) or name in self.all()

    @contextlib.contextmanager
    def changing(self) -> Iterator[dict[str, TopicOptions]]:
        """The options of all defined topics, to be changed. No other process changes them
        meanwhile, and on leaving they are on disk.
        """
        with self._root.locked():
            before = self._defined()
            yield (after := dict(before))
            if after != before:
                atomic.replace_file(self._path, topics_file.encode(after))
                about = os.stat(self._path)
                self._read = ((about.st_ino, about.st_mtime_ns), after)

    def _defined(self) -> dict[str, TopicOptions]:
        try:
            about = os.stat(self._path)
            stamp = (about.st_ino, about.st_mtime_ns)
            if self._read[0] != stamp:
                self._read = (stamp, topics_file.read(self._path))
        except FileNotFoundError:
            self._read = (_NONE, {})
        except OSError as error:
            raise atomic.storage_error(error, self._path) from error
        return self._read[1]
