"""What the options of the source mean, and what is said about those that mean nothing."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from trunkline.errors import InvalidOption, NoBus, NotFound, OutOfRange
from trunkline.folder import Folder, upkeep
from trunkline.spark.source.catalogs import FolderCatalog as Catalog
from trunkline.spark.source.offsets import Place, chosen_partitions, resolve
from trunkline.spark.source.options import Edge, bus_of, read_options

from .logs import TOPIC, append, make_event, make_log


def places(root: str, edge: Edge = "starting", *, stream: bool = False, **options: str) -> Place:
    given = {"url": f"file:{root}", "subscribe": TOPIC} | options
    choice = read_options({k.lower(): v for k, v in given.items()}, stream=stream)
    catalog = Catalog(choice.root)
    try:
        return resolve(catalog, choice, edge)
    finally:
        catalog.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "give one of the options subscribe, subscribePattern and assign"),
        ({"subscribe": "a", "assign": '{"a":[0]}'}, "not subscribe and assign"),
        ({"subscribe": "a", "startingOffset": "earliest"}, "did you mean startingOffsets"),
        ({"subscribe": "a", "startingOffsets": "latest"}, "reads nothing in a batch"),
        ({"subscribe": "a", "startingOffsets": "5"}, "does not say which partition"),
        ({"subscribe": "a", "startingOffsets": '{"a":{"0":0}}'}, "offsets count from 1"),
        ({"subscribe": "a", "endingOffsets": '{"a":{"0":-2}}'}, "cannot be -2"),
        ({"subscribe": "a", "endingOffsets": "{"}, "is no JSON"),
        ({"subscribe": "a", "startingOffsets": "begin"}, "is not earliest, latest or JSON"),
        ({"subscribe": "a", "startingTimestamp": "soon"}, "is no time"),
        ({"subscribe": "a", "badRecords": "drop"}, "fail or column or skip"),
        ({"subscribe": "a", "failOnDataLoss": "no"}, "true or false"),
        ({"subscribe": "a", "maxOffsetsPerTrigger": "5"}, "is for a stream, this is a batch"),
        ({"subscribe": "a", "minPartitions": "-1"}, "no number"),
    ],
)
def test_a_wrong_option_says_what_to_type(options: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        read_options({"url": "file:/x"} | options, stream=False)

    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_url_is_a_folder_wherever_it_is_read() -> None:
    assert bus_of({"url": "file:/data/bus"}) == "/data/bus"
    assert bus_of({"url": "file:///data/bus"}) == "/data/bus"
    assert bus_of({"path": "/data/bus"}) == "/data/bus"
    assert bus_of({"url": "file:~/bus"}) == os.path.expanduser("~/bus")
    assert bus_of({"url": "ws://127.0.0.1:7070"}) == "http://127.0.0.1:7070"
    assert bus_of({"url": "wss://host/"}) == "https://host"
    for url in ("http://127.0.0.1:7070", "nats://127.0.0.1", "mongodb://127.0.0.1/shop"):
        assert bus_of({"url": url}) == url
    for url in ("memory:", "kafka://127.0.0.1"):
        with pytest.raises(InvalidOption, match="Spark cannot read"):
            bus_of({"url": url})
    with pytest.raises(InvalidOption, match="not a folder"):
        bus_of({"url": "file://data/bus"})
    with pytest.raises(InvalidOption, match="'url' is missing"):
        bus_of({})


def test_a_missing_bus_and_a_missing_topic_are_named(tmp_path: Path) -> None:
    with pytest.raises(NoBus, match="there is no bus at"):
        places(str(tmp_path / "nowhere"))
    root = make_log(tmp_path / "bus", 1)
    with pytest.raises(NotFound, match="there is no topic payments"):
        places(root, subscribe="payments")


def test_a_batch_is_everything_and_a_stream_what_comes(tmp_path: Path) -> None:
    root = make_log(tmp_path, 40, partitions=2)

    assert places(root) == {TOPIC: {"0": 1, "1": 1}}
    assert places(root, "ending") == {TOPIC: {"0": 21, "1": 21}}
    assert places(root, stream=True) == {TOPIC: {"0": 21, "1": 21}}


def test_offsets_by_number_word_and_time(tmp_path: Path) -> None:
    root = make_log(tmp_path, 40, partitions=2)
    given = '{"orders":{"0":7,"1":-2}}'
    # Records 0 to 9 and 20 to 29 are in partition 0; record n is n seconds after the start.
    when = str(int(datetime(2026, 1, 1, 0, 0, 25, tzinfo=UTC).timestamp() * 1000))

    assert places(root, startingOffsets=given) == {TOPIC: {"0": 7, "1": 1}}
    assert places(root, startingTimestamp=when) == {TOPIC: {"0": 16, "1": 11}}
    assert places(root, startingTimestamp="2026-01-01T00:00:25Z", startingOffsets=given) == {
        TOPIC: {"0": 16, "1": 11}
    }
    by_time = f'{{"orders":{{"0":{when},"1":{when}}}}}'
    assert places(root, "ending", endingOffsetsByTimestamp=by_time) == {TOPIC: {"0": 16, "1": 11}}
    assert places(root, "ending", endingTimestamp="2030-01-01") == {TOPIC: {"0": 21, "1": 21}}


def test_a_time_after_the_last_record_is_an_error_or_the_end(tmp_path: Path) -> None:
    root = make_log(tmp_path, 5)

    with pytest.raises(NotFound, match="no record at or after 2030"):
        places(root, startingTimestamp="2030-01-01")
    found = places(
        root, startingTimestamp="2030-01-01", startingOffsetsByTimestampStrategy="latest"
    )
    assert found == {TOPIC: {"0": 6}}


def test_an_offset_that_is_gone_or_not_there_yet(tmp_path: Path) -> None:
    root = make_log(tmp_path, 30)
    folder = Folder(root)
    upkeep.trim(folder, TOPIC, 0, 11)
    folder.close()

    with pytest.raises(OutOfRange, match="retention removed it") as caught:
        places(root, startingOffsets='{"orders":{"0":5}}')
    assert (caught.value.first, caught.value.next) == (11, 31)
    with pytest.raises(OutOfRange, match="not written yet"):
        places(root, startingOffsets='{"orders":{"0":50}}')
    found = places(root, startingOffsets='{"orders":{"0":5}}', failOnDataLoss="false")
    assert found == {TOPIC: {"0": 11}}


def test_topics_by_list_pattern_and_assignment(tmp_path: Path) -> None:
    root = make_log(tmp_path, 40, partitions=2)
    folder = Folder(root)
    append(folder, [make_event(0, topic="orders.eu")])
    append(folder, [make_event(0, topic="orders.us")])
    append(folder, [make_event(0, topic="orders.DLQ", headers={"dlq-reason": "rejected"})])
    folder.close()
    catalog = Catalog(root)

    def chosen(**options: str) -> list[tuple[str, int]]:
        return chosen_partitions(catalog, read_options({"url": root} | options, stream=False))

    assert chosen(subscribe="orders,orders.eu") == [("orders", 0), ("orders", 1), ("orders.eu", 0)]
    assert chosen(subscribe="orders.*") == [("orders.eu", 0), ("orders.us", 0)]
    assert chosen(subscribe="orders.>") == [("orders.eu", 0), ("orders.us", 0)]
    assert chosen(subscribe="*.DLQ") == chosen(subscribe="orders.DLQ") == [("orders.DLQ", 0)]
    assert chosen(subscribePattern=r".*\.us") == [("orders.us", 0)]
    assert chosen(assign='{"orders":[1]}') == [("orders", 1)]
    with pytest.raises(NotFound, match="orders has partitions 0 to 1"):
        chosen(assign='{"orders":[2]}')
    catalog.close()


def test_a_token_is_taken_without_the_newline_of_its_file_and_never_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"url": "http://127.0.0.1:7070", "subscribe": TOPIC}
    assert read_options(given | {"token": "tl_1_x\n"}, stream=False).token == "tl_1_x"
    monkeypatch.setenv("TRUNKLINE_TOKEN", "tl_2_x\n")
    assert read_options(given, stream=False).token == "tl_2_x"
    with pytest.raises(InvalidOption, match="a token is one word") as told:
        read_options(given | {"token": "tl_1\nx"}, stream=False)
    assert "tl_1" not in str(told.value)
