"""One real server for the tests of a module; every test has a bus of its own on it."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from trunkline.bus.nats.connection import NatsLink
from trunkline.bus.nats.place import parse
from trunkline.bus.nats.server import Servers
from trunkline.options import NatsOptions

_names = itertools.count(1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with Servers(tmp_path_factory.mktemp("nats"), sync="2m") as servers:
        yield servers


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with Servers(tmp_path_factory.mktemp("cluster"), 3, sync="2m") as servers:
        yield servers


@pytest.fixture
def url(server: Servers) -> str:
    """A bus that no other test uses."""
    return f"{server.url}/t{os.getpid()}-{next(_names)}"


@pytest.fixture
async def link(url: str) -> AsyncIterator[NatsLink]:
    link = NatsLink(parse(url), NatsOptions(heartbeat_s=0.1, replicas=1, publish_inflight=256))
    await link.open()
    yield link
    await link.close()


def folder_of(servers: Servers) -> Path:
    return servers.nodes[0].folder
