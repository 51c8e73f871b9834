"""The machine's clock."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta

from trunkline.clock import Clock, SystemClock

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
