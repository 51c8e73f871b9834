"""Lines: what is written is read, and nothing else is."""

from __future__ import annotations

import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.log_events import event
from trunkline.codec import encode_event
from trunkline.log.line import (
    Damaged,
    close_line,
    frame_batch,
    is_intact,
    offset_at,
    parse,
    parse_object,
    read_records,
)
from trunkline.options import Limits

_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def framed(*payloads: object, first: int = 1) -> list[bytes]:
    bodies = [encode_event(event(payload), Limits()) for payload in payloads]
    return frame_batch(first, bodies, 7, 99)


@given(_json)
def test_any_payload_comes_back_on_one_line(payload: object) -> None:
    (line,) = framed(payload)
    assert line.count(b"\n") == 1
    parsed = parse(line[:-1])
    assert parsed.meta is not None
    assert parsed.meta.payload == payload
    assert json.loads(line)["payload"] == payload


def test_the_last_line_of_a_batch_carries_the_commit() -> None:
    lines = [parse(line[:-1]) for line in framed(1, 2, 3, first=5)]
    assert [line.offset for line in lines] == [5, 6, 7]
    assert [line.commit is not None for line in lines] == [False, False, True]
    commit = lines[-1].commit
    assert commit is not None
    assert (commit.count, commit.durable, commit.at) == (3, 7, 99)


def test_every_flipped_bit_of_a_line_is_noticed() -> None:
    line = framed({"a": 1})[0][:-1]
    for position in range(len(line)):
        for bit in range(8):
            bad = bytearray(line)
            bad[position] ^= 1 << bit
            assert not is_intact(bytes(bad)), (position, bit)


@pytest.mark.parametrize("line", [b"", b"{}", b"null", b',"crc":"00000000"}', b"\0" * 40])
def test_what_is_no_line_is_damaged(line: bytes) -> None:
    with pytest.raises(Damaged):
        parse(line)
    with pytest.raises(Damaged):
        parse_object(line)


@pytest.mark.parametrize("head", [b"[1", b'{"offset":"x"', b'{"offset":1' + b',"meta":{"ts":1}'])
def test_a_checksum_does_not_make_a_line_of_nonsense(head: bytes) -> None:
    with pytest.raises(Damaged):
        parse(close_line(head)[:-1])


def test_reading_stops_at_the_limit_and_at_damage() -> None:
    lines = framed(1, 2, 3, 4)
    records, size = read_records(b"".join(lines), 0, 2)
    assert [record.offset for record in records] == [1, 2]
    assert size == len(lines[0] + lines[1])
    lines[2] = lines[2].replace(b'"payload":3', b'"payload":9')
    records, size = read_records(b"".join(lines), 0, 10)
    assert [record.event.payload for record in records] == [1, 2]
    assert size == len(lines[0] + lines[1])


def test_the_checksum_is_that_of_zlib() -> None:
    assert close_line(b'{"a":1') == b'{"a":1,"crc":"%08x"}\n' % zlib.crc32(b'{"a":1')


@pytest.mark.parametrize(
    ("start", "offset"),
    [(b'{"offset":12,"meta', 12), (b'{"offset":,', None), (b'{"seal":', None), (b"", None)],
)
def test_the_offset_is_read_from_the_first_bytes(start: bytes, offset: int | None) -> None:
    assert offset_at(start) == offset
