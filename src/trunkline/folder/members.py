"""The members of a bus: the processes that have it open and lease records.

A member holds a lock on ``members/<name>`` as long as it lives. A file that is not locked is a
member that is gone, so its leases are free. The file tells what the member is subscribed to.
``members/<name>.hand`` marks the records that its handlers have in hand.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence

import msgspec

from trunkline.errors import StorageError
from trunkline.folder import in_hand
from trunkline.folder.in_hand import GroupMarks, HandFile
from trunkline.group.members import MemberInfo
from trunkline.log import atomic
from trunkline.log.line import Damaged, decode
from trunkline.names import GroupKey, is_handle

_decode = msgspec.json.Decoder(list[MemberInfo]).decode


class FolderMembers:
    def __init__(self, root: str, timeout_s: float) -> None:
        self.own = os.urandom(6).hex()
        self._place = os.path.join(root, "members")
        self._timeout_s = timeout_s
        self._fd = -1
        self._hand_file: HandFile | None = None

    def join(self) -> str:
        """Become a member: what this process leases is its own as long as it lives."""
        if self._fd < 0:
            try:
                self._join()
            except OSError as error:
                raise atomic.storage_error(error, self._place) from error
        return self.own

    def _join(self) -> None:
        while self._fd < 0:
            for name in os.listdir(self._place):
                if not name.endswith(in_hand.SUFFIX):
                    atomic.remove_unlocked(os.path.join(self._place, name))
            path = os.path.join(self._place, self.own)
            fd = atomic.open_file(path, os.O_RDWR | os.O_CREAT)
            atomic.lock(fd, self._timeout_s, path)
            if os.fstat(fd).st_nlink:
                self._fd = fd
            else:  # another process took the file for that of a member that is gone
                os.close(fd)

    def announce(self, told: Sequence[MemberInfo]) -> None:
        """Write into this member's file what it is subscribed to. Only people read it: a device
        that is full keeps nobody from working.
        """
        self.join()
        body = msgspec.json.encode(told)
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, body, 0)
            os.ftruncate(self._fd, len(body))

    def listening(self) -> list[MemberInfo]:
        """What the living members are subscribed to."""
        found: list[MemberInfo] = []
        try:
            names = os.listdir(self._place)
        except FileNotFoundError:  # a copy without its empty folders
            return found
        for name in names:
            path = os.path.join(self._place, name)
            if name.endswith(in_hand.SUFFIX) or not (name == self.own or self.is_alive(name)):
                continue
            for _ in range(3):  # it may be written at this moment
                with contextlib.suppress(OSError, StorageError, Damaged):
                    body = atomic.read_file(path)
                    found += decode(_decode, body) if body else []
                    break
        return found

    def is_alive(self, member: str) -> bool:
        return is_handle(member) or atomic.is_locked(os.path.join(self._place, member))

    def gone(self, members: set[str]) -> set[str]:
        """Those of the members that are not alive any more."""
        return {one for one in members if one != self.own and not self.is_alive(one)}

    def marks(self, key: GroupKey) -> GroupMarks | None:
        """Where the handlers of this process mark the records of a group that they have in hand;
        None if the device is full. A member without such a file counts every lease as a try.
        """
        if self._hand_file is None:
            path = os.path.join(self._place, self.join() + in_hand.SUFFIX)
            try:
                self._hand_file = HandFile(path)
            except (OSError, StorageError):
                return None
        return GroupMarks(self._hand_file, key)

    def marked_by(self, member: str, key: GroupKey) -> Callable[[int], bool] | None:
        """Whether a member, living or not, has a record of a group in hand; None if that is not
        known.
        """
        return in_hand.read(os.path.join(self._place, member + in_hand.SUFFIX), key)

    def leave(self) -> None:
        if self._hand_file is not None:
            self._hand_file.remove_file()
            self._hand_file = None
        if self._fd >= 0:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self._place, self.own))
            self.abandon()

    def abandon(self) -> None:
        """Let go of the lock and leave the files, as the death of the process would."""
        if self._hand_file is not None:
            self._hand_file.close()
            self._hand_file = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
