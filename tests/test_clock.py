"""The machine's clock."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta

from trunkline.clock import Clock, ServerClock, SystemClock

CLOCK: Clock = SystemClock()  # it is a Clock: the type checker reads this line


def test_now_is_utc_with_a_zone() -> None:
    before = datetime.now(UTC)
    now = CLOCK.now()
    assert now.utcoffset() == timedelta(0)
    assert before <= now <= datetime.now(UTC)


def test_monotonic_never_goes_back() -> None:
    readings = [CLOCK.monotonic() for _ in range(1000)]
    assert readings == sorted(readings)


async def test_sleep_lasts_at_least_as_long_as_asked() -> None:
    before = CLOCK.monotonic()
    await CLOCK.sleep(0.01)
    assert CLOCK.monotonic() - before >= 0.009


def test_readings_of_two_processes_compare_within_one_boot() -> None:
    before = CLOCK.monotonic()
    program = (
        "from trunkline.clock import SystemClock; c = SystemClock(); print(c.boot, c.monotonic())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    boot, reading = done.stdout.split()
    assert boot == CLOCK.boot
    assert before <= float(reading) <= CLOCK.monotonic()


def test_a_clock_of_a_server_tells_its_time_and_never_goes_back() -> None:
    one, two = ServerClock("cluster"), ServerClock("cluster")
    server = CLOCK.now() + timedelta(hours=5)
    for clock in (one, two):
        at = CLOCK.monotonic()
        clock.heard(server, asked=at - 0.01, answered=at + 0.01)
    assert abs(one.now() - server) < timedelta(seconds=1)
    assert abs(one.monotonic() - two.monotonic()) < 1
    assert abs(one.monotonic() - one.now().timestamp()) < 1
    assert one.boot == two.boot == "cluster"

    before = one.monotonic()
    at = CLOCK.monotonic()
    one.heard(server - timedelta(minutes=1), asked=at, answered=at)
    assert one.monotonic() >= before
