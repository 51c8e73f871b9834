"""Which tests share a worker when several run at a time."""

from __future__ import annotations

import re
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

# These start a JVM or a server, which takes longer than most tests: two workers have one for Spark.
TOGETHER = (
    re.compile(r"tests/spark/test_[a-m]"),
    re.compile(r"tests/spark/test_[n-z]"),
    re.compile(r"tests/mongo/"),
)


class _TogetherScheduling(LoadScopeScheduling):  # type: ignore[misc]
    def _split_scope(self, nodeid: str) -> str:
        return next((share.pattern for share in TOGETHER if share.match(nodeid)), nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _TogetherScheduling:
    return _TogetherScheduling(config, log)
