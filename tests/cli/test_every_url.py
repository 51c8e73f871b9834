"""Each command on each bus: a folder, a broker, a NATS server, a MongoDB server."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kit.mongod import mongo_url
from trunkline.bus.nats.server import Servers

from .conftest import ENV, PROGRAM, Done, Run, lines

__all__ = ["mongo_url"]

SCHEMES = ("file", "ws", "nats", "mongodb")
_names = itertools.count(1)


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with Servers(tmp_path_factory.mktemp("nats"), sync="2m") as servers:
        yield servers.url


@pytest.fixture(scope="module")
def broker() -> Iterator[Callable[[Path], str]]:
    """Starts brokers on folders; they end with the module."""
    begun: list[subprocess.Popen[str]] = []

    def start(folder: Path) -> str:
        words = ["serve", "--url", f"file:{folder}", "--port", "0", "--json"]
        process = subprocess.Popen(
            [*PROGRAM, *words], stdout=subprocess.PIPE, text=True, env=ENV, cwd=folder.parent
        )
        begun.append(process)
        assert process.stdout is not None
        found = re.search(r"ws://[^\s\"]+", process.stdout.readline())
        assert found
        return found[0]

    yield start
    for process in begun:
        process.terminate()
        process.communicate()


@pytest.fixture(params=SCHEMES)
def url(request: pytest.FixtureRequest, home: Path) -> str:
    """A bus that no other test uses."""
    name = f"t{os.getpid()}-{next(_names)}"
    match request.param:
        case "file":
            return f"file:{home / 'bus'}"
        case "ws":
            start: Callable[[Path], str] = request.getfixturevalue("broker")
            return start(home / "bus")
        case "nats":
            return f"{request.getfixturevalue('nats')}/{name}"
    base: str = request.getfixturevalue("mongo_url")
    place, _, options = base.partition("/?")
    return f"{place.rstrip('/')}/{name}?{options}"


@pytest.fixture
def at(run: Run, url: str) -> Run:
    """Run a command on that bus."""

    def call(*words: str, **options: Any) -> Done:
        return run("--url", url, *words, **options)

    return call


def scheme(url: str) -> str:
    return url.partition(":")[0]


def dies(at: Run) -> None:
    """Let a group give one event of ``orders`` up."""
    words = ("--group", "billing", "--exec", "exit 1", "--count", "1", "--wait", "20")
    assert at("sub", "orders", *words).code == 0


def test_events_go_in_and_come_out(at: Run, url: str) -> None:
    assert at("pub", "orders", '{"n": 1}', "--key", "a").code == 0
    assert at("pub", "orders", stdin=lines(4, 2)).code == 0

    assert [row["payload"]["n"] for row in at("tail", "orders", "-n", "2").rows] == [4, 5]
    assert [row["payload"]["n"] for row in at("get", "orders", "2:4").rows] == [2, 3]
    assert at("get", "orders", "-1").rows[0]["payload"] == {"n": 5}
    assert len(at("get", "orders", "@-1h:").rows) == 5
    assert at("get", "orders", "@-1h:-30m").code == 3
    assert at("get", "orders", "99").code == 3
    assert [row["offset"] for row in at("grep", "orders", '"n":3').rows] == [3]
    assert at("grep", ">", "nothing like it").code == 3
    got = at("sub", "orders", "--from", "start", "--count", "2", "--where", "payload.n > 3")
    assert [row["payload"]["n"] for row in got.rows] == [4, 5]


def test_a_group_receives_and_is_moved(at: Run, url: str) -> None:
    at("pub", "orders", stdin=lines(3))
    got = at("sub", "orders", "--group", "billing", "--count", "2", "--wait", "20")
    assert [row["payload"]["n"] for row in got.rows] == [1, 2]

    rows = at("group", "ls", "--json").rows
    assert [(row["topic"], row["group"], row["lag"]) for row in rows] == [("orders", "billing", 1)]
    assert at("group", "lag", "orders", "billing").out == "1\n"
    assert at("group", "info", "orders", "billing", "--json").rows[0]["options"]["max_retries"] >= 0

    moved = at("group", "seek", "orders", "billing", "--to", "start", "--json").rows
    assert [(row["from"], row["to"]) for row in moved] == [(3, 1)]
    assert at("group", "seek", "orders", "billing", "--to", "-1", "--json").rows[0]["to"] == 3
    assert at("group", "seek", "orders", "billing", "--to", "@-1h", "--json").rows[0]["to"] == 1

    assert at("group", "pause", "orders", "billing", "--json").rows[0]["paused"] is True
    assert at("group", "resume", "orders", "billing", "--json").rows[0]["paused"] is False
    edited = at("group", "edit", "orders", "billing", "--max-retries", "9", "--json")
    assert edited.rows[0]["options"]["max_retries"] == 9
    assert at("group", "rm", "orders", "billing", "--yes").code == 0
    assert at("group", "ls", "--json").rows == []
    assert at("group", "lag", "orders", "billing").code == 3


def test_a_topic_can_be_the_first_thing_on_a_server(at: Run, url: str) -> None:
    """In a new database it was refused, and ``init`` makes folders only."""
    made = at("topic", "create", "orders")
    assert made.code == (0 if scheme(url) != "file" else 2)
    if scheme(url) == "file":
        assert "trunkline init" in made.err
    else:
        assert at("pub", "orders", "1").code == 0


def test_topics_are_made_changed_and_removed(at: Run, url: str) -> None:
    at("pub", "first", "1")  # a folder is made by its first event
    assert at("topic", "create", "orders", "--partitions", "2").code == 0
    changed = at("topic", "edit", "orders", "--dedup-window-s", "60", "--json")
    assert changed.rows[0]["options"]["dedup_window_s"] == 60
    at("pub", "orders", stdin=lines(6))
    found = {row["topic"]: row for row in at("topic", "ls", "--json").rows}
    assert (found["orders"]["partitions"], found["orders"]["records"]) == (2, 6)
    info = at("topic", "info", "orders", "--json").rows[0]
    assert sum(part["records"] for part in info["partitions"]) == 6

    assert at("topic", "purge", "orders", "--before", "end", "--yes").code == 0
    info = at("topic", "info", "orders", "--json").rows[0]
    assert sum(part["records"] for part in info["partitions"]) == 0
    at("pub", "orders", stdin=lines(2))
    info = at("topic", "info", "orders", "--json").rows[0]
    assert sum(part["records"] for part in info["partitions"]) == 2

    assert at("topic", "rm", "orders", "--yes").code == 0
    assert "orders" not in {row["topic"] for row in at("topic", "ls", "--json").rows}
    assert at("topic", "rm", "orders", "--yes").code == 3


def test_dead_letters_are_listed_and_given_back(at: Run, url: str) -> None:
    at("pub", "orders", '{"n": 1}')
    at("sub", "orders", "--group", "billing", "--count", "1", "--wait", "20", "--from", "end")
    at("pub", "orders", '{"n": 2}')
    assert at("group", "edit", "orders", "billing", "--max-retries", "0").code == 0
    dies(at)
    letters = at("dlq", "ls", "--json").rows
    assert [(row["topic"], row["group"], row["open"]) for row in letters] == [
        ("orders", "billing", True)
    ]
    number = str(letters[0]["letter"])
    assert at("dlq", "show", "orders", number, "--json").rows[0]["event"]["payload"] == {"n": 2}
    assert at("dlq", "redrive", "orders", "--dry-run").code == 0
    assert at("dlq", "redrive", "orders").code == 0
    assert at("dlq", "ls", "--json").rows == []
    again = at("sub", "orders", "--group", "billing", "--count", "1", "--wait", "20")
    assert [row["payload"] for row in again.rows] == [{"n": 2}]


def test_what_a_bus_cannot_do_is_refused_by_name(at: Run, url: str) -> None:
    at("pub", "orders", stdin=lines(2))
    has_ledgers = scheme(url) in ("file", "mongodb")
    took = at("take", "orders", "--group", "g", "--json")
    assert took.code == (0 if has_ledgers else 4)
    if has_ledgers:
        assert at("ack", took.rows[0]["handle"]).code == 0
        assert at("inbox", "orders", "--group", "g", "--json").rows[0]["payload"] == {"n": 2}
        peek = at("sub", "orders", "--group", "g", "--ack", "none", "--count", "1", "--wait", "5")
        assert [row["payload"]["n"] for row in peek.rows] == [2]
    else:
        assert "does not promise 'handles'" in took.err
        assert took.err.count("\n") == 1
        refused = at("sub", "orders", "--group", "g", "--ack", "none")
        assert (refused.code, refused.err.count("\n")) == (4, 1)
        at("sub", "orders", "--group", "g", "--count", "1", "--wait", "20")
        one = at("group", "seek", "orders", "g", "--to", "1", "-p", "0")
        assert (one.code, one.err.count("\n")) == (4, 1)
    compact = at("topic", "compact", "orders", "--yes")
    assert compact.code == (0 if scheme(url) == "file" else 4), compact.err
    verify = at("verify")
    assert verify.code == (0 if scheme(url) == "file" else 4), verify.err


def test_a_bridge_carries_to_a_bus_and_from_it(
    at: Run, run: Run, url: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    for n in (1, 2, 3):
        payload = ("--payload-json", f'{{"n": {n}}}', "--events-file", "in.ndjson")
        run("ndjson", "publish", "--topic", "orders", "--scope", f"s{n}", "--actor", "me", *payload)
    there = run("bridge", "ndjson:in.ndjson", url, "--json")
    assert there.code == 0, there.err
    assert there.rows[0]["copied"] == 3
    assert run("bridge", "ndjson:in.ndjson", url, "--json").rows[0]["copied"] == 0
    back = run("bridge", url, "ndjson:out.ndjson", "--json")
    assert back.rows[0]["copied"] == 3, back.err
    assert run("bridge", url, "ndjson:in.ndjson", "--json").rows[0]["copied"] == 0  # no circle
    assert len((home / "out.ndjson").read_text().splitlines()) == 3


def test_a_context_names_a_bus_and_its_token(
    run: Run, home: Path, broker: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
    made = run("token", "create", "ops", "--admin", "--url", f"file:{home / 'bus'}")
    (home / "token").write_text(made.out)
    url = broker(home / "bus")
    assert run("--url", url, "topic", "ls").code == 1  # access is denied without a token
    assert run("--url", url, "--token", made.out.strip(), "pub", "orders", "1").code == 0

    added = run("context", "add", "prod", url, "--token-file", "token")
    assert added.code == 0, added.err
    assert "orders" in run("--context", "prod", "topic", "ls", "-q").out.split()
    assert "orders" in run("topic", "ls", "--context", "prod", "-q").out.split()
    monkeypatch.setenv("TRUNKLINE_CONTEXT", "prod")
    assert "orders" in run("topic", "ls", "-q").out.split()
    assert made.out.strip() not in (home / "config/trunkline/contexts.json").read_text()

    wrong = run("--context", "prd", "topic", "ls")
    assert (wrong.code, "did you mean prod?" in wrong.err) == (3, True)
    both = run("--context", "prod", "--url", url, "topic", "ls")
    assert both.code == 4
    assert run("context", "rm", "prod").code == 0
    assert run("context", "ls").out == "there are no contexts\n"


def test_a_password_of_a_context_is_not_shown(
    run: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
    shown = {
        "nats://me:secret@host:4222/app": "nats://me:***@host:4222/app",
        "nats://me:se@cret@host:4222": "nats://me:***@host:4222",
        "nats://secret@host:4222/app": "nats://***@host:4222/app",  # a token
        "nats+tls://secret@host:4222": "nats+tls://***@host:4222",
        "nats://host:4222/app": "nats://host:4222/app",
        "mongodb://me@host/app": "mongodb://me@host/app",
        "mongodb://me:secret@a,b/app?w=1&tlsCertificateKeyFilePassword=secret&tls=true": (
            "mongodb://me:***@a,b/app?w=1&tlsCertificateKeyFilePassword=***&tls=true"
        ),
    }
    for place, wanted in shown.items():
        added = run("context", "add", "far", place, "--json")
        assert [row["url"] for row in added.rows] == [wanted]
        assert run("context", "ls", "--json").rows[0]["url"] == wanted
    assert (home / "config/trunkline/contexts.json").stat().st_mode & 0o077 == 0


def test_a_password_in_a_url_is_not_printed(run: Run, nats: str, home: Path) -> None:
    """A server without accounts takes any name and password."""
    there = nats.replace("//", "//me:secret@") + f"/t{os.getpid()}-{next(_names)}"
    run("--url", there, "pub", "orders", "1")
    copied = run("bridge", there, f"file:{home / 'bus'}", "--json")
    assert (copied.code, copied.rows[0]["source"]) == (0, there.replace("secret", "***"))


@pytest.mark.parametrize(
    "url",
    [
        "ws://127.0.0.1:9",
        "nats://127.0.0.1:9/app",
        "mongodb://127.0.0.1:9/app?directConnection=true",
    ],
)
def test_a_server_that_is_away_is_one_line(run: Run, url: str) -> None:
    done = run("--url", url, "topic", "ls")
    assert (done.code, done.err.count("\n")) == (1, 1), done.err
    assert "Traceback" not in done.err
