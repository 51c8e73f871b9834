"""One Spark session for all tests that need one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from .object_store import SETTINGS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(300))
            # Spark leaves sockets and deprecated calls of pandas behind.
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    pytest.importorskip("pyspark")
    from trunkline.errors import NotFound
    from trunkline.spark import session
    from trunkline.spark.session.java import find_java

    try:
        find_java()
    except NotFound as missing:
        pytest.skip(str(missing))
    home = tmp_path_factory.mktemp("spark")
    before = dict(os.environ)
    os.environ.update(SETTINGS)
    started = session(
        "tests",
        master="local[2]",
        quick=True,
        config={
            "spark.sql.shuffle.partitions": "1",
            "spark.sql.warehouse.dir": str(home),
            "spark.sql.streaming.pollingDelay": "50ms",
            "spark.driver.memory": "1g",
        },
    )
    yield started
    started.stop()
    for name in SETTINGS:
        os.environ.pop(name)
    os.environ.update({name: before[name] for name in SETTINGS if name in before})
