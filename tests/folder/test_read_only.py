"""A reader that may not write: another user's, or on a disk that is mounted to be read."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from trunkline.codec import encode_event
from trunkline.event import Event
from trunkline.folder import Folder
from trunkline.names import GroupKey
from trunkline.options import GroupOptions, Limits

# Runs once as it is, so that all is imported, and again as one who owns nothing.
READ = """
import os, sys
from trunkline.cli import main
arguments = [*sys.argv[2:], "--url", "file:" + sys.argv[1]]
main(arguments)
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
sys.exit(main(arguments))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_folder_of_another_user_can_be_read() -> None:
    with tempfile.TemporaryDirectory() as place:  # not under tmp_path, which is closed to others
        read_as_another(Path(place))


def read_as_another(place: Path) -> None:
    root = place / "bus"
    folder = Folder(str(root))
    events = [Event(topic="orders", payload=number) for number in range(3)]
    folder.append("orders", 0, [encode_event(event, Limits()) for event in events], events)
    folder.close()
    for path in [place, root, *root.rglob("*")]:
        path.chmod(path.stat().st_mode | (0o055 if path.is_dir() else 0o044))

    done = as_another(root, "tail", "orders", "-n", "5", "--format", "%o ")

    assert (done.returncode, done.stdout.split()) == (0, ["1", "2", "3"] * 2), done.stderr


def as_another(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", READ, str(root), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("words", [("topic", "ls"), ("pub", "t", "1"), ("doctor",)])
def test_a_folder_that_may_not_be_entered_is_not_called_missing(words: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        root = Path(place) / "bus"
        Folder(str(root)).close()

        done = as_another(root, *words)

        said = f"trunkline: {root} cannot be opened: Permission denied"
        hint = f"(see its permissions: ls -ld {root})"
        assert (done.returncode, done.stderr) == (1, f"{said} {hint}\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("command", ["verify", "doctor"])
def test_a_user_that_may_only_read_is_told_which_files_were_not_read(command: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        root = Path(place) / "bus"
        folder = Folder(str(root))
        events = [Event(topic="orders", payload=1)]
        folder.append("orders", 0, [encode_event(event, Limits()) for event in events], events)
        folder.step(GroupKey("orders", 0, "billing"), lambda group: group.define(GroupOptions(), 0))
        folder.close()
        for path in [Path(place), root, *root.rglob("*")]:
            path.chmod(path.stat().st_mode | (0o055 if path.is_dir() else 0o044))
        (root / "offsets/orders__billing.lock").chmod(0o600)

        done = as_another(root, command)

        assert (done.returncode, done.stderr) == (0, "")
        assert "orders/0 billing" in done.stdout
        assert "not looked at: orders__billing.lock: Permission denied" in done.stdout
