"""Payloads are sealed at rest: no file holds a plain one, and everything else works as before."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("joserfc")

import trunkline
from trunkline.cli import main
from trunkline.crypto.jwe import data_key, header_of, split_kid
from trunkline.crypto.keyring import KeyRing, new_wrapping_key
from trunkline.errors import Erased, InvalidEvent, InvalidOption, KeyMissing, Reject, WrongKey
from trunkline.event import Event
from trunkline.guard.vault import Vault
from trunkline.options import GroupOptions

CANARY = "the-canary-sings-at-dawn"
QUICK = GroupOptions(backoff_base_s=0.0, max_retries=1)


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    path = tmp_path / "secret" / "wrapping.key"
    path.parent.mkdir()
    path.write_text(new_wrapping_key())
    return KeyRing(tmp_path / "secret" / "keys", f"file:{path}", create=True)


def everything(*places: Path) -> bytes:
    files = [path for place in places for path in place.rglob("*") if path.is_file()]
    return b"".join(path.read_bytes() for path in files)


async def test_a_canary_is_in_no_file_of_bus_backup_bridge_or_log(
    ring: KeyRing, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    handled: list[Any] = []
    url = f"file:{tmp_path / 'bus'}"
    async with trunkline.connect(url, middleware=[Vault(ring)], audit=1.0) as bus:

        @bus.on("notes", group="reader", policy=QUICK)
        async def read(event: Event) -> None:
            handled.append(event.payload)
            if event.payload["fail"]:
                raise ValueError(f"cannot handle {event.payload}")

        for number in range(20):
            payload = {"text": CANARY, "fail": number % 5 == 0}
            await bus.publish("notes", payload, space="home", key=f"k{number}")
        await bus.publish_many("notes", [{"text": CANARY, "fail": False}] * 5, space="home")
        await bus.drain(20)
        letters = [one async for one in bus.dead_letters("notes").letters()]
        assert len(letters) == 4
        assert {one.error for one in letters} == {"HandlerFailed: ValueError: the text is withheld"}
        vault = Vault(ring)
        assert {vault.open(one.event).payload["text"] for one in letters} == {CANARY}
    assert all(one["text"] == CANARY for one in handled)
    backup = tmp_path / "backup.tar.gz"
    restored = tmp_path / "restored"
    for words in (["--url", url, "backup", str(backup)], ["restore", str(backup), str(restored)]):
        assert await asyncio.to_thread(main, words) == 0
    data = everything(tmp_path / "bus", restored)
    assert CANARY.encode() not in data
    assert CANARY not in caplog.text
    assert data.count(b'"space_id":"home"') >= 25  # meta stays readable
    assert b'"key":"k7"' in data
    async with trunkline.connect(f"file:{restored}") as bus:
        (first, *_) = await bus.read("notes")
        assert Vault(ring).open(first.event).payload["text"] == CANARY


async def test_the_bridge_carries_sealed_payloads_that_open_on_the_other_side(
    ring: KeyRing, tmp_path: Path
) -> None:
    url, far = f"file:{tmp_path / 'bus'}", f"file:{tmp_path / 'far'}"
    async with trunkline.connect(url, middleware=[Vault(ring)]) as bus:
        await bus.publish("notes", CANARY, space="home")
    assert await asyncio.to_thread(main, ["bridge", url, far]) == 0
    assert CANARY.encode() not in everything(tmp_path / "far")
    async with trunkline.connect(far) as bus:
        found = [r.event for topic in await bus.topics() for r in await bus.read(topic)]
    assert [Vault(ring).open(event).payload for event in found] == [CANARY]


async def crashed(
    url: str, ring: KeyRing, cycles: int, each: int
) -> AsyncIterator[tuple[str, str]]:
    """``(kid, nonce)`` of what was sealed over crashes: a bus is never closed, only abandoned."""
    for _ in range(cycles):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:

                async def write() -> None:
                    vault = Vault(KeyRing(ring.path, ring.source))
                    bus = trunkline.connect(url, middleware=[vault])
                    await bus.publish_many("notes", list(range(1, each + 1)), space="home")

                asyncio.new_event_loop().run_until_complete(write())
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, pid, 0))[1]) == 0
    async with trunkline.connect(url) as bus:
        records = await bus.read("notes", limit=cycles * each)
        for record in records:
            text = record.event.payload
            yield header_of(text).kid, text.split(".")[2]


@pytest.mark.parametrize(
    ("cycles", "each"),
    [(10, 100), pytest.param(100, 1000, marks=pytest.mark.slow)],
    ids=["quick", "whole"],
)
async def test_no_key_meets_a_nonce_twice_over_crashes(
    ring: KeyRing, tmp_path: Path, cycles: int, each: int
) -> None:
    ring.newest("home")
    keys = {key.id: key.secret for key in ring.keys_of("home")}
    derived: dict[str, bytes] = {}
    seen = set()
    count = 0
    async for kid, nonce in crashed(f"file:{tmp_path / 'bus'}", ring, cycles, each):
        if kid not in derived:
            key_id, salt = split_kid(kid)
            derived[kid] = data_key(keys[key_id], salt)
        seen.add((derived[kid], nonce))
        count += 1
    assert count == cycles * each
    assert len(seen) == count
    assert len(set(derived.values())) == cycles


async def test_streams_and_reads_open_what_the_vault_sealed(ring: KeyRing) -> None:
    vault = Vault(ring)
    async with trunkline.connect("memory:", middleware=[vault]) as bus:
        await bus.publish("notes", {"a": 1}, space="home")
        await bus.publish("notes", None, space="home", key="gone")
        (record, tombstone) = await bus.read("notes")
        assert isinstance(record.event.payload, str)
        assert vault.open_record(record).event.payload == {"a": 1}
        assert vault.open_record(record).event.headers == {}
        assert tombstone.event.payload is None
        async with bus.subscribe("notes", group="g") as deliveries:
            async for delivery in vault.opened(deliveries):
                assert delivery.event.payload == {"a": 1}
                await delivery.ack()
                break
        async with bus.subscribe("notes", group="g") as deliveries:
            async for delivery in deliveries:
                assert delivery.offset == 2
                break


async def test_without_the_key_nothing_is_read_and_nothing_is_lost(
    ring: KeyRing, tmp_path: Path
) -> None:
    url = f"file:{tmp_path / 'bus'}"
    async with trunkline.connect(url, middleware=[Vault(ring)]) as bus:
        await bus.publish("notes", CANARY, space="home")
    source = tmp_path / "other.key"
    source.write_text(new_wrapping_key())
    strange = KeyRing(tmp_path / "strange", f"file:{source}", create=True)
    async with trunkline.connect(url, middleware=[Vault(strange)]) as bus:

        @bus.on("notes", group="reader", policy=QUICK)
        async def read(event: Event) -> None:
            raise AssertionError("it was opened")

        await bus.drain(10)
        (letter,) = [one async for one in bus.dead_letters("notes").letters()]
        assert letter.error.startswith("KeyMissing")
        assert Vault(ring).open(letter.event).payload == CANARY
        (record,) = await bus.read("notes")
        with pytest.raises(KeyMissing):
            Vault(strange).open(record.event)
        assert Vault(ring).open(record.event).payload == CANARY


async def test_a_payload_that_was_moved_does_not_open(ring: KeyRing) -> None:
    vault = Vault(ring)
    one, two = (vault.seal(Event(topic="notes", payload=text, space="home")) for text in ("a", "b"))
    for swapped in (
        msgspec.structs.replace(one, payload=two.payload),
        msgspec.structs.replace(one, topic="other"),
        msgspec.structs.replace(one, payload="plain"),
    ):
        with pytest.raises(WrongKey):
            vault.open(swapped)
    assert vault.open(one).payload == "a"


async def test_a_key_is_rotated_while_the_bus_runs(ring: KeyRing) -> None:
    vault = Vault(ring)
    async with trunkline.connect("memory:", middleware=[vault]) as bus:
        await bus.publish("notes", 1, space="home")
        await bus.publish("notes", 2, space="home")
        ring.rotate("home")
        await bus.publish("notes", 3, space="home")
        records = await bus.read("notes")
        ids = [split_kid(record.event.headers["jwe"])[0] for record in records]
        assert ids[0] == ids[1] != ids[2]
        assert [vault.open(record.event).payload for record in records] == [1, 2, 3]


async def test_a_subject_has_its_own_key_and_an_erased_one_is_refused(ring: KeyRing) -> None:
    vault = Vault(ring, per="subject")
    handled: list[Any] = []
    async with trunkline.connect("memory:", middleware=[vault]) as bus:
        await bus.publish("notes", "of anna", space="home", subject="anna")
        await bus.publish("notes", "of ben", space="home", subject="ben")
        ring.shred("home", "anna")
        with pytest.raises(Erased):
            await bus.publish("notes", "more of anna", space="home", subject="anna")

        @bus.on("notes", group="reader", policy=QUICK)
        async def read(event: Event) -> None:
            handled.append(event.payload)

        await bus.drain(10)
        assert handled == ["of ben"]
        (letter,) = [one async for one in bus.dead_letters("notes").letters()]
        assert letter.reason == "rejected"


async def test_only_the_topics_that_are_named_are_sealed(ring: KeyRing) -> None:
    vault = Vault(ring, topics=["medical.>"])
    async with trunkline.connect("memory:", middleware=[vault]) as bus:
        await bus.publish("weather", {"t": 20})
        await bus.publish("medical.notes", {"t": 38})
        assert (await bus.read("weather"))[0].event.payload == {"t": 20}
        assert "jwe" in (await bus.read("medical.notes"))[0].event.headers


async def test_a_payload_that_is_no_json_is_refused_as_without_a_vault(ring: KeyRing) -> None:
    async with trunkline.connect("memory:", middleware=[Vault(ring)]) as bus:
        for bad in (float("nan"), object(), {"a": float("inf")}):
            with pytest.raises(InvalidEvent):
                await bus.publish("notes", bad)
        assert "notes" not in await bus.topics() or await bus.read("notes") == []
    with pytest.raises(InvalidOption):
        Vault(ring, per="person")  # type: ignore[arg-type]


@pytest.mark.parametrize("payload", ["CANARY plain", {"a": 1}, "a.b.c.d.e"])
async def test_a_plain_payload_that_claims_to_be_sealed_is_refused(
    ring: KeyRing, payload: Any, tmp_path: Path
) -> None:
    async with trunkline.connect(f"file:{tmp_path / 'bus'}", middleware=[Vault(ring)]) as bus:
        with pytest.raises(InvalidEvent, match="is not sealed"):
            await bus.publish("t", payload, headers={"jwe": "x"})
    assert b"CANARY" not in everything(tmp_path / "bus")


async def test_answers_and_refusals_are_sealed_and_guarded_like_their_questions(
    tmp_path: Path, ring: KeyRing
) -> None:
    from trunkline.patterns.replies import REPLIES, Refused, Requests, respond
    from trunkline.patterns.tasks import TaskQueue

    vault = Vault(ring, per="subject")
    fields: dict[str, Any] = {"space": "home", "subject": "anna", "band": "RED", "caps": ("x",)}
    async with trunkline.connect(f"file:{tmp_path / 'bus'}", middleware=[vault]) as bus:

        @respond(bus, "ask", group="g")
        async def answer(event: Event) -> str:
            if event.payload.endswith("no"):
                raise Reject(f"not {event.payload}")
            return f"yes, {event.payload}"

        async with Requests(bus, opened=vault.open) as requests:
            assert await requests.request("ask", f"{CANARY} 1", **fields) == f"yes, {CANARY} 1"
            with pytest.raises(Refused, match=f"not {CANARY} no"):
                await requests.request("ask", f"{CANARY} no", **fields)
        records = await bus.read(REPLIES)
        for record in records:
            told = record.event
            assert (told.space, told.subject, told.band, told.caps) == tuple(fields.values())
        queue = TaskQueue(bus, "jobs", opened=vault.open)

        async def work(task: Any) -> str:
            return f"done {task.payload}"

        async with queue:
            cancelled = await queue.enqueue("x", result=True)
            await cancelled.cancel()
            await queue.work(work)
            ticket = await queue.enqueue(CANARY, result=True)
            assert await ticket.result(10) == f"done {CANARY}"
            with pytest.raises(Refused, match="cancelled"):
                await cancelled.result(10)
    assert CANARY.encode() not in everything(tmp_path / "bus")
    ring.shred("home", "anna")
    with pytest.raises(Erased):
        vault.open(records[0].event)
