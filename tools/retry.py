"""Run the tests that failed in the last `make test` once more, each without others beside it.

    python tools/retry.py

A test that waits for other processes can miss its deadline while two workers share a busy machine.
This run tells such a test from a broken one. It names every test that failed the first time. It
refuses when more than `MOST` tests failed: that many are not a matter of load. It refuses too when
the run did not reach its end.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

EXIT = Path(".pytest_cache/exit")  # written by `make test`
FAILED = Path(".pytest_cache/v/cache/lastfailed")
TESTS_FAILED = "1"  # pytest's exit code for a run that ended, with failures
MOST = 5


def main() -> int:
    if EXIT.read_text().strip() != TESTS_FAILED:
        print("the last run did not end with failed tests: run make test", file=sys.stderr)
        return 1
    failed = sorted(json.loads(FAILED.read_text(encoding="utf-8")))
    print(f"failed beside other tests: {len(failed)}", *failed, sep="\n  ", flush=True)
    if len(failed) > MOST:
        print(f"more than {MOST} failed: they are not run again", file=sys.stderr)
        return 1
    return subprocess.call([sys.executable, "-m", "pytest", "-m", "not slow", *failed])


if __name__ == "__main__":
    sys.exit(main())
