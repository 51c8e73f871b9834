"""Writes the dead letters of one group and partition."""

from __future__ import annotations

import logging

from trunkline.clock import Clock
from trunkline.delivery.deadletters import TRACEBACK, write_letter
from trunkline.delivery.observers import Observers
from trunkline.delivery.outcomes import GivenUp
from trunkline.delivery.prefetch import Prefetch
from trunkline.event import Record
from trunkline.group import Lease
from trunkline.names import GroupKey, dead_topic
from trunkline.store import Store

logger = logging.getLogger(__name__)


def log_letter(key: GroupKey, letter: int, given_up: GivenUp) -> None:
    """Say that a record was given up, with the number of its letter. A record that ran out of tries
    is an error, with the traceback of the last one; a rejected record is not.
    """
    error = given_up.error
    cause = getattr(error, "cause", None)  # of a handler in this process
    told, _, trace = error.partition(TRACEBACK)
    if trace and cause is None:
        told += TRACEBACK + trace.rstrip()
    logger.log(
        logging.ERROR if given_up.reason == "retries" else logging.INFO,
        "gave up %s/%d@%d of group %s after %d attempts: letter %d of %s: %s",
        key.topic,
        key.partition,
        given_up.lease.offset,
        key.group,
        given_up.lease.attempt,
        letter,
        key.topic,
        told,
        exc_info=cause,
    )


class LetterWriter:
    """Holds records that are given up, leased, until their letters are durable."""

    def __init__(self, store: Store, key: GroupKey, clock: Clock, observers: Observers) -> None:
        self._store = store
        self._key = key
        self._clock = clock
        self._observers = observers
        self._given_up: list[GivenUp] = []

    def __bool__(self) -> bool:
        return bool(self._given_up)

    def add(self, given_up: list[GivenUp]) -> None:
        self._given_up += given_up

    def forget(self) -> None:
        self._given_up.clear()

    async def write(self, prefetch: Prefetch) -> list[Lease]:
        """Write a letter for each. The leases may be settled then, and not before."""
        given_up, self._given_up = self._given_up, []
        try:
            written = await self._write(prefetch, given_up)
        except BaseException:
            self._given_up = given_up + self._given_up
            raise
        for record, one in written:
            told = one.error.partition(TRACEBACK)[0]
            self._observers.tell_dead_letter(self._key, record, one.reason, told)
        return [one.lease for one in given_up]

    async def _write(
        self, prefetch: Prefetch, given_up: list[GivenUp]
    ) -> list[tuple[Record, GivenUp]]:
        await prefetch.fetch(one.lease.offset for one in given_up)
        records = prefetch.records
        found = [(records.get(one.lease.offset), one) for one in given_up]
        written = [(record, one) for record, one in found if record is not None]
        if written:
            group, at = self._key.group, self._clock.now()
            letters = [
                write_letter(record, group, one.lease.attempt, one.reason, one.error, at)
                for record, one in written
            ]
            receipts = await self._store.append(dead_topic(self._key.topic), letters)
            for (_, one), receipt in zip(written, receipts, strict=True):
                log_letter(self._key, receipt.offset, one)
        for one in given_up:
            records.pop(one.lease.offset, None)
        return written
