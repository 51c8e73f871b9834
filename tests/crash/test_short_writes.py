"""A kernel that writes less than it was given, and signals at any moment: nothing is damaged."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from trunkline.log import atomic

from .promises import Promises, broken
from .scenes import SCENES, commit, grouped, keyed, pack, small_segments

_SCENES = ("rollover", "commit", "compression")


class Stingy:
    """Writes at most ``most`` bytes at a time."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.calls = 0
        self._write, self._pwrite = os.write, os.pwrite

    def write(self, fd: int, data: bytes) -> int:
        self.calls += 1
        return self._write(fd, bytes(data[: self.most]))

    def pwrite(self, fd: int, data: bytes, place: int) -> int:
        self.calls += 1
        return self._pwrite(fd, bytes(data[: self.most]), place)


def play(root: str, name: str) -> Promises:
    told: list[bytes] = []

    def say(*what: object) -> None:
        told.append(msgspec.json.encode(what))

    scene = SCENES[name]
    if scene.before is not None:
        scene.before(root, say)
    scene.play(root, say)
    return Promises(told)


@pytest.mark.parametrize("most", [1, 2, 7, 100, 319])
@pytest.mark.parametrize("name", _SCENES)
def test_a_short_write_is_continued(
    name: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stingy = Stingy(most)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", stingy.write)
        patch.setattr(os, "pwrite", stingy.pwrite)
        kept = play(os.fspath(tmp_path), name)
    assert stingy.calls > 20
    assert not broken(os.fspath(tmp_path), kept)


def test_a_write_that_is_not_continued_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stingy = Stingy(60)
    with monkeypatch.context() as patch:
        patch.setattr(atomic, "write_all", lambda fd, data: stingy.write(fd, data))
        patch.setattr(os, "write", stingy.write)
        with pytest.raises(Exception, match=r"."):
            assert not broken(os.fspath(tmp_path), play(os.fspath(tmp_path), "rollover"))


@pytest.fixture
def storm() -> Iterator[list[int]]:
    """A thousand signals a second."""
    caught: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: caught.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    yield caught
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.timeout(60, method="thread")
def test_signals_do_not_matter(storm: list[int], tmp_path: Path) -> None:
    rounds = 0
    while len(storm) < 200 or rounds < 5:
        rounds += 1
        root = os.fspath(tmp_path / str(rounds))
        told: list[bytes] = []

        def say(*what: object) -> None:
            told.append(msgspec.json.encode(what))  # noqa: B023 -- called in this round only

        small_segments(f"{root}a", say)
        assert not broken(f"{root}a", Promises(told))
        told.clear()
        keyed(f"{root}b", say)
        pack(f"{root}b", say)
        assert not broken(f"{root}b", Promises(told))
        told.clear()
        grouped(f"{root}c", say)
        commit(f"{root}c", say)
        assert not broken(f"{root}c", Promises(told))
    print(f"{rounds} rounds, {len(storm)} signals")
