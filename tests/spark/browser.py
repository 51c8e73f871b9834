"""A browser without a window, for pages that a person would open."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

BROWSERS = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
)


def find_browser() -> str:
    """A browser of the machine. Without one a test is skipped on a laptop, and fails in CI."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        missing = "there is no browser: 'make tools' installs one"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    return found


def dump_dom(page: Path, *options: str) -> str:
    """The page as it is once its scripts have run."""
    return browse(page, "--dump-dom", *options)


def browse(page: Path, *options: str) -> str:
    """Open a page and return what the browser prints. It works as root and with no window."""
    browser = find_browser()
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as profile:
        done = subprocess.run(
            [
                browser,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                f"--user-data-dir={profile}",
                "--virtual-time-budget=20000",
                *options,
                page.resolve().as_uri(),
            ],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=100,
        )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
