"""The HTTP side of a broker in a process of its own: redriving dead letters, and publishing."""

from __future__ import annotations

import asyncio
import http.client
import json
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.harness import TOPIC, Pair, Run, SyncProbe, line, payloads, percentile
from benchmarks.lines_broker import broker

LETTERS = 10_000
LETTERS_S = 5_000.0


def _post(wire: http.client.HTTPConnection, path: str, body: Any, **headers: str) -> Any:
    """One request on the kept-alive connection; what is answered."""
    sent = json.dumps(body).encode()
    wire.request("POST", path, sent, {"Content-Type": "application/json", **headers})
    answer = wire.getresponse()
    said = answer.read()
    if answer.status >= 300:
        raise RuntimeError(f"{path}: {answer.status} {said[:200]!r}")
    return json.loads(said)


def _wire(url: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(url.partition("://")[2].rstrip("/"), timeout=120)


@line("redrive-rate", against="5,000 letters a second", unit="letters/s", goal=">= 1")
async def redrive_rate(run: Run) -> Pair:
    """10,000 letters of one group are redriven by one request."""
    folder, count = run.fresh(), run.count(LETTERS, 200)
    await _bury(folder, count)
    async with broker(folder) as url:
        wire = _wire(url)
        started = perf_counter()
        said = await asyncio.to_thread(
            _post, wire, f"/topics/{TOPIC}/dlq/redrive", {"group": "billing"}, Prefer="wait=100"
        )
        took = perf_counter() - started
        wire.close()
    if said["job"]["done"] != count:
        raise RuntimeError(f"{said['job']} instead of {count} letters")
    return Pair(count / took, LETTERS_S)


async def _bury(folder: Path, count: int) -> None:
    """Make that many dead letters."""
    from trunkline.bus.connect import open_local

    ready = payloads(count)
    async with open_local(f"file:{folder}") as bus:
        for start in range(0, count, 1000):
            await bus.publish_many(TOPIC, ready[start : start + 1000])
        left = count
        async with bus.subscribe(TOPIC, group="billing", max_inflight=500) as deliveries:
            async for delivery in deliveries:
                await delivery.term("no such customer")
                left -= 1
                if not left:
                    break


@line("http-publish-p50", against="fdatasync p50", unit="ms", goal="<= 5")
async def http_publish_p50(run: Run) -> Pair:
    """One event a request, one request after another, on a kept-alive connection."""
    probe, ready = SyncProbe(run.fresh()), payloads(64)
    took: list[float] = []
    async with broker(run.fresh()) as url:
        wire = _wire(url)

        def turn(count: int) -> list[float]:
            found = []
            for number in range(count):
                started = perf_counter()
                _post(wire, f"/topics/{TOPIC}/events", {"payload": ready[number % 64]})
                found.append(perf_counter() - started)
            return found

        await asyncio.to_thread(turn, run.count(100, 10))
        for _ in range(run.count(20, 1)):
            took += await asyncio.to_thread(turn, run.count(50, 10))
            await asyncio.to_thread(probe.burst, run.count(50, 10))
        wire.close()
    probe.close()
    return Pair(percentile(took, 0.5) * 1000, probe.p(0.5) * 1000)
