"""A client of the chaos run, in a process of its own: a program that may die at any line.

::

    python -m broker.chaos_client publish PORT JOURNAL NAME
    python -m broker.chaos_client each|tenth|throw PORT JOURNAL NAME

It needs the standard library alone, so that it is back soon after a kill. It writes each step to
its journal before it goes on. What the styles do:

- ``each`` acks each record for itself (``ack: "each"``);
- ``tenth`` acks every tenth with ``ack: "upto"``, and the last one when nothing more comes;
- ``throw`` acks each with ``ack: "upto"``, and fails every seventh record once.

All of them fail on records that are marked as poison.
"""

from __future__ import annotations

import base64
import json
import os
import random
import select
import signal
import socket
import struct
import sys
import time
from collections import deque
from time import monotonic
from typing import Any

KEYS = {"keys-1": 1, "keys-10": 10, "keys-1000": 1000, "keys-none": 0}
POLICY = {"ack_timeout_s": 4.0, "max_retries": 5, "backoff_base_s": 0.02, "backoff_max_s": 0.5}
WINDOW = 32
IDLE_S = 0.2
BATCH = 8
POISON_EVERY = 400
THROW_EVERY = 7


class Gone(Exception):
    """The connection ended."""


class Journal:
    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)

    def write(self, *steps: Any) -> None:
        if steps:
            os.write(self._fd, b"".join(json.dumps(step).encode() + b"\n" for step in steps))


class Wire:
    """A WebSocket that reads nothing ahead of its caller."""

    def __init__(self, port: int) -> None:
        try:
            self._socket = socket.create_connection(("127.0.0.1", port), timeout=20)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            key = base64.b64encode(os.urandom(16)).decode()
            self._socket.sendall(
                f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\n"
                f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\n"
                "Sec-WebSocket-Version: 13\r\n\r\n".encode()
            )
            self._data = b""
            while b"\r\n\r\n" not in self._data:
                self._more()
        except OSError as error:
            raise Gone from error
        head, _, self._data = self._data.partition(b"\r\n\r\n")
        if b" 101 " not in head:
            raise Gone(head)
        self.idle_at = monotonic()

    def say(self, *frames: dict[str, Any]) -> None:
        self._put(*((0x81, json.dumps(frame).encode()) for frame in frames))

    def close(self) -> None:
        self._put((0x88, struct.pack(">H", 1000)))
        self._socket.close()

    def _put(self, *messages: tuple[int, bytes]) -> None:
        out = bytearray()
        for code, data in messages:
            size = len(data)
            out += (
                bytes([code, 0x80 | size]) if size < 126 else struct.pack(">BBH", code, 254, size)
            )
            out += b"\0\0\0\0" + data
        try:
            self._socket.sendall(out)
        except OSError as error:
            raise Gone from error

    def hear(self, wait_s: float) -> list[dict[str, Any]]:
        """The frames that are there, after a wait for the first; none if none came."""
        if not select.select([self._socket], [], [], 0)[0]:
            self.idle_at = monotonic()
            if not select.select([self._socket], [], [], wait_s)[0]:
                return []
        self._more()
        found = []
        while (one := self._next()) is not None:
            code, data = one
            if code == 1:
                found.append(json.loads(data))
            elif code == 9:
                self._put((0x8A, data))
            elif code == 8:
                raise Gone(data)
        return found

    def _more(self) -> None:
        try:
            data = self._socket.recv(1 << 16)
        except OSError as error:
            raise Gone from error
        if not data:
            raise Gone
        self._data += data

    def _next(self) -> tuple[int, bytes] | None:
        data = self._data
        if len(data) < 2:
            return None
        size, at = data[1] & 127, 2
        if size == 126:
            size, at = int.from_bytes(data[2:4], "big"), 4
        elif size == 127:
            size, at = int.from_bytes(data[2:10], "big"), 10
        if len(data) < at + size:
            return None
        self._data = data[at + size :]
        return data[0] & 15, data[at : at + size]


class Consumer:
    """One connection that works on records in the order in which they came."""

    def __init__(self, style: str, wire: Wire, journal: Journal, client: str) -> None:
        self.style = style
        self.wire = wire
        self.journal = journal
        self.client = client
        self.inbox: deque[dict[str, Any]] = deque()
        self.open: dict[str, list[int]] = {topic: [] for topic in KEYS}  # in the order of frames
        self.unacked: dict[str, list[int]] = {topic: [] for topic in KEYS}  # worked
        self.until: dict[tuple[str, int], float] = {}  # for how long each is leased for certain
        self.asked: dict[int, tuple[str, list[int]]] = {}  # acks without an answer
        self.corr = 0
        self.rng = random.Random()

    def subscribe(self) -> None:
        ack = "each" if self.style == "each" else "upto"
        for topic in KEYS:
            self.wire.say(
                {"type": "SUBSCRIBE", "topic": topic, "group": self.style, "ack": ack}
                | {"from": {"kind": "earliest"}, "max_inflight": WINDOW, "policy": POLICY}
            )

    def turn(self) -> None:
        """Read what is there and work on one record."""
        self.read(0 if self.inbox else IDLE_S)
        if not self.inbox:
            for topic in KEYS:
                self.ack(topic)
            return
        message = self.inbox.popleft()
        topic, offset = message["topic"], message["offset"]
        time.sleep(self.rng.random() * 0.002)
        payload = message["envelope"]["payload"]
        once = self.style == "throw" and payload["n"] % THROW_EVERY == 0 and message["attempt"] == 1
        if payload["poison"] or once:
            self.open[topic].remove(offset)
            self.wire.say({"type": "NACK", "reason": "thrown", **self.place(topic, offset)})
            return
        self.journal.write(["worked", monotonic(), self.client, self.style, topic, offset])
        self.unacked[topic].append(offset)
        if len(self.unacked[topic]) >= (10 if self.style == "tenth" else 1):
            self.ack(topic)

    def read(self, wait_s: float) -> None:
        steps = []
        for frame in self.wire.hear(wait_s):
            now = monotonic()
            if frame["type"] == "MESSAGE":
                topic, offset = frame["topic"], frame["offset"]
                self.drop(topic, offset)
                self.open[topic].append(offset)
                self.until[topic, offset] = self.wire.idle_at + frame["lease_s"]
                self.inbox.append(frame)
                place = (self.client, self.style, topic, offset)
                steps.append(["got", now, *place, frame["attempt"], self.wire.idle_at])
            elif frame["type"] == "OK" and frame.get("corr") in self.asked:
                topic, offsets = self.asked.pop(frame["corr"])
                # An ack after the lease may settle nothing; of some, it is not known which.
                is_leased = all(now < self.until[topic, offset] for offset in offsets)
                if is_leased and frame["count"] == len(offsets):
                    where = (self.client, self.style, topic)
                    steps += [["settled", now, *where, offset] for offset in offsets]
            elif frame["type"] == "ERROR":
                steps.append(["error", now, self.client, self.style, json.dumps(frame), 0])
        self.journal.write(*steps)

    def drop(self, topic: str, offset: int) -> None:
        """Forget an older frame of the record: its lease was over."""
        if offset in self.open[topic]:
            self.open[topic].remove(offset)
            self.unacked[topic] = [one for one in self.unacked[topic] if one != offset]
            stale = [one for one in self.inbox if (one["topic"], one["offset"]) == (topic, offset)]
            for one in stale:
                self.inbox.remove(one)

    def ack(self, topic: str) -> None:
        if not (worked := self.unacked[topic]):
            return
        last, held = worked[-1], self.open[topic]
        covered = [last]
        if self.style != "each" and last in held:
            covered = [one for one in held[: held.index(last) + 1] if one <= last]
        self.open[topic] = [one for one in held if one not in covered]
        self.unacked[topic] = [one for one in worked if one not in covered]
        self.corr += 1
        self.asked[self.corr] = topic, covered
        self.wire.say({"type": "ACK", "corr": self.corr, **self.place(topic, last)})

    def place(self, topic: str, offset: int) -> dict[str, Any]:
        return {"topic": topic, "partition": 0, "group": self.style, "offset": offset}


def publish(wire: Wire, journal: Journal, name: str, numbers: list[int]) -> None:
    """A batch of single publishes; it is over when each has its answer."""
    asked: dict[int | None, tuple[str, str]] = {}
    for _ in range(BATCH):
        numbers[0] += 1
        n = numbers[0]
        topic = list(KEYS)[n % len(KEYS)]
        payload = {"n": n, "name": f"{name}-{n}", "poison": n // len(KEYS) % POISON_EVERY == 50}
        frame = {"type": "PUBLISH", "topic": topic, "corr": n, "payload": payload}
        if KEYS[topic]:
            frame["key"] = f"k{random.randrange(KEYS[topic])}"
        asked[n] = topic, f"{name}-{n}"
        wire.say(frame)
    deadline = monotonic() + 30
    while asked and monotonic() < deadline:
        for answer in wire.hear(1):
            topic, event = asked.pop(answer.get("corr"), ("", ""))
            if answer["type"] == "PUBLISHED":
                journal.write(["accepted", topic, answer["offset"], event])
    time.sleep(0.05)


def main(style: str, port: int, path: str, name: str) -> None:
    journal = Journal(path)
    ending: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: ending.append(1))
    numbers = [0]
    connections = 0
    while not ending:
        try:
            wire = Wire(port)
            connections += 1
            if style == "publish":
                while not ending:
                    publish(wire, journal, name, numbers)
            else:
                consumer = Consumer(style, wire, journal, f"{name}.{connections}")
                consumer.subscribe()
                while not ending:
                    consumer.turn()
                for topic in KEYS:
                    consumer.ack(topic)
            wire.close()
        except Gone:
            time.sleep(0.1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
