"""A real MongoDB server for tests: ``MONGO_URL``, else ``mongod`` on the path, else the one that
``make mongo`` installed.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import pytest

HOW = "there is no MongoDB server: run 'make mongo', or set MONGO_URL"


def find_mongod() -> str | None:
    found = shutil.which("mongod")
    if found:
        return found
    spec = importlib.util.find_spec("fiftyone")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "db" / "bin" / "mongod"
        if path.is_file():
            path.chmod(0o755)
            return str(path)
    return None


def need_mongod() -> str:
    """The program; without it the test is skipped, and fails where CI runs it."""
    found = find_mongod()
    if found is None:
        if os.environ.get("CI"):
            pytest.fail(HOW)
        pytest.skip(HOW)
    return found


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class Mongod:
    """One server process, to be killed and started again."""

    def __init__(self, program: str, folder: Path, port: int, name: str | None = "rs0") -> None:
        self._words = [
            *(program, "--dbpath", str(folder), "--port", str(port), "--bind_ip", "127.0.0.1"),
            *(("--replSet", name) if name is not None else ()),
            *("--wiredTigerCacheSizeGB", "0.25", "--quiet"),
            *(
                "--logpath",
                str(folder / "log"),
                "--setParameter",
                "diagnosticDataCollectionEnabled=0",
            ),
        ]
        self.port = port
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(self._words, stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


def initiate(ports: Sequence[int]) -> None:
    """Make a replica set of the servers, and wait until one of them is primary."""
    import pymongo
    from pymongo.errors import PyMongoError

    members = [{"_id": i, "host": f"127.0.0.1:{port}"} for i, port in enumerate(ports)]
    config = {
        "_id": "rs0",
        "members": members,
        "settings": {"electionTimeoutMillis": 2000, "heartbeatIntervalMillis": 500},
    }
    end = time.monotonic() + 60
    client: pymongo.MongoClient[dict[str, object]] = pymongo.MongoClient(
        "127.0.0.1", ports[0], directConnection=True, serverSelectionTimeoutMS=30_000
    )
    try:
        while True:
            try:
                client.admin.command("replSetInitiate", config)
            except PyMongoError as error:
                if "already initialized" not in str(error) and time.monotonic() > end:
                    raise
            with_primary = client.admin.command("hello")
            if with_primary.get("primary"):
                return
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        client.close()


def fresh_database(url: str) -> str:
    """The URL of a database on that server that no other test uses."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=f"/t{secrets.token_hex(6)}"))


@contextmanager
def replica_set(count: int = 1, folder: Path | None = None) -> Iterator[tuple[str, list[Mongod]]]:
    """The URL of a replica set, and its servers. Their data is in memory, or in ``folder``."""
    program = need_mongod()
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="mongo-", dir=folder or memory) as made:
        servers = []
        for number in range(count):
            place = Path(made) / str(number)
            place.mkdir()
            servers.append(Mongod(program, place, free_port()))
            servers[-1].start()
        try:
            ports = [server.port for server in servers]
            initiate(ports)
            hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
            yield f"mongodb://{hosts}/?replicaSet=rs0", servers
        finally:
            for server in servers:
                if server.process is not None and server.process.poll() is None:
                    server.kill()


@pytest.fixture(scope="session")
def mongo_url() -> Iterator[str]:
    given = os.environ.get("MONGO_URL")
    if given:
        yield given
        return
    with replica_set() as (url, _):
        yield url
