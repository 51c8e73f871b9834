"""The write workflow and consolidation, on real buses."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

import trunkline
from trunkline.bus.local import LocalBus
from trunkline.cli import main
from trunkline.cognition.consolidation import ConsolidationRun, Consolidator, RecallQuestion
from trunkline.cognition.events import TOPIC, CognitiveType
from trunkline.cognition.memory import EPISODES, FACTS, REVIEW, RUNS, Memory, memory_id
from trunkline.cognition.options import MemoryOptions
from trunkline.cognition.writing import WriteHandler
from trunkline.errors import InvalidEvent
from trunkline.guard.redaction import Redactor
from trunkline.store.memory import MemoryStore
from trunkline.testing import ManualClock

NEVER = MemoryOptions(after_writes=None, after_s=None, idle_s=None)


def make_bus() -> tuple[LocalBus, ManualClock]:
    clock = ManualClock()
    return LocalBus(MemoryStore(clock=clock), clock=clock), clock


def passes(run: ConsolidationRun) -> dict[str, tuple[int, int, int]]:
    return {one.name: (one.kept, one.changed, one.forgotten) for one in run.passes}


def test_both_lists_of_types_have_a_topic_of_the_wiring_map() -> None:
    assert TOPIC.keys() == set(CognitiveType)
    wired = {"workspace", "hippo", "affect", "cortex", "actions", "prospective", "temporal"}
    assert set(TOPIC.values()) == wired


async def test_a_write_is_redacted_encoded_kept_and_accepted_once() -> None:
    bus, _ = make_bus()
    async with bus:
        writer = WriteHandler(bus, NEVER, redact=Redactor().redact)
        for _ in range(2):  # the second is a repetition
            done = await writer.write(
                "alice", {"mail": "ask bob@example.com"}, space="home", id="w1", actor="phone"
            )
        assert {one.duplicate for one in (done.encoded, done.episode, done.accepted)} == {True}
        (encoded,) = await bus.read("hippo")
        (episode,) = await bus.read(EPISODES)
        (accepted,) = await bus.read("temporal")
    assert encoded.event.type == "HIPPO_ENCODE"
    assert encoded.event.payload["content"] == {"mail": "ask [email]"}
    assert encoded.event.band == episode.event.band == "AMBER"
    assert episode.event.payload["encoded"] == {"topic": "hippo", "partition": 0, "offset": 1}
    assert accepted.event.type == "WRITE_ACCEPTED"
    assert accepted.event.cause == encoded.event.id
    text = msgspec.json.encode([encoded, episode, accepted])
    assert b"bob@" not in text


async def test_a_write_needs_a_space_a_subject_and_a_confidence() -> None:
    bus, _ = make_bus()
    async with bus:
        writer = WriteHandler(bus, NEVER)
        wrong: list[dict[str, Any]] = [
            {"subject": "a", "space": None},
            {"subject": "", "space": "home"},
            {"subject": "a", "space": "home", "confidence": 2},
        ]
        for one in wrong:
            with pytest.raises(InvalidEvent):
                await writer.write(content=1, **one)
        assert await bus.topics() == {}


async def test_consolidation_dedupes_merges_promotes_and_supersedes() -> None:
    bus, clock = make_bus()
    async with bus:
        writer = WriteHandler(bus, NEVER)
        mind = writer.consolidator
        for content in ({"likes": "tea"}, {"likes": "tea"}, {"lives": "Oslo"}):
            await writer.write("alice", content, space="home")
            clock.advance(1)
        run = await mind.run()
        (memory,) = mind.view.recall("alice", "home")
        assert memory.content == {"likes": "tea", "lives": "Oslo"}
        assert [one.offset for one in memory.sources] == [1, 2, 3]
        assert memory.confidence == pytest.approx(0.8)
        assert (memory.state, memory.invalid_at, memory.expired_at) == ("active", None, None)
        assert passes(run) == {
            "dedupe": (2, 1, 0),
            "merge": (1, 1, 0),
            "promote": (0, 1, 0),
            "forget": (1, 0, 0),
        }
        again = await mind.run()
        assert passes(again)["promote"] == (0, 0, 0), "a second run changes nothing"
        assert list(mind.view) == [memory]

        await writer.write("alice", {"lives": "Rome"}, space="home")
        run = await mind.run()
        assert run.ok
        (new,) = mind.view.recall("alice", "home")
        old = mind.view.get(memory.id)
        assert old is not None
        assert new.content == {"lives": "Rome"}
        assert new.supersedes == old.id
        assert (old.state, old.invalid_at, old.expired_at) == ("superseded", new.valid_at, run.at)
        assert mind.view.recall("alice", "work") == []
        (first, second, third) = [record.event for record in await bus.read(RUNS)]
        assert [first.payload["last"], second.payload["last"], third.payload["last"]] == [3, 3, 4]
        assert any("supersedes" in reason for reason in third.payload["passes"][2]["reasons"])


async def test_a_run_over_the_same_episodes_makes_the_same_memories() -> None:
    """Property: whatever was written, a second mind that starts over finds the same."""
    for seed in range(15):
        chance = random.Random(seed)
        bus, clock = make_bus()
        async with bus:
            writer = WriteHandler(bus, NEVER)
            for _ in range(chance.randrange(1, 25)):
                content = {chance.choice("ab"): chance.randrange(3)}
                sure = chance.choice([0.3, 0.6, 0.9])
                await writer.write(chance.choice("xyz"), content, space="s", confidence=sure)
                clock.advance(chance.randrange(3))
                if chance.random() < 0.2:
                    assert (await writer.consolidator.run()).ok
            run = await writer.consolidator.run()
            assert run.ok
            ids = {one.id: one for one in writer.consolidator.view}
            once_more = Consolidator(bus, NEVER)
            run = await once_more.run()
            assert run.ok
            assert {one.id: one for one in once_more.view} == ids
            for memory in ids.values():
                assert memory.sources
                assert (memory.state == "superseded") == (memory.expired_at is not None)
            live = [one for one in ids.values() if one.is_live]
            for one in live:
                assert writer.consolidator.view.recall(one.subject, "s")


async def test_a_memory_is_forgotten_with_a_tombstone_and_the_recall_is_checked() -> None:
    bus, clock = make_bus()
    questions: list[RecallQuestion] = []
    async with bus:
        mind = Consolidator(bus, NEVER, questions=lambda: questions)
        writer = WriteHandler(bus, NEVER, consolidator=mind)
        await writer.write("tap", {"drips": True}, space="home", confidence=0.6)
        await writer.write("door", {"open": True}, space="home", confidence=1.0)
        await mind.run()
        clock.advance(30 * 86_400 * 15)  # power: 1 / 16
        questions += [
            RecallQuestion("door", {"open": True}, "home"),
            RecallQuestion("tap", {"drips": True}, "home", absent=True),
        ]
        run = await mind.run()
        assert passes(run)["forget"] == (1, 0, 1)
        assert run.ok
        last = (await bus.read(FACTS))[-1].event
        assert last.payload is None, "a tombstone"
        questions.append(RecallQuestion("tap", {"drips": True}, "home"))
        run = await mind.run()
        assert run.missing == ["tap"]
        (door,) = mind.view.recall("door", "home")
        assert await mind.revoke(door.id)
        assert not await mind.revoke(door.id)
        assert mind.view.recall("door", "home") == []
        revoked = mind.view.get(door.id)
        assert revoked is not None
        assert revoked.state == "revoked"


async def test_low_confidence_waits_for_review_by_the_dead_letter_tools(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file:{tmp_path / 'bus'}"
    async with trunkline.connect(url) as bus:
        mind = Consolidator(bus, NEVER)
        mind.review()
        writer = WriteHandler(bus, NEVER, consolidator=mind)
        await writer.write("alice", {"likes": "tea"}, space="home", confidence=0.9)
        await mind.run()
        await writer.write("alice", {"likes": "mud"}, space="home", confidence=0.2)
        await writer.write("carol", {"age": 7}, space="home", confidence=0.3)
        await mind.run()
        assert await bus.drain(20)
        letters = [one async for one in bus.dead_letters(REVIEW).letters()]
        assert [one.event.payload["state"] for one in letters] == ["conflict_pending", "active"]
        assert "review: conflict_pending, confidence 0.20" in letters[0].error
        assert mind.view.recall("carol", "home") == []

        assert await asyncio.to_thread(main, ["dlq", "ls", REVIEW, "--url", url]) == 0
        assert "confidence 0.20" in capsys.readouterr().out
        refuse = ["dlq", "drop", REVIEW, str(letters[0].offset), "--yes", "--url", url]
        assert await asyncio.to_thread(main, refuse) == 0
        accept = ["dlq", "redrive", REVIEW, str(letters[1].offset), "--url", url]
        assert await asyncio.to_thread(main, accept) == 0
        for _ in range(200):
            await mind.view.refresh()
            if mind.view.recall("carol", "home"):
                break
            await asyncio.sleep(0.05)
        assert [one.content for one in mind.view.recall("carol", "home")] == [{"age": 7}]
        assert [one.content for one in mind.view.recall("alice", "home")] == [{"likes": "tea"}]
        assert await bus.drain(20)


@pytest.mark.parametrize(
    ("options", "wait_s", "reason"),
    [
        (MemoryOptions(after_writes=3, after_s=None, idle_s=None), 0, "3 writes"),
        (MemoryOptions(after_writes=None, after_s=9.0, idle_s=None), 10, "9 s since the first"),
        (MemoryOptions(after_writes=None, after_s=None, idle_s=5.0), 6, "idle for 5 s"),
    ],
)
async def test_consolidation_is_triggered_by_count_time_or_idleness(
    options: MemoryOptions, wait_s: float, reason: str
) -> None:
    bus, clock = make_bus()
    told: list[str] = []

    async def spark(trigger: str) -> None:
        told.append(trigger)

    async with bus:
        writer = WriteHandler(bus, options, spark=spark)
        for n in range(3):
            assert told == []
            await writer.write(f"s{n}", {"n": n}, space="home")
            await clock.run(1)
        await clock.run(wait_s)
        await writer.settle()
        assert writer.runs == 1
        assert len(list(writer.consolidator.view)) == 3
        (fired,) = await bus.read("prospective")
    assert fired.event.type == "TRIGGER_FIRED"
    assert fired.event.payload["reason"].startswith(reason)
    assert told == [fired.event.payload["reason"]]


async def test_writes_come_from_a_topic_too() -> None:
    bus, clock = make_bus()
    async with bus:
        writer = WriteHandler(bus, NEVER)
        writer.on("ingest", group="writer")
        await bus.publish("ingest", {"subject": "a", "content": 1, "confidence": 0.9}, space="s")
        await bus.publish("ingest", {"no": "subject"}, space="s")
        while not await bus.read(EPISODES):
            await clock.run(0)
        (episode,) = await bus.read(EPISODES)
    assert episode.event.payload["confidence"] == 0.9


async def test_a_memory_demands_what_its_sources_demand() -> None:
    bus, _ = make_bus()
    async with bus:
        writer = WriteHandler(bus, NEVER, redact=Redactor().redact)
        await writer.write("alice", {"pays": "4111 1111 1111 1111"}, space="home")
        for band, caps in (("GREEN", ("b",)), ("AMBER", ("a",))):
            await writer.write("bob", {"likes": "tea"}, space="home", band=band, caps=caps)
        writer.on("writes", group="writer")
        said = {"subject": "carol", "content": {"likes": "rum"}}
        await bus.publish("writes", said, space="home", band="RED", caps=("ward",))
        await bus.drain(10)
        await writer.consolidator.run()
        facts = {record.event.subject: record.event for record in await bus.read(FACTS)}
    assert {name: (one.band, one.caps) for name, one in facts.items()} == {
        "alice": ("RED", ("pci",)),
        "bob": ("AMBER", ("a", "b")),
        "carol": ("RED", ("ward",)),
    }


async def test_an_erased_subject_is_forgotten_and_the_others_are_consolidated(
    tmp_path: Path,
) -> None:
    """Also by a process that had read its memories before, and no id tells of them."""
    pytest.importorskip("joserfc")
    from trunkline.crypto.keyring import KeyRing, new_wrapping_key
    from trunkline.guard.vault import Vault

    (tmp_path / "wrapping").write_text(new_wrapping_key())
    ring = KeyRing(tmp_path / "keys", f"file:{tmp_path / 'wrapping'}", create=True)
    vault = Vault(ring, per="subject")
    bus, _ = make_bus()
    bus.use(vault)
    async with bus:
        known = Consolidator(bus, NEVER, opened=vault.open, secret=vault.secret)
        writer = WriteHandler(bus, NEVER, consolidator=known)
        for name in ("alice", "bob"):
            await writer.write(name, {"likes": "tea"}, space="home")
        await known.run()
        ids = {record.event.key for record in await bus.read(FACTS)}
        assert not ids & {memory_id("home", name, {"likes": "tea"}) for name in ("alice", "bob")}
        ring.rotate("home", "bob")
        for name in ("bob", "alice"):
            await writer.write(name, {"likes": "tea"}, space="home")
        ring.shred("home", "alice")
        for consolidator in (known, Consolidator(bus, NEVER, opened=vault.open)):
            run = await consolidator.run()
            assert run.ok
            (memory,) = consolidator.view
            assert (memory.subject, len(memory.sources)) == ("bob", 2)
        assert await known.waiting() == 0


def test_memory_values_are_plain_json() -> None:
    fields = {field.name for field in msgspec.structs.fields(Memory)}
    wanted = {"sources", "supersedes", "valid_at", "invalid_at", "created_at", "expired_at"}
    assert wanted | {"state", "confidence"} <= fields


async def test_episodes_that_an_earlier_process_left_are_consolidated() -> None:
    bus, clock = make_bus()
    async with bus:
        await WriteHandler(bus, NEVER).write("alice", {"likes": "tea"}, space="home")
        options = MemoryOptions(after_writes=None, after_s=None, idle_s=5.0)
        writer = WriteHandler(bus, options)
        assert await writer.resume() == 1
        await clock.run(6)
        await writer.settle()
        assert len(writer.consolidator.view.recall("alice", "home")) == 1
        assert await writer.consolidator.waiting() == 0
