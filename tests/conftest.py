"""Which tests share a worker when several run at a time."""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

# Each has one server or one JVM, which is slow to start.
TOGETHER = ("tests/spark/", "tests/mongo/")
    "tests/spark/",
    "tests/mongo/",
)  # each has one server or one JVM, which is slow to start


class _TogetherScheduling(LoadScopeScheduling):  # type: ignore[misc]
    def _split_scope(self, nodeid: str) -> str:
        return next((place for place in TOGETHER if nodeid.startswith(place)), nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _TogetherScheduling:
    return _TogetherScheduling(config, log)
