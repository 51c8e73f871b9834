"""Calls for metrics, after every attempt to publish and after every message."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

Hook = Callable[[str, BaseException | None, float], None]
"""Called with the subject, the error or None, and the seconds that it took."""


def tell(hook: Hook | None, subject: str, error: BaseException | None, latency_s: float) -> None:
    """Call the hook. An error of its own is logged: the message was published, or handled."""
    if hook is None:
        return
    try:
        hook(subject, error, latency_s)
    except Exception:
        logger.exception("the hook for %s failed", subject)
