"""The public conformance suite of the Durable Streams protocol, against a broker of its own.

``make streams`` installs the suite. What is not offered is left out here and in docs/streams.md.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from .client import Launch

SUITE = Path(sys.prefix) / "streams"
VITEST = SUITE / "node_modules" / ".bin" / "vitest"
# Closing, forking and subscribing to streams are younger than version 1.0 of the protocol. Sequence
# numbers, idempotent producers and a time to live are optional there.
OFFERED = (
    r"^(?!.*(Fork|Closure|Producer|TTL|ubscription|[Ss]eq|different casing"
    r"|concurrent writers (with|racing))).*$"
)
PASSED = 143
TESTS = """
import { runConformanceTests } from "@durable-streams/server-conformance-tests"
runConformanceTests({ baseUrl: process.env.CONFORMANCE_TEST_URL })
"""


@pytest.mark.timeout(400)
@pytest.mark.skipif(not VITEST.exists(), reason="make streams installs the conformance suite")
async def test_the_public_conformance_suite_passes(launch: Launch, tmp_path: Path) -> None:
    allowed = ("--origin", "https://example.com")  # one test is a browser's preflight
    broker = await launch(tmp_path / "bus", *allowed, env={"TRUNKLINE_POLL_S": "2"})
    place = SUITE / f"{tmp_path.name}-{os.getpid()}.test.mjs"  # beside the packages it imports
    place.write_text(TESTS, "utf-8")
    report = tmp_path / "report.json"
    try:
        process = await asyncio.create_subprocess_exec(
            *(str(VITEST), "run", place.name, "--no-coverage", "--testTimeout=60000"),
            *("--reporter=json", f"--outputFile={report}", "-t", OFFERED),
            cwd=SUITE,
            env={**os.environ, "CONFORMANCE_TEST_URL": broker.http},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        out, _ = await process.communicate()
    finally:
        place.unlink()
    assert report.exists(), out.decode()[-3000:]
    found = json.loads(report.read_text("utf-8"))
    assert _failed(found) == []
    assert found["numPassedTests"] == PASSED


def _failed(report: dict[str, Any]) -> list[str]:
    return [
        f"{one['fullName']}: {one['failureMessages'][0][:300]}"
        for file in report["testResults"]
        for one in file["assertionResults"]
        if one["status"] == "failed"
    ]
