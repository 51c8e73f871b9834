"""The watcher of a file store: it rings the bell for what other processes do to the folder."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os

from trunkline.folder import Folder
from trunkline.folder.inotify import Inotify
from trunkline.folder.news import News
from trunkline.names import GroupKey
from trunkline.store import Bell

logger = logging.getLogger(__name__)

_PLACES = ("", "wal", "offsets", "members", "dlq")
_REMINDERS = 20  # polls until each listener was reminded once


class Watcher:
    def __init__(self, folder: Folder, bell: Bell) -> None:
        self._folder = folder
        self._bell = bell

    async def run(self) -> None:
        """Ring for changes that the kernel reports, for changes that a look at the files shows,
        and now and then without a reason: nothing depends on a report.
        """
        loop = asyncio.get_running_loop()
        poll_s = self._folder.options.poll_s
        places = [os.path.join(self._folder.path, place) for place in _PLACES]
        try:
            kernel = Inotify(places)
        except OSError as error:  # no inotify instance is left, for example
            logger.debug("polling every %s s: %s", poll_s, error)
            await self._poll(poll_s)
            return
        try:
            loop.add_reader(kernel.fd, lambda: self._ring(self._folder.heard(kernel.changes())))
            for turn in itertools.count(1):
                await asyncio.sleep(poll_s)
                self._bell.remind(turn, _REMINDERS)
                try:
                    self._ring(self._folder.noticed(turn))
                except OSError as error:  # no file can be opened just now, for example
                    logger.debug("not looked: %s", error)
        finally:
            loop.remove_reader(kernel.fd)
            kernel.close()

    async def _poll(self, poll_s: float) -> None:
        while True:
            await asyncio.sleep(poll_s)
            self._bell.ring(None)

    def _ring(self, news: News) -> None:
        for one in news:
            if isinstance(one, GroupKey):
                self._bell.tell(one)
            else:
                self._bell.ring(one or None)
