"""How long a record waits for its next try."""

from __future__ import annotations

from trunkline.options import GroupOptions


def backoff_s(options: GroupOptions, attempt: int, draw: float) -> float:
    """Full jitter: ``draw`` in [0, 1) of the delay after the given failed attempt."""
    # Far-out attempts would overflow; the cap is long reached by then.
    delay = options.backoff_base_s * options.backoff_mult ** min(attempt - 1, 64)
    return draw * min(delay, options.backoff_max_s)
