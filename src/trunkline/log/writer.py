"""Appending to one partition: numbering, writing and syncing a batch under the partition's lock.

Any process may hold a writer. Each append first catches up with what others wrote: the head says
where the log ends, and a file that is longer than the head was left by a writer that died.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple
from zlib import crc32

from msgspec.structs import replace

from trunkline.clock import Clock
from trunkline.errors import Corrupt, LockTimeout, StorageError
from trunkline.event import Event
from trunkline.log import atomic, layout
from trunkline.log.dedup import Recent, has_idem_keys
from trunkline.log.head import Head, HeadFile
from trunkline.log.line import Seal, frame_batch, frame_seal
from trunkline.log.reader import list_segments
from trunkline.log.recover import Damage, is_whole, survey
from trunkline.log.segment import Entry, Segment, index_line
from trunkline.options import StoreOptions, TopicOptions

_ts = attrgetter("ts")


class Placed(NamedTuple):
    """Where a batch went: ``first`` and the offsets after it, except that the events at the
    positions in ``duplicates`` were not written, and are the records named there.
    """

    first: int
    size: int
    duplicates: dict[int, int]

    def offsets(self) -> list[int]:
        if not self.duplicates:
            return list(range(self.first, self.first + self.size))
        fresh = iter(range(self.first, self.first + self.size))
        return [
            self.duplicates[i] if i in self.duplicates else next(fresh) for i in range(self.size)
        ]


class PartitionWriter:
    def __init__(
        self, root: str, topic: str, partition: int, options: StoreOptions, clock: Clock
    ) -> None:
        self.topic = topic
        self.partition = partition
        self._root = root
        self._options = options
        self._clock = clock
        self._boot = clock.boot.replace("-", "")[:12]
        self._stem = layout.log_stem(topic, partition)
        self._head = HeadFile(os.path.join(root, self._stem + ".head"))
        self._opened = 0
        self._fd = -1
        self._number = 0
        self._index = -1
        self._recent = Recent(root, topic, partition)
        self._wrote = False
        self._has_new_epoch = False  # begun here, and the groups of the partition do not know
        self.sync_s = 0.0  # how long the last sync took
        self.has_finished = False  # a segment, and so there may be something to tend
        self._mutex = threading.Lock()  # the file lock is the process's, this one the thread's

    def append(
        self,
        bodies: Sequence[bytes],
        events: Sequence[Event],
        topic: TopicOptions,
        timeout_s: float | None = None,
    ) -> Placed:
        """Write the events, encoded as ``bodies``, as one batch: all of them or none.

        When it returns they are as durable as the topic asks for. ``StorageFull`` and every other
        error mean that none of them is in the log.
        """
        head = self.begin(timeout_s)
        try:
            if topic.durability == "os" and not head.boot:
                head = self._mark_boot(head)
            now = int(self._clock.now().timestamp() * 1_000_000)
            duplicates: dict[int, int] = {}
            has_keys = topic.dedup_window_s > 0 and has_idem_keys(events)
            if has_keys:
                duplicates = self._recent.find(events, head, now, topic)
                if duplicates:
                    bodies = [b for i, b in enumerate(bodies) if i not in duplicates]
                    if not bodies:
                        return Placed(head.next, len(events), duplicates)
            before, head = head, self._write(head, list(bodies), events, topic, now)
            if has_keys:
                self._recent.add(events, duplicates, head, now)
            elif topic.dedup_window_s:
                self._recent.skip(before, head)
            return Placed(head.next - len(bodies), len(events), duplicates)
        finally:
            self.end()

    def begin(self, timeout_s: float | None = None) -> Head:
        """Take the lock, and make the files fit the head. The caller must ``end`` it."""
        if timeout_s is None:
            timeout_s = self._options.lock_timeout_s
        if not self._mutex.acquire(timeout=timeout_s):
            raise LockTimeout(f"{self.topic}/{self.partition} is locked by another thread")
        try:
            self._head.lock(timeout_s)
            if self._head.opened != self._opened:
                self._start_over()
            known = head = self._head.load()
            if head is None or not self._fits(head):
                head = self._recover(head)
            if head.boot and head.boot != self._boot:
                head = self._begin_epoch(head, known)
            return head
        except OSError as error:
            self.end()
            raise atomic.storage_error(error, self._head.path) from error
        except BaseException:
            self.end()
            raise

    def _begin_epoch(self, head: Head, known: Head | None) -> Head:
        """The machine was booted anew, and records were not synced before: the head and the log may
        have fallen back together to an earlier state that fits. A group whose journal was synced
        then knows of offsets that are used again from here on.
        """
        if known is None or known.epoch == head.epoch:  # else the recovery began one
            reused = min(head.next, head.reused or head.next)
            head = replace(head, epoch=head.epoch + 1, reused=reused, since=head.next)
        head = replace(head, boot=self._boot)
        self.save(head, durable=True)
        self._has_new_epoch = True
        return head

    def compare(self, is_ahead: Callable[[int], bool]) -> None:
        """Begin an epoch if a group knows of offsets that the log, which ends before ``next``, does
        not have: the log fell back with its head, under this very boot. ``is_ahead`` is called
        under the lock, so no record can be written and settled meanwhile.
        """
        head = self.begin()
        try:
            if not self._has_new_epoch and is_ahead(head.next):
                self._begin_epoch(head, head)
        finally:
            self.end()

    def take_new_epoch(self) -> bool:
        """Whether this writer began an epoch since the last call."""
        began, self._has_new_epoch = self._has_new_epoch, False
        return began

    def _mark_boot(self, head: Head) -> Head:
        """Say durably that records may lie unsynced from now on, before the first one does."""
        head = replace(head, boot=self._boot)
        self.save(head, durable=True)
        return head

    def _start_over(self) -> None:
        """Another process removed the topic: what is held here are files without a name."""
        self._opened = self._head.opened
        self._close_segment()
        self._recent = Recent(self._root, self.topic, self.partition)
        self._wrote = False

    def end(self) -> None:
        self._head.unlock()
        self._mutex.release()

    def is_of_boot(self, head: Head) -> bool:
        """Whether every record of the log that was not synced was written since the last boot."""
        return head.boot in ("", self._boot)

    def is_behind(self) -> bool:
        """Whether somebody else may have written since this writer did."""
        return self._head.is_changed()

    def segments(self) -> list[Segment]:
        return list_segments(self._root, self._stem)

    def save(self, head: Head, *, durable: bool = False) -> None:
        """Show a new head to every reader. Only between ``begin`` and ``end``."""
        self._head.store(head)
        if durable:
            self._head.sync()

    def hide(self, head: Head) -> None:
        """Show no record any more. Only between ``begin`` and ``end``."""
        self._close_segment()
        with contextlib.suppress(StorageError):  # shown it is, and that is enough while we live
            self.save(_fresh(replace(head, start=head.next), head.segment + 1), durable=True)

    def clear(self) -> None:
        """Show the end of a log that never began. Only behind ``hide``, when its files are gone."""
        self._head.clear()

    def roll(self, head: Head) -> Head:
        """Finish the last segment: sync, seal, sync. The next append makes the next one."""
        if not head.records:
            return head
        self._open(head)
        first = Segment(self._root, self._stem, head.segment).first or head.next - head.records
        seal = Seal(head.records, first, head.next - 1, f"{head.sum:08x}", head.ts)
        if head.durable < head.end:
            self._sync(head)
        try:
            atomic.write_all(self._fd, frame_seal(seal))
        except OSError as error:
            self._roll_back(head)
            raise atomic.storage_error(error, self._path(head.segment)) from error
        self._sync(head)
        self._close_segment()
        self.has_finished = True
        head = _fresh(head, head.segment + 1)
        self.save(head)
        return head

    def sync(self) -> None:
        """Make durable what was written without waiting for it, and the head itself."""
        if not self._wrote:
            return
        head = self.begin()
        try:
            self._wrote = False
            if head.durable < head.end:
                self._open(head)
                self._sync(head)
                head = replace(head, durable=head.end)
            with contextlib.suppress(StorageError):  # it only saves the next one a look
                self.save(head, durable=True)
        except OSError as error:
            raise atomic.storage_error(error, self._head.path) from error
        finally:
            self.end()

    def close(self) -> None:
        try:
            self.sync()
        finally:
            with self._mutex:  # a thread that tends the log may have it locked by these files
                self._close_segment()
                self._head.close()

    @property
    def is_open(self) -> bool:
        return self._head.fd >= 0

    def rest(self) -> None:
        """Close the files until the next append, unless somebody is at it."""
        last = self._head.last
        if last is not None and last.durable < last.end:
            with contextlib.suppress(StorageError):
                self.sync()
        if self._mutex.acquire(blocking=False):
            try:
                self._close_segment()
                self._head.close()
                self._recent.close()
            finally:
                self._mutex.release()

    def abandon(self) -> None:
        """Let go without a word: in a forked child, or when the files are gone."""
        self._close_segment()
        self._head.close()

    def _write(
        self,
        head: Head,
        bodies: list[bytes],
        events: Sequence[Event],
        topic: TopicOptions,
        now: int,
    ) -> Head:
        lines = frame_batch(head.next, bodies, head.durable, now)
        data = b"".join(lines)
        full = topic.segment_records is not None and head.records >= topic.segment_records
        if head.records and (full or head.end + len(data) > topic.segment_bytes):
            head = self.roll(head)
            if not self._fits(head):  # a file that is none of ours is in the next one's place
                head = self._recover(head)
            lines = frame_batch(head.next, bodies, head.durable, now)
            data = b"".join(lines)
        self._open(head)
        self._wrote = True
        try:
            atomic.write_all(self._fd, data)
        except OSError as error:
            self._roll_back(head)
            raise atomic.storage_error(error, self._path(head.segment)) from error
        durable = head.durable
        end = head.end + len(data)
        if topic.durability == "fsync":
            self._sync(head)
            durable = end
        latest = int(max(map(_ts, events)).timestamp() * 1_000_000)
        fresh = Head(
            epoch=head.epoch,
            segment=head.segment,
            records=head.records + len(lines),
            start=head.start,
            next=head.next + len(lines),
            end=end,
            durable=durable,
            sum=crc32(data, head.sum),
            ts=max(head.ts, latest),
            indexed=self._note(head, lines, len(data), latest),
            reused=head.reused,
            since=head.since,
            boot=head.boot,
        )
        try:
            self._head.store(fresh)
        except OSError as error:  # nobody has seen the batch yet
            self._roll_back(head)
            raise atomic.storage_error(error, self._head.path) from error
        return fresh

    def _sync(self, head: Head) -> None:
        """Sync the segment; on failure go back to ``head`` in a new one."""
        began = time.perf_counter()
        try:
            atomic.sync(self._fd)
            self.sync_s = time.perf_counter() - began
        except OSError as error:
            self._abandon(head)
            raise atomic.storage_error(error, self._path(head.segment)) from error

    def _note(self, head: Head, lines: list[bytes], size: int, latest: int) -> int:
        """Add to the index what has grown past its step; returns the last position noted."""
        step = self._options.index_bytes
        indexed = head.indexed
        if head.end + size - indexed < step:
            return indexed
        entries: list[Entry] = []
        positions = [*accumulate(map(len, lines), initial=head.end)]
        while (index := bisect_left(positions, indexed + step)) < len(lines):
            # Inside a batch, the batch's latest time stands for the lines before: an entry
            # may name a time too late, never one too early.
            ts = max(head.ts, latest) if index else head.ts
            indexed = positions[index]
            entries.append(Entry(head.next + index, indexed, ts))
        if entries:
            try:
                atomic.write_all(self._index, b"".join(map(index_line, entries)))
            except OSError:
                return indexed  # the index only hints; the batch itself is safe
        return indexed

    def _open(self, head: Head) -> None:
        """Have the segment that ``head`` names open for appending; make it if it is not there."""
        if self._number == head.segment and self._fd >= 0:
            return
        self._close_segment()
        path = self._path(head.segment)
        try:
            try:
                self._fd = atomic.open_file(path, os.O_RDWR | os.O_APPEND)
            except FileNotFoundError:
                self._fd = atomic.create_file(path, os.O_RDWR | os.O_APPEND)
            index = Segment(self._root, self._stem, head.segment).index_path
            self._index = atomic.open_file(index, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        except OSError as error:
            self._close_segment()
            raise atomic.storage_error(error, path) from error
        self._number = head.segment

    def _fits(self, head: Head) -> bool:
        """Whether the last segment is just as long as the head says, and still has its name; and,
        when this process begins to write, whether it holds what was not synced when the last one
        ended.
        """
        if self._number == head.segment:
            held = os.fstat(self._fd)
            return held.st_size == head.end and held.st_nlink > 0
        self._close_segment()
        try:
            if os.stat(self._path(head.segment)).st_size != head.end:
                return False
        except FileNotFoundError:
            return head.end == 0 and self._is_last(head)
        segment = Segment(self._root, self._stem, head.segment)
        try:
            if head.durable < head.end and not self._wrote and not is_whole(segment, head):
                return False
            torn = head.end > 0 and segment.read(head.end - 1, 1) != b"\n"
        finally:
            segment.close()
        if torn:  # what is appended would become part of the damaged line
            why = "the last line has no end"
            self._quarantine(Damage(segment, head.segment, head.end - 1, why), head, [segment])
        return True

    def _is_last(self, head: Head) -> bool:
        return all(s.number < head.segment for s in self.segments())

    def _recover(self, head: Head | None) -> Head:
        """Make the files fit again after a crash; quarantine what is damaged."""
        self._close_segment()
        segments = self.segments()
        found = survey(segments, head)
        if found.damage is not None:
            self._quarantine(found.damage, found.head, segments)
        for segment, keep in found.cuts:
            fd = atomic.open_file(segment.path, os.O_RDWR)
            try:
                os.ftruncate(fd, keep)
                atomic.sync(fd)
            finally:
                os.close(fd)
        for segment, state in found.open:
            self._seal_left(segment, state)
        if any(s.number == found.head.segment for s in segments):
            self._open(found.head)
            atomic.sync(self._fd)
        atomic.sync_dir(os.path.dirname(os.path.join(self._root, self._stem)))
        with contextlib.suppress(StorageError):  # what was found can be found again
            self.save(found.head, durable=True)
        return found.head

    def _seal_left(self, segment: Segment, state: Head) -> None:
        fd = atomic.open_file(segment.path, os.O_RDWR | os.O_APPEND)
        try:
            first = segment.first or state.next
            seal = Seal(state.records, first, state.next - 1, f"{state.sum:08x}", state.ts)
            atomic.write_all(fd, frame_seal(seal))
            atomic.sync(fd)
        finally:
            os.close(fd)

    def _quarantine(self, damage: Damage, state: Head, segments: list[Segment]) -> None:
        bad = damage.segment
        later = [s for s in segments if s.number > damage.number]
        if later:
            following = survey(later, None).head
            known = {name: getattr(state, name) for name in ("start", "epoch", "reused", "since")}
            state = replace(following, boot=state.boot, **known)
        else:
            state = _fresh(state, damage.number + 1)
        path = self._path(damage.number) if bad is None else bad.path
        hint = "publishing goes on behind it; 'trunkline doctor --salvage' brings back what is left"
        if bad is not None and not bad.bad:
            atomic.move_file(path, path + ".corrupt")
            path += ".corrupt"
            hint = f"it was set aside as {os.path.basename(path)}; {hint}"
        self.save(state, durable=True)
        name = os.path.relpath(path.removesuffix(".corrupt"), self._root)
        raise Corrupt(
            f"{name} is damaged at byte {damage.position}: {damage.why}",
            path=path,
            position=damage.position,
            hint=hint,
        )

    def _roll_back(self, head: Head) -> None:
        """Take back what a failed write left behind."""
        try:
            os.ftruncate(self._fd, head.end)
        except OSError:
            self._abandon(head)

    def _abandon(self, head: Head) -> None:
        """Never use this file again: after a failed sync nobody knows what the device holds.

        The log goes on in the next segment with the same offsets; readers take offsets that are
        in both from the later one.
        """
        with contextlib.suppress(OSError):  # the next segment's first offset overrules these bytes
            os.ftruncate(self._fd, head.end)
        self._close_segment()
        fresh = _fresh(head, head.segment + 1)
        with contextlib.suppress(OSError):  # it is there, or the next append makes it
            os.close(atomic.create_file(self._path(fresh.segment)))
        self.save(fresh)

    def _path(self, number: int) -> str:
        return os.path.join(self._root, layout.segment_path(self._stem, number))

    def _close_segment(self) -> None:
        for fd in (self._fd, self._index):
            if fd >= 0:
                os.close(fd)
        self._fd = self._index = -1
        self._number = 0


def _fresh(head: Head, segment: int) -> Head:
    """``head`` moved on to an empty segment."""
    return replace(head, segment=segment, records=0, end=0, durable=0, sum=0, ts=0, indexed=0)
