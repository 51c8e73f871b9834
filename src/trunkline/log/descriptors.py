"""How many files this process may have open."""

from __future__ import annotations

import contextlib
import resource


def limit() -> int:
    """How many files this process may have open as it is."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


def raise_file_limit() -> None:
    """Let this process open as many files as the system allows. A folder of many partitions, a
    backup of many segments or a broker of many connections needs more than the usual 1,024.
    """
    with contextlib.suppress(ValueError, OSError):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
