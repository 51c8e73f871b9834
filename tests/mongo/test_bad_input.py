"""What is wrong from the beginning is told in one line, and nothing is changed."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import bson
import pymongo
import pytest

import trunkline
from kit.mongod import fresh_database
from trunkline.errors import (
    Conflict,
    ConnectionLost,
    Denied,
    InvalidEvent,
    InvalidOption,
    NoBus,
    TrunklineError,
    UnsupportedFormat,
)

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def place(mongo_url: str) -> str:
    return fresh_database(mongo_url)


@pytest.fixture
def database(place: str) -> Iterator[Any]:
    client: pymongo.MongoClient[dict[str, Any]]
    with pymongo.MongoClient(place) as client:
        yield client.get_default_database()


def contents(database: Any) -> dict[str, list[Any]]:
    return {name: list(database[name].find()) for name in database.list_collection_names()}


async def refused(url: str, kind: type[TrunklineError], **options: Any) -> TrunklineError:
    """The error of the first publish. It is one line."""
    with pytest.raises(kind) as caught:
        async with trunkline.connect(url, **options) as bus:
            await bus.publish("orders", 1)
    error = caught.value
    assert "\n" not in str(error)
    assert len(str(error)) < 400
    return error


@pytest.mark.parametrize(
    "url",
    [
        "mongodb://",
        "mongodb://host:port",
        "mongodb://host:99999999",
        "mongodb://user:pass word@@host",
        "mongodb://host/a%20b",
        "mongodb://host/?tls=perhaps",
        "mongodb://host/?readPreference=any",
        "mongodb:host",
    ],
)
async def test_a_url_that_is_none(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MONGO_URL", raising=False)
    await refused(url, InvalidOption)


async def test_an_option_that_is_of_another_bus(place: str, database: Any) -> None:
    await refused(place, InvalidOption, lock_timeout_s=1.0)
    await refused(place, InvalidOption, patience_s=-1)
    assert contents(database) == {}


async def test_nobody_is_there() -> None:
    error = await refused("mongodb://127.0.0.1:1/x", ConnectionLost, patience_s=0)
    assert "127.0.0.1:1" in str(error)


async def test_wrong_credentials_are_told_without_the_password(place: str, database: Any) -> None:
    url = place.replace("mongodb://", "mongodb://ada:hush@")
    error = await refused(url, Denied)
    assert "hush" not in str(error)
    assert contents(database) == {}


async def test_there_is_no_bus_and_none_may_be_made(place: str, database: Any) -> None:
    await refused(place, NoBus, create=False)
    assert contents(database) == {}


@pytest.mark.parametrize("name", ["events", "log", "group_offsets"])
async def test_a_database_that_is_not_ours(place: str, database: Any, name: str) -> None:
    database[name].insert_one({"_id": 1, "theirs": True})
    error = await refused(place, Conflict)
    assert name in str(error)
    assert "nothing was changed" in str(error.hint)
    assert contents(database) == {name: [{"_id": 1, "theirs": True}]}


async def test_a_database_that_a_later_version_wrote(place: str, database: Any) -> None:
    database["about"].insert_one({"_id": "trunkline", "format": 99})
    error = await refused(place, UnsupportedFormat)
    assert "99" in str(error)
    assert contents(database) == {"about": [{"_id": "trunkline", "format": 99}]}


async def test_a_batch_that_is_larger_than_a_document(place: str) -> None:
    async with trunkline.connect(place) as bus:
        await bus.publish("orders", 0)
        with pytest.raises(InvalidEvent, match=r"\d+ bytes, 12582912 are allowed"):
            await bus.publish_many("orders", ["x" * 900_000] * 20)
        assert [record.event.payload for record in await bus.read("orders")] == [0]
        await bus.publish("orders", 1)


@asynccontextmanager
async def old_server(wire: int, version: str) -> AsyncIterator[str]:
    """A server that says of itself how old it is, and nothing else."""
    about = {
        "ok": 1,
        "ismaster": True,
        "isWritablePrimary": True,
        "minWireVersion": 0,
        "maxWireVersion": wire,
        "localTime": datetime.now(UTC),
        "version": version,
        "versionArray": [*map(int, version.split(".")), 0],
    }

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                size, asked, _, kind = struct.unpack("<iiii", await reader.readexactly(16))
                await reader.readexactly(size - 16)
                if kind == 2004:  # OP_QUERY, answered by OP_REPLY
                    body, kind = struct.pack("<iqii", 0, 0, 0, 1) + bson.encode(about), 1
                else:  # OP_MSG
                    body = struct.pack("<IB", 0, 0) + bson.encode(about)
                writer.write(struct.pack("<iiii", 16 + len(body), 1, asked, kind) + body)
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"mongodb://127.0.0.1:{server.sockets[0].getsockname()[1]}/x"
        server.close_clients() if hasattr(server, "close_clients") else None


@pytest.mark.parametrize(("wire", "version"), [(6, "3.6.23"), (9, "4.2.24")])
async def test_a_server_that_is_too_old(wire: int, version: str) -> None:
    async with old_server(wire, version) as url:
        await refused(url, UnsupportedFormat)
