"""``trunkline sub --exec``: one command for each event, whose exit code settles it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys

from trunkline.bus import Delivery, Outcome
from trunkline.cli.render import to_json, to_time

RETRY = 75  # EX_TEMPFAIL of sysexits.h
_VALUE_BYTES = 32_768  # a longer value would keep the command from starting
_NOT_A_NAME = re.compile(r"[^A-Z0-9]+")


def environment(delivery: Delivery, url: str) -> dict[str, str]:
    """What a command is told of an event beside its payload. A value that no environment can
    hold is left out.
    """
    event = delivery.event
    found = {
        "EVENT_TOPIC": event.topic,
        "EVENT_PARTITION": str(delivery.partition),
        "EVENT_OFFSET": str(delivery.offset),
        "EVENT_ATTEMPT": str(delivery.attempt),
        "EVENT_GROUP": delivery.group,
        "EVENT_ID": event.id,
        "EVENT_TS": to_time(event.ts),
        "EVENT_KEY": event.key or "",
        "EVENT_TYPE": event.type or "",
        "EVENT_HEADERS": to_json(event.headers),
    }
    for name, value in event.headers.items():
        found.setdefault("EVENT_HEADER_" + _NOT_A_NAME.sub("_", name.upper()), value)
    fits = {
        name: value
        for name, value in found.items()
        if "\0" not in value and len(value.encode("utf-8", "surrogatepass")) <= _VALUE_BYTES
    }
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("EVENT_")}
    return {**inherited, "TRUNKLINE_URL": url, **fits}


async def run_for(command: str, delivery: Delivery, url: str) -> None:
    """Run ``command`` by the shell with the payload on its stdin, and settle the delivery."""
    try:
        process = await asyncio.create_subprocess_shell(
            command, stdin=asyncio.subprocess.PIPE, env=environment(delivery, url)
        )
    except OSError as error:
        _failed(delivery, f"the command did not start: {error.strerror}")
        return
    await process.communicate((to_json(delivery.event.payload) + "\n").encode())
    code = process.returncode or 0
    if code == 0:
        delivery.finish(Outcome.ACK)
    elif code == RETRY:
        delivery.finish(Outcome.NACK, None, f"exit code {RETRY}: try again")
    elif code < 0:
        _failed(delivery, f"the command was ended by {signal.Signals(-code).name}")
    else:
        _failed(delivery, f"exit code {code}")


def _failed(delivery: Delivery, reason: str) -> None:
    place = f"{delivery.topic}/{delivery.partition}@{delivery.offset}"
    print(f"trunkline: {place} attempt {delivery.attempt}: {reason}", file=sys.stderr, flush=True)
    delivery.finish(Outcome.NACK, None, reason)
