"""Where a broker is told what to do: a flag, the environment, a file, else the default."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from trunkline.broker.options import gather
from trunkline.broker.server import Broker
from trunkline.bus.remote import RemoteBus
from trunkline.errors import InvalidOption
from trunkline.options import BrokerOptions

FILE = """
[broker]
url = "file:of-file"
port = 1
max_inflight = 1
ack_timeout_s = 1.0
origins = ["https://a.example"]
"""
OLD = {
    "BUS_URL": "file:old",
    "BUS_PORT": "2",
    "BUS_MAX_INFLIGHT": "2",
    "BUS_ACK_TIMEOUT_MS": "2000",
}
NEW = {
    "TRUNKLINE_URL": "file:new",
    "TRUNKLINE_PORT": "3",
    "TRUNKLINE_MAX_INFLIGHT": "3",
    "TRUNKLINE_ACK_TIMEOUT_MS": "3000",
}
FLAGS = {"url": "file:flag", "port": 4, "max_inflight": 4, "ack_timeout_s": 4.0}


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "broker.toml"
    path.write_text(FILE, "utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("flags", "environ", "wanted"),
    [
        (FLAGS, OLD | NEW, ("file:flag", 4, 4, 4.0)),
        ({}, OLD | NEW, ("file:new", 3, 3, 3.0)),
        ({}, OLD, ("file:old", 2, 2, 2.0)),
        ({"port": None}, {"BUS_PORT": ""}, ("file:of-file", 1, 1, 1.0)),
        ({"port": 0}, {}, ("file:of-file", 0, 1, 1.0)),
    ],
)
def test_a_flag_comes_before_the_environment_and_that_before_the_file(
    file: str, flags: dict[str, Any], environ: dict[str, str], wanted: tuple[Any, ...]
) -> None:
    for found in (
        gather(flags, environ, file),
        gather(flags, environ | {"TRUNKLINE_CONFIG": file}),
    ):
        assert (found.url, found.port, found.max_inflight, found.ack_timeout_s) == wanted
        assert found.origins == ("https://a.example",)


def test_without_any_there_are_defaults() -> None:
    assert gather({}, {}) == BrokerOptions()


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_a_port_that_is_none_is_told_in_few_words(port: int) -> None:
    with pytest.raises(InvalidOption) as caught:
        gather({"port": port}, {})
    assert str(caught.value) == f"ports are 0 to 65535, not {port}"


@pytest.mark.parametrize(
    "origin", ["*", "null", "app.example", "https://*.example", "https://app.example/page", ""]
)
def test_what_is_no_pages_origin_is_refused(origin: str) -> None:
    with pytest.raises(InvalidOption, match="not the origin of a page"):
        gather({"origins": (origin,)}, {})


def test_an_address_for_clients_is_not_the_bus_to_serve() -> None:
    for name in ("TRUNKLINE_URL", "BUS_URL"):
        assert gather({}, {name: "ws://127.0.0.1:7070"}).url == "file:.bus"
    with pytest.raises(InvalidOption, match="a broker serves a bus"):
        gather({"url": "ws://127.0.0.1:7070"}, {})


@pytest.mark.parametrize(
    "environ",
    [{"BUS_PORT": "x"}, {"BUS_PORT": "70000"}, {"BUS_ACK_TIMEOUT_MS": "0"}, {"BUS_PORT": "-1"}],
    ids=str,
)
def test_what_is_no_value_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(InvalidOption):
        gather({}, environ)


@pytest.mark.parametrize(
    "text",
    [
        "broker = 1",
        "[broker]\nprot = 1",
        "[broker\n",
        "[broker]\nport='x'",
        "auth = true",
        "[brokr]\nauth = true",
    ],
)
def test_a_file_that_is_wrong_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broker.toml"
    path.write_text(text, "utf-8")
    with pytest.raises(InvalidOption):
        gather({}, {}, str(path))


def test_a_file_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broker.toml"
    path.write_bytes(b"[broker]\nhost = '\xff'\n")
    with pytest.raises(InvalidOption, match="is not TOML"):
        gather({}, {}, str(path))


def test_a_config_that_is_empty_is_none() -> None:
    assert gather({}, {"TRUNKLINE_CONFIG": ""}) == gather({}, {})


async def test_a_client_gets_no_more_at_once_than_the_broker_allows() -> None:
    options = BrokerOptions(url="memory:", port=0, metrics_s=0, max_inflight_limit=2)
    async with Broker(options) as broker, RemoteBus(broker.url) as bus:
        await bus.publish_many("orders", [1, 2, 3])
        async with bus.subscribe("orders", group="billing", max_inflight=100) as stream:
            first = [await asyncio.wait_for(anext(stream), 10) for _ in range(2)]
            third = asyncio.ensure_future(anext(stream))
            await asyncio.wait([third], timeout=0.1)
            assert not third.done()
            await first[0].ack()
            assert (await asyncio.wait_for(third, 10)).event.payload == 3


async def test_a_broker_answers_to_its_names_alone() -> None:
    options = BrokerOptions(url="memory:", port=0, metrics_s=0, hosts=("bus.example",))
    async with Broker(options) as broker, httpx.AsyncClient() as http:
        url = broker.url.replace("ws", "http", 1) + "/healthz"
        for host, status in (("bus.example", 200), ("other.example", 421)):
            assert (await http.get(url, headers={"host": host})).status_code == status
