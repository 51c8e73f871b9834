"""An agent that starts again: work off what came in while it was away, then show that it is back.

    python examples/restart_recovery.py .nbs/events

The order is that of the queue: highest priority first, then oldest first. An event is acknowledged
only after it was acted on, so an agent that dies in the middle finds the rest, and the one it was
at, when it starts the next time.
"""

from __future__ import annotations

import os
import sys

from trunkline.files.conventions import own_handle, recover
from trunkline.files.event_file import Content

ACTIONS = {
    "task-blocked": "unblock or escalate",
    "task-complete": "read the result",
    "task-failed": "find the cause, retry or escalate",
    "chat-mention": "answer",
    "human-input": "answer first: a human is waiting",
    "chat-message": "read for context",
    "worker-died": "respawn or escalate",
    "config-change": "read config.yaml again",
    "heartbeat": "note that the source is alive",
}


def act(name: str, event: Content) -> None:
    kind, source = event.fields.get("type", name), event.fields.get("source", "unknown")
    print(f"{kind} from {source}: {ACTIONS.get(kind, 'look at it')}: {event.text}", flush=True)
    if os.environ.get("DIE_AT") == kind:
        os.abort()  # what a crash in the middle looks like; see the test of this example


def main(directory: str) -> int:
    # The spool lies in .nbs/events; the worker files that may name us lie beside it.
    handle = own_handle(os.path.dirname(os.path.abspath(directory)))
    handled = recover(directory, handle, act)
    if handled is None:
        print("no queue here: scan the chat and worker files instead")
        return 2
    print(f"{handle} is back, {len(handled)} events handled")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ".nbs/events"))
