"""``trunkline token``, as a person types it."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from trunkline.broker.server import Broker
from trunkline.cli import Parser, main, serve, token
from trunkline.errors import InvalidOption, NotFound
from trunkline.options import BrokerOptions

from .client import peer, running


def run(*words: str) -> int | None:
    """The verbs by themselves, whether or not the list of verbs has them."""
    parser = Parser(prog="trunkline")
    below: argparse._SubParsersAction[Any] = parser.add_subparsers(dest="verb")
    token.register(below)
    serve.register(below)
    args = parser.parse_args(words)
    for name in ("json", "quiet", "no_color", "allow_network"):
        setattr(args, name, getattr(args, name, False))
    done: int | None = args.run(args)
    return done


def test_tokens_are_made_listed_and_revoked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file:{tmp_path}"
    run("token", "create", "shop", "--publish", "orders.>", "--expires", "90d", "--url", url)
    text = capsys.readouterr().out.strip()
    assert text.startswith("tl_")
    run("token", "ls", "--json", "--url", url)
    (shown,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (shown["agent"], shown["grants"][0]["topics"]) == ("shop", ["orders.>"])
    assert text.split("_", 2)[2] not in str(shown)
    assert "digest" not in shown
    run("token", "revoke", shown["id"], "--url", url)
    assert "revoked" in capsys.readouterr().out
    run("token", "ls", "--url", url)
    assert "revoked" in capsys.readouterr().out
    with pytest.raises(NotFound, match="trunkline token ls"):
        run("token", "revoke", "shop", "--url", url)
    with pytest.raises(InvalidOption):
        run("token", "create", "shop", "--url", url)


def test_a_list_of_tokens_says_what_each_may(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file:{tmp_path}"
    run("token", "create", "biller", "--subscribe", "orders", "--group", "billing", "--url", url)
    run("token", "create", "shop", "--publish", "orders", "--url", url)
    capsys.readouterr()
    run("token", "ls", "--url", url)
    head, biller, shop = capsys.readouterr().out.splitlines()
    assert head.split() == ["id", "agent", "valid", "allows"]
    assert biller.endswith("  subscribe orders as billing")
    assert shop.endswith("publish orders")


def test_serve_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run("serve", "--help")
    assert ended.value.code == 0
    assert "--port" in capsys.readouterr().out
    assert callable(main)


async def test_serve_says_where_it_is_and_what_is_in_its_way(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "trunkline.broker", "--url", f"file:{tmp_path}", "--port"]
    process = await asyncio.create_subprocess_exec(*words, "0", stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        said = (await asyncio.wait_for(process.stdout.readline(), 30)).decode()
        found = re.search(r"at ws://127.0.0.1:(\d+) and http://127.0.0.1:(\d+) ", said)
        assert found is not None, said
        assert found[1] == found[2]
        with pytest.raises(InvalidOption, match=rf"port {found[1]} already.*--port"):
            async with Broker(BrokerOptions(url="memory:", port=int(found[1]))):
                pass
    finally:
        process.terminate()
        await process.wait()


async def test_a_broker_that_cannot_begin_leaves_no_folder_behind(tmp_path: Path) -> None:
    async with Broker(BrokerOptions(url="memory:", port=0)) as first:
        url = f"file:{tmp_path / 'new'}"
        for options in (
            {"port": first.port},
            {"host": "203.0.113.1", "auth": True},  # not an address of this machine
            {"port": 0, "tls_cert": str(tmp_path / "none.pem")},
        ):
            with pytest.raises(InvalidOption):
                async with Broker(BrokerOptions(url=url, **options)):
                    pass
            assert not (tmp_path / "new").exists()


async def test_a_token_made_while_the_broker_runs_is_asked_for_within_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(tmp_path) as broker, peer(broker.url) as one:
        assert (await one.ask("PUBLISH", topic="t", payload=1))["type"] == "PUBLISHED"
        words = ("token", "create", "me", "--publish", "t", "--url", f"file:{tmp_path}")
        await asyncio.to_thread(run, *words)
        text = capsys.readouterr().out.strip()
        assert (await one.hear("ERROR", 5))["code"] == "unauthenticated"
        async with peer(broker.url, text) as two:
            assert (await two.ask("PUBLISH", topic="t", payload=1))["type"] == "PUBLISHED"
            assert (await two.ask("PUBLISH", topic="u", payload=1))["code"] == "denied"


async def test_a_certificate_without_its_key_is_told(tmp_path: Path) -> None:
    import trustme

    cert = trustme.CA().issue_cert("127.0.0.1")
    cert.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    options = BrokerOptions(url="memory:", port=0, tls_cert=str(tmp_path / "cert.pem"))
    with pytest.raises(InvalidOption, match="--tls-key"):
        async with Broker(options):
            pass


@pytest.mark.parametrize("name", ["tls_key", "tls_client_ca"])
async def test_a_broker_without_a_certificate_asks_nobody_for_one(
    tmp_path: Path, name: str
) -> None:
    """Else it would be open to a network that it was thought to be guarded from."""
    options: dict[str, Any] = {name: str(tmp_path / "some.pem"), "host": "0.0.0.0", "port": 0}
    with pytest.raises(InvalidOption, match="tls_cert"):
        async with Broker(BrokerOptions(url=f"file:{tmp_path / 'new'}", **options)):
            pass
    assert not (tmp_path / "new").exists()


def test_a_token_for_longer_than_there_are_dates_is_refused(tmp_path: Path) -> None:
    words = ("token", "create", "x", "--admin", "--expires", "99999999999d")
    with pytest.raises(InvalidOption, match="too long"):
        run(*words, "--url", f"file:{tmp_path}")
