"""Chat and worker conventions, and the restart protocol as a program."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from trunkline.errors import InvalidOption
from trunkline.files import conventions as conv
from trunkline.files.spool import Spool

from .harness import ENV, Done, Run

EXAMPLE = Path(__file__).parents[2] / "examples" / "restart_recovery.py"


def rows(queue: Path) -> list[tuple[str, str, str]]:
    return [(row.priority, row.source, row.type) for row in Spool(str(queue)).pending()]


@pytest.mark.parametrize(
    ("state", "kind", "priority"),
    [
        ("completed", "task-complete", "high"),
        ("escalated", "task-blocked", "critical"),
        ("failed", "task-failed", "high"),
        ("spawned", "heartbeat", "low"),
        ("died", "worker-died", "high"),
        ("dismissed", "worker-dismissed", "normal"),
        ("continued", "worker-continued", "normal"),
    ],
)
def test_worker_states_have_types_and_priorities(
    trunkline_cli: Run, queue: Path, state: str, kind: str, priority: str
) -> None:
    done = trunkline_cli("spool", "publish-worker-event", queue, "parser", state, "it says")

    assert done.code == 0
    assert rows(queue) == [(priority, "parser", kind)]
    content = Spool(str(queue)).get(done.out.decode().strip())
    assert (content.fields["dedup-key"], content.text) == (f"parser:{kind}", "it says")


def test_worker_events_can_be_deduplicated(trunkline_cli: Run, queue: Path) -> None:
    words = ("spool", "publish-worker-event", str(queue), "w", "failed")
    assert trunkline_cli(*words, "--dedup-window", "60").code == 0
    assert trunkline_cli(*words, "--dedup-window", "60").code == 5
    assert trunkline_cli(*words).code == 0
    assert trunkline_cli("spool", "publish-worker-event", str(queue), "w", "bored").code == 4
    assert trunkline_cli("spool", "publish-worker-event", "/none", "w", "failed").code == 2
    with pytest.raises(InvalidOption):
        conv.publish_worker_event(Spool(str(queue)), "w", "bored")


def test_a_chat_message_announces_itself_and_its_mentions(trunkline_cli: Run, queue: Path) -> None:
    done = trunkline_cli(
        "spool",
        "publish-chat",
        queue,
        "alex",
        "@bob, ask @carol! or x@y.org @bob",
        "--channel=live",
    )

    assert done.out.count(b"\n") == 3
    assert rows(queue) == [
        ("critical", "nbs-chat", "chat-interrupt"),
        ("high", "nbs-chat", "chat-mention"),
        ("normal", "nbs-chat", "chat-message"),
    ]
    spool = Spool(str(queue))
    contents = [spool.get(row.name) for row in spool.pending()]
    assert [content.fields["dedup-key"] for content in contents] == [
        "nbs-chat:chat-interrupt",
        "nbs-chat:chat-mention:bob",
        "nbs-chat:chat-message:live",
    ]
    assert contents[1].text == "@bob from alex: @bob, ask @carol! or x@y.org @bob"
    assert contents[2].text == "alex: @bob, ask @carol! or x@y.org @bob"


def test_two_messages_are_never_duplicates(queue: Path) -> None:
    (queue / "config.yaml").write_text("dedup-window: 300\n")
    for text in ("one", "two"):
        conv.publish_chat(Spool(str(queue)), "alex", text)

    assert len(rows(queue)) == 2


def test_a_human_at_the_terminal_is_heard(queue: Path) -> None:
    conv.publish_chat(Spool(str(queue)), "alex", "hello", human=True)

    assert rows(queue) == [("high", "nbs-chat-terminal", "human-input")]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("@a", ["a"]),
        ("mail a@b.c", []),
        ("(@a) -@b .@c +@d _@e ,@f", ["a", "f"]),
        ("@a-b_c! @a-b_c", ["a-b_c!"]),
        (" ".join(f"@h{n}" for n in range(20)), [f"h{n}" for n in range(16)]),
    ],
)
def test_mentions(text: str, want: list[str]) -> None:
    found = [m.handle + "!" * m.interrupt for m in conv.mentions(text)]
    assert found == want


def test_chat_payloads_are_cut_between_characters() -> None:
    assert conv.cut("é" * 3000) == ("é" * 1023).encode()
    assert len(conv.cut("x" * 5000)) == 2047
    assert conv.cut("short") == b"short"


def test_every_named_type_has_a_priority() -> None:
    types = {v for k, v in vars(conv).items() if k.isupper() and isinstance(v, str) and "-" in v}
    types -= {conv.CHAT_SOURCE, conv.TERMINAL_SOURCE}
    assert types | {"heartbeat"} == set(conv.PRIORITY)
    assert set(conv.WORKER_STATES.values()) <= set(conv.PRIORITY)


def test_the_handle_of_an_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NBS_HANDLE", raising=False)
    assert conv.own_handle(str(tmp_path)) == "claude"
    assert conv.own_handle(str(tmp_path), role="supervisor") == "supervisor"
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "parser-a3f1.md").touch()
    assert conv.own_handle(str(tmp_path), role="supervisor") == "parser-a3f1"
    (tmp_path / "workers" / "other.md").touch()
    assert conv.own_handle(str(tmp_path)) == "claude"
    monkeypatch.setenv("NBS_HANDLE", "me")
    assert conv.own_handle(str(tmp_path)) == "me"


def start(queue: Path, **env: str) -> Done:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), str(queue)],
        env={**ENV, "NBS_HANDLE": "agent", **env},
        capture_output=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)),
    )
    return Done(done.returncode, done.stdout, done.stderr)


def test_an_agent_that_dies_in_the_middle_recovers(queue: Path, nbs_bus: Run) -> None:
    nbs_bus("publish", queue, "b", "heartbeat", "low", "alive")
    nbs_bus("publish", queue, "w", "task-complete", "high", "467/467")
    nbs_bus("publish", queue, "w", "task-blocked", "critical", "no disk")

    first = start(queue, DIE_AT="task-complete")
    assert first.code == -6
    assert [line.split()[0] for line in first.out.decode().splitlines()] == [
        "task-blocked",
        "task-complete",
    ]
    assert [row[2] for row in rows(queue)] == ["task-complete", "heartbeat"]

    second = start(queue)
    assert second.code == 0
    assert second.out.decode().splitlines() == [
        "task-complete from w: read the result: 467/467",
        "heartbeat from b: note that the source is alive: alive",
        "agent is back, 2 events handled",
    ]
    assert rows(queue) == [("low", "agent", "heartbeat")]
    content = Spool(str(queue)).get(Spool(str(queue)).pending()[0].name)
    assert content.text == "Online and recovered"

    (queue / "config.yaml").write_text("dedup-window: 300\n")
    third = start(queue)  # its own heartbeat is an event like any other
    assert third.out.decode().splitlines()[-1] == "agent is back, 1 events handled"


def test_without_a_queue_the_agent_falls_back(tmp_path: Path) -> None:
    assert start(tmp_path / "none").code == 2
    assert conv.recover(str(tmp_path / "none"), "me", lambda *_: None) is None


def test_an_event_that_another_reader_acknowledged_is_no_error(queue: Path) -> None:
    spool = Spool(str(queue))
    names = [spool.publish("a", "t", "high", str(number)) for number in range(3)]
    seen: list[str] = []

    def act(name: str, _: object) -> None:
        seen.append(name)
        if name == names[0]:
            spool.ack(names[0])
            spool.ack(names[1])

    assert conv.recover(str(queue), "me", act) == [names[0], names[2]]
    assert seen == [names[0], names[2]]
    assert os.listdir(queue / "processed")
