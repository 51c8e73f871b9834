"""Room kept aside, so that acks and retention work on a full device."""

from __future__ import annotations

import contextlib
import os

from trunkline.log import atomic


def fill(root: str, size: int) -> bool:
    """Have ``size`` bytes aside. False if there is not enough room."""
    try:
        fd = atomic.open_file(os.path.join(root, "reserve"), os.O_WRONLY | os.O_CREAT)
    except OSError:
        return False
    try:
        if os.fstat(fd).st_size < size:
            os.posix_fallocate(fd, 0, size)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
        return False
    finally:
        os.close(fd)
    return True


def spend(root: str) -> bool:
    """Give it up, for what must be written on a full device; False if it is used up."""
    path = os.path.join(root, "reserve")
    try:
        if os.stat(path).st_size == 0:
            return False
        os.truncate(path, 0)
    except OSError:
        return False
    return True
