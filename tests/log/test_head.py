"""The head: one line that is overwritten in place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trunkline.errors import LockTimeout, StorageError, UnsupportedFormat
from trunkline.log import head as heads
from trunkline.log.head import Head, HeadFile
from trunkline.log.line import close_line

FULL = Head(
    epoch=2**31, segment=99_999_999, records=2**40, start=2**50, next=2**50, end=2**40,
    durable=2**40, sum=2**32 - 1, ts=2**52, indexed=2**40, reused=2**50,
)  # fmt: skip


def test_the_largest_numbers_fit() -> None:
    assert len(heads.encode(FULL)) == len(heads.encode(Head())) == 320
    assert heads.decode(heads.encode(FULL)) == FULL


@pytest.mark.parametrize("raw", [b"", b"\n", b"\0" * 320, b"{}\n", b'{"crc":"00000000"}\n'])
def test_what_is_no_head_is_none(raw: bytes) -> None:
    assert heads.decode(raw) is None


def test_a_torn_head_is_none_or_the_new_one() -> None:
    old, new = heads.encode(Head(next=5)), heads.encode(FULL)
    for cut in range(321):
        found = heads.decode(new[:cut] + old[cut:])
        assert found in (None, Head(next=5), FULL), cut


def test_a_newer_format_is_refused() -> None:
    with pytest.raises(UnsupportedFormat, match=r"^orders/3 has format 2, .*: see .*head ") as told:
        heads.decode(close_line(b'{"format":2,"next":7'), "/bus/wal/orders~3.head")
    assert told.value.path == "/bus/wal/orders~3.head"


def test_what_one_stores_the_other_loads(tmp_path: Path) -> None:
    one, two = (HeadFile(os.fspath(tmp_path / "x.head")) for _ in range(2))
    assert not two.open(create=False)
    one.lock(0.0)
    one.store(FULL)
    assert two.open(create=False)
    assert two.load() == FULL
    with pytest.raises(LockTimeout):
        two.lock(0.0)
    one.unlock()
    two.lock(0.0)
    one.close()
    two.close()


def test_a_removed_file_is_noticed(tmp_path: Path) -> None:
    path = os.fspath(tmp_path / "x.head")
    one, two = HeadFile(path), HeadFile(path)
    one.lock(0.0)
    two.open(create=True)
    os.unlink(path)
    two.lock(0.0)  # not the lock of a file that has no name any more
    assert os.path.exists(path)
    one.close()
    two.close()


def test_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"precious")
    os.symlink(tmp_path / "target", tmp_path / "x.head")
    with pytest.raises((OSError, StorageError)):
        HeadFile(os.fspath(tmp_path / "x.head")).lock(0.0)
    assert (tmp_path / "target").read_bytes() == b"precious"
