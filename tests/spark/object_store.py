"""An S3-compatible server in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.request import Request, urlopen

from kit.mongod import free_port

BUCKET = "lake"
_PORT = free_port()
ADDRESS = f"http://127.0.0.1:{_PORT}"
# The variables with which the server is reached. Spark hands its workers those it was started with,
# so the session of the tests has them before there is a server.
SETTINGS = {
    "AWS_ENDPOINT_URL": ADDRESS,
    "AWS_ALLOW_HTTP": "true",
    "AWS_REGION": "us-east-1",
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
}


@contextmanager
def object_store() -> Iterator[None]:
    """The server, with one bucket."""
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(_PORT)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                urlopen(Request(f"{ADDRESS}/{BUCKET}", method="PUT"), timeout=5).close()
                break
            except OSError:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait(30)
