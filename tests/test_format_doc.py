"""The folder in ``docs/format.md`` is a folder: it is built from the page, opened and compared."""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

import trunkline
from trunkline.delivery.deadletters import read_letter
from trunkline.event import Event
from trunkline.folder import Folder
from trunkline.folder.snapshot import Snapshot
from trunkline.folder.upkeep import pack_segments, verify
from trunkline.group.changes import AnyOp, Op
from trunkline.log import head as heads
from trunkline.log.layout import group_stem, log_stem, parse_group_stem, segment_path
from trunkline.log.line import Damaged, Line, Seal, parse, parse_object
from trunkline.log.segment import Entry, index_frames, read_index
from trunkline.names import GroupKey
from trunkline.options import TopicOptions, make

PAGE = (Path(__file__).parents[1] / "docs" / "format.md").read_text("utf-8")
BLOCKS = dict(re.findall(r"^```(?:jsonl|json|text) (\S+)\n(.*?)^```$", PAGE, re.M | re.S))
KEY = GroupKey("orders", 0, "billing")


def lines(name: str) -> list[bytes]:
    return [line.encode() for line in BLOCKS[name].splitlines()]


def independent_read(line: bytes) -> dict[str, Any]:
    """The five-line reader of the page, on one line."""
    assert line[-10:-2] == b"%08x" % zlib.crc32(line[:-18])
    assert line[-18:-10] == b',"crc":"'
    assert line[-2:] == b'"}'
    found: dict[str, Any] = json.loads(line)
    return found


def padded(line: bytes) -> bytes:
    return line.ljust(319) + b"\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in BLOCKS.items():
        if "." not in name:
            continue
        path = tmp_path / "bus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(padded(text.encode()) if name.endswith(".head") else text.encode())
    return tmp_path / "bus"


def test_the_page_has_an_example_of_every_file() -> None:
    assert set(BLOCKS) == {
        "bus.json",
        "topics.json",
        "wal/orders.00000001.jsonl",
        "wal/orders.00000002.jsonl",
        "wal/orders.00000001.index",
        "wal/orders.head",
        "dlq/orders.dlq.jsonl",
        "dlq/orders.dlq.head",
        "offsets/orders__billing.journal",
        "offsets/orders__billing.json",
        "ops",
    }


CHECKED = [name for name in BLOCKS if '"crc":"' in BLOCKS[name]]


@pytest.mark.parametrize("name", CHECKED)
def test_every_line_is_read_by_the_product_and_by_five_lines_of_python(name: str) -> None:
    for line in lines(name):
        assert parse_object(line) == independent_read(line)


@pytest.mark.parametrize("name", CHECKED)
def test_a_line_with_any_flipped_bit_is_none(name: str) -> None:
    line = lines(name)[0]
    for position in range(0, len(line), 7):
        bad = bytearray(line)
        bad[position] ^= 1
        with pytest.raises(Damaged):
            parse_object(bytes(bad))


def test_commits_and_the_seal_say_what_the_page_says_they_do() -> None:
    text = BLOCKS["wal/orders.00000001.jsonl"].encode()
    parsed = [parse(line) for line in lines("wal/orders.00000001.jsonl")]
    commits = [line.commit for line in parsed]
    assert [commit and commit.count for commit in commits] == [1, None, 2, None]
    assert commits[2] is not None
    assert commits[2].durable == text.index(b"\n") + 1
    before = text[: text.index(b'{"seal"')]
    assert parsed[3].seal == Seal(3, 1, 3, f"{zlib.crc32(before):08x}", 1772366401250000)


def test_the_head_is_the_state_of_the_last_segment() -> None:
    raw = padded(BLOCKS["wal/orders.head"].encode())
    head = heads.decode(raw)
    last = BLOCKS["wal/orders.00000002.jsonl"].encode()
    assert head is not None
    assert (head.segment, head.start, head.next, head.records) == (2, 1, 5, 1)
    assert head.end == head.durable == len(last)
    assert head.sum == zlib.crc32(last)
    assert heads.encode(head) == raw
    assert len(raw) == 320


def test_the_index_points_at_the_line_it_names(folder: Path) -> None:
    (entry,) = read_index(str(folder / "wal" / "orders.00000001.index"))
    text = BLOCKS["wal/orders.00000001.jsonl"].encode()
    assert entry == Entry(3, text.index(b'{"offset":3'), 1772366401250000, 0)
    words, _, checksum = BLOCKS["wal/orders.00000001.index"].strip().rpartition(" ")
    assert checksum == f"{zlib.crc32(words.encode()):08x}"


def test_the_folder_opens_and_holds_what_the_page_says(folder: Path) -> None:
    with trunkline.open(f"file:{folder}") as bus:
        records = bus.read("orders")
        assert [record.offset for record in records] == [1, 2, 3, 4]
        assert records[0].event.payload == {"id": 1, "price": 12}
        assert records[0].event.key == "c42"
        assert records[3].event.payload is None
        assert bus.topics()["orders"] == TopicOptions(compress=True, retention_age_s=604800.0)
        letter = read_letter(bus.read("orders.DLQ")[0])
        assert letter is not None
        assert (letter.origin, letter.group, letter.reason) == (3, "billing", "rejected")
        assert bus.publish("orders", {"id": 5}).offset == 5


def test_the_group_stands_where_the_page_says(folder: Path) -> None:
    opened = Folder(str(folder))
    group = opened.group(KEY)
    assert (group.floor, list(group.settled), list(group.waiting)) == (1, [(3, 3)], [2])
    assert group.attempts == {2: 1}
    assert group.options.max_retries == 3
    opened.close()


def test_the_snapshot_reaches_up_to_the_line_failed() -> None:
    snapshot = msgspec.convert(parse_object(lines("offsets/orders__billing.json")[0]), Snapshot)
    journal = BLOCKS["offsets/orders__billing.journal"].encode()
    assert journal[snapshot.position :].startswith(b'{"op":"extended"')
    assert (snapshot.committed, snapshot.generation, snapshot.topic) == (1, 1, "orders")


def test_the_journal_alone_leads_to_the_same_state(folder: Path) -> None:
    (folder / "offsets" / "orders__billing.json").unlink()
    opened = Folder(str(folder))
    group = opened.group(KEY)
    assert (group.floor, list(group.settled), list(group.waiting)) == (1, [(3, 3)], [2])
    opened.close()


def test_every_op_is_in_the_table_and_has_an_example() -> None:
    table = set(re.findall(r"^\| `(\w+)` \| `", PAGE.partition("| `op` |")[2], re.M))
    ops = {kind.__name__.lower() for kind in Op.__subclasses__()}
    assert ops <= table
    shown = re.findall(r'"op":"(\w+)"', PAGE)
    assert ops <= set(shown)
    for line in (*lines("ops"), *lines("offsets/orders__billing.journal")[1:]):
        op = msgspec.json.decode(line, type=AnyOp)
        assert parse_object(line)["op"] == type(op).__name__.lower()


def test_every_member_is_explained() -> None:
    wanted = {
        *Event.__struct_encode_fields__,
        *heads.Head.__struct_fields__,
        *Seal.__struct_fields__,
        *Line.__struct_fields__,
        *Snapshot.__struct_fields__,
    }
    assert {name for name in wanted if f"`{name}`" not in PAGE} == set()


def test_topics_json_holds_options_of_topics() -> None:
    text = BLOCKS["topics.json"]
    stored = json.loads(text)
    assert make(TopicOptions, stored["orders"]).retention_age_s == 604800.0
    before = text[: text.rindex(",")].encode()
    assert stored["__crc"] == f"{zlib.crc32(before):08x}"


def test_verify_finds_nothing_wrong_with_the_folder(folder: Path) -> None:
    opened = Folder(str(folder))
    found = [*verify(opened, "orders", 0), *verify(opened, "orders.DLQ", 0)]
    opened.close()
    assert found == []


def test_a_compressed_segment_is_the_same_bytes_in_frames(folder: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    opened = Folder(str(folder))
    assert pack_segments(opened, "orders", 0) == 1
    opened.forget("orders", 0)
    assert [record.offset for record in opened.read("orders", 0, 1, 10)] == [1, 2, 3]
    opened.close()
    packed = folder / "wal" / "orders.00000001.jsonl.zst"
    with packed.open("rb") as file:
        reader = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)
        assert reader.read() == BLOCKS["wal/orders.00000001.jsonl"].encode()
    entries = read_index(str(folder / "wal" / "orders.00000001.index"))
    assert len(entries) == 3
    assert entries[-1].packed == packed.stat().st_size
    assert not (folder / "wal" / "orders.00000001.jsonl").exists()
    made_anew = index_frames(str(packed))
    assert [entry[1::2] for entry in made_anew] == [entry[1::2] for entry in entries]


def test_a_newer_format_is_refused_and_nothing_is_written(folder: Path) -> None:
    text = BLOCKS["bus.json"].replace('"format":1', '"format":2')
    (folder / "bus.json").write_text(text)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(trunkline.UnsupportedFormat, match="format 2"):
        trunkline.open(f"file:{folder}")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_member_added_by_a_later_version_is_ignored(folder: Path) -> None:
    path = folder / "wal" / "orders.00000002.jsonl"
    old = lines("wal/orders.00000002.jsonl")[0]
    additions = [
        (b',"commit"', b',"later":{"a":1},"commit"'),
        (b'"key":', b'"new":1,"key":'),
        (b'"count":', b'"new":1,"count":'),
    ]
    for before, after in additions:
        body = old[:-18].replace(before, after)
        assert parse(body + b',"crc":"%08x"}' % zlib.crc32(body)).offset == 4
    assert path.read_bytes() == old + b"\n"


def test_file_names_follow_the_page() -> None:
    assert segment_path(log_stem("orders", 0), 1) == "wal/orders.00000001.jsonl"
    assert segment_path(log_stem("orders", 3), 1) == "wal/orders~3.00000001.jsonl"
    assert segment_path(log_stem("orders.DLQ", 0), 1) == "dlq/orders.dlq.jsonl"
    assert segment_path(log_stem("orders.DLQ", 0), 2) == "dlq/orders.dlq.00000002.jsonl"
    assert group_stem("orders", 0, "billing") == "offsets/orders__billing"
    assert parse_group_stem("orders~3__billing") == ("orders", 3, "billing")
    long = group_stem("a" * 200, 0, "b" * 200).removeprefix("offsets/")
    assert re.fullmatch(r"a{197}~[0-9a-f]{32}", long)
