"""What chat and worker programs publish to a spool: event types, priorities, dedup keys.

Nothing here is required of a spool, which takes any type. It is what the programs around
``nbs-bus`` agreed on, so that their readers can rely on it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from trunkline.errors import Duplicate, InvalidOption, NotFound
from trunkline.files.event_file import Content, default_dedup_key
from trunkline.files.spool import Spool

TASK_COMPLETE: Final = "task-complete"
TASK_BLOCKED: Final = "task-blocked"
TASK_FAILED: Final = "task-failed"
CHAT_MESSAGE: Final = "chat-message"
CHAT_MENTION: Final = "chat-mention"
CHAT_INTERRUPT: Final = "chat-interrupt"
HUMAN_INPUT: Final = "human-input"
CONFIG_CHANGE: Final = "config-change"
HEARTBEAT: Final = "heartbeat"
WORKER_CONTINUED: Final = "worker-continued"
WORKER_DIED: Final = "worker-died"
WORKER_DISMISSED: Final = "worker-dismissed"
WORKER_SPAWNED: Final = "worker-spawned"

PRIORITY: Final[dict[str, str]] = {
    TASK_COMPLETE: "high",
    TASK_BLOCKED: "critical",
    TASK_FAILED: "high",
    CHAT_MESSAGE: "normal",
    CHAT_MENTION: "high",
    CHAT_INTERRUPT: "critical",
    HUMAN_INPUT: "high",
    CONFIG_CHANGE: "normal",
    HEARTBEAT: "low",
    WORKER_CONTINUED: "normal",
    WORKER_DIED: "high",
    WORKER_DISMISSED: "normal",
    WORKER_SPAWNED: "normal",
}
WORKER_STATES: Final[dict[str, str]] = {
    "spawned": HEARTBEAT,
    "completed": TASK_COMPLETE,
    "escalated": TASK_BLOCKED,
    "failed": TASK_FAILED,
    "continued": WORKER_CONTINUED,
    "dismissed": WORKER_DISMISSED,
    "died": WORKER_DIED,
}
CHAT_SOURCE: Final = "nbs-chat"
TERMINAL_SOURCE: Final = "nbs-chat-terminal"
CHAT_PAYLOAD_BYTES: Final = 2047
MENTIONS_MAX: Final = 16
DEFAULT_HANDLE: Final = "claude"

_MENTION = re.compile(r"(?<![A-Za-z0-9._+-])@([A-Za-z0-9_-]+)(!?)")


@dataclass(frozen=True, slots=True)
class Mention:
    handle: str
    interrupt: bool


def publish_worker_event(
    spool: Spool, worker: str, state: str, detail: str = "", *, dedup_window_s: int | None = None
) -> str:
    """Announce that ``worker`` entered ``state``; returns the file name."""
    if state not in WORKER_STATES:
        known = ", ".join(WORKER_STATES)
        raise InvalidOption(
            f"unknown worker state: {state!r}", name="state", hint=f"one of {known}"
        )
    kind = WORKER_STATES[state]
    return spool.publish(worker, kind, PRIORITY[kind], detail, dedup_window_s=dedup_window_s)


def publish_chat(
    spool: Spool, handle: str, message: str, *, channel: str = "", human: bool = False
) -> list[str]:
    """Announce a chat message and each mention in it. Two messages are never duplicates of each
    other, so no dedup window applies; the keys are there for readers.
    """
    source = TERMINAL_SOURCE if human else CHAT_SOURCE
    kind = HUMAN_INPUT if human else CHAT_MESSAGE
    key = default_dedup_key(source, kind, channel=channel)
    text = cut(f"{handle}: {message}")
    names = [spool.publish(source, kind, PRIORITY[kind], text, dedup_window_s=0, dedup_key=key)]
    for mention in mentions(message):
        kind = CHAT_INTERRUPT if mention.interrupt else CHAT_MENTION
        key = default_dedup_key(CHAT_SOURCE, kind, target=mention.handle)
        text = cut(f"@{mention.handle} from {handle}: {message}")
        names.append(
            spool.publish(CHAT_SOURCE, kind, PRIORITY[kind], text, dedup_window_s=0, dedup_key=key)
        )
    return names


def mentions(message: str) -> list[Mention]:
    """The handles that are addressed: each once, 16 at most; ``@handle!`` interrupts."""
    found: dict[str, bool] = {}
    for handle, bang in _MENTION.findall(message):
        if handle in found or len(found) < MENTIONS_MAX:
            found[handle] = found.get(handle, False) or bool(bang)
    return [Mention(handle, interrupt) for handle, interrupt in found.items()]


def cut(text: str) -> bytes:
    """The text as a chat payload: at most 2047 bytes, no broken character at the end."""
    raw = text.encode("utf-8", "surrogateescape")[:CHAT_PAYLOAD_BYTES]
    return raw.decode("utf-8", "ignore").encode() if len(raw) == CHAT_PAYLOAD_BYTES else raw


def own_handle(nbs_dir: str = ".nbs", role: str = "") -> str:
    """Our handle after a restart: ``NBS_HANDLE``, else the only worker file, else the role."""
    if handle := os.environ.get("NBS_HANDLE"):
        return handle
    workers = os.path.join(nbs_dir, "workers")
    if os.path.isdir(workers):
        names = [name[:-3] for name in os.listdir(workers) if name.endswith(".md")]
        if len(names) == 1:
            return names[0]
    return role or DEFAULT_HANDLE


def recover(directory: str, handle: str, act: Callable[[str, Content], None]) -> list[str] | None:
    """The restart protocol: act on everything that waits, in order, then show that we are back.

    An event is acknowledged only after ``act`` returned, so a crash in the middle repeats the one
    that was being handled. Returns the names of what was handled, or None when there is no spool
    and the caller falls back to whatever it did before there was one.
    """
    if not os.path.isdir(directory):
        return None
    spool = Spool(directory)
    handled: list[str] = []
    for row in spool.pending():
        with suppress(NotFound):  # someone else was faster, before or after we acted
            content = spool.get(row.name)
            act(row.name, content)
            handled.append(row.name)
            spool.ack(row.name)
    with suppress(Duplicate):  # another heartbeat of ours still waits, and says the same
        spool.publish(handle, HEARTBEAT, PRIORITY[HEARTBEAT], "Online and recovered")
    return handled
