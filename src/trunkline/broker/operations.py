"""What takes long over HTTP: each is a job with an id, progress, rate and cancel.

An answer is 202 with the job, unless ``Prefer: wait=SECONDS`` (RFC 7240) asks to wait for its end:
then it is 200 with the result as well, or the error.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.responses import Response

from trunkline.broker.dlq_pages import readable
from trunkline.broker.endpoints import desk_of, keys_of, known_topic, offset_of
from trunkline.broker.http import Ask, reply
from trunkline.broker.jobs import Job, JobState
from trunkline.broker.listing import show_group
from trunkline.delivery.deadletters import Desk
from trunkline.errors import Conflict, Denied, InvalidOption
from trunkline.names import check_topic

_WAIT = re.compile(r"(?:^|[,;\s])wait=(\d{1,4})(?:$|[,;\s])")

Work = Callable[[Job], Awaitable[None]]


async def _started(
    ask: Ask, kind: str, topic: str, work: Work, answer: Callable[[Job], dict[str, Any]]
) -> Response:
    job = ask.hub.jobs.start(kind, topic, ask.who.agent, work)
    found = _WAIT.search(ask.request.headers.get("prefer", ""))
    if found:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(int(found[1])):
                await job.ended.wait()
    if job.failure is not None:
        raise job.failure
    is_over = job.state is not JobState.RUNNING
    shown = {**(answer(job) if is_over else {}), "job": job.show()}
    response = reply(shown, 200 if is_over else 202)
    response.headers["location"] = f"/jobs/{job.id}"
    return response


# -- dead letters ----------------------------------------------------------------------------------


class Choice(msgspec.Struct, forbid_unknown_fields=True):
    group: str | None = None
    offsets: list[int] | None = None
    where: str | None = None
    dry_run: bool = False
    max_redrives: Annotated[int, Meta(ge=0, le=1000)] = 3
    rate: Annotated[float, Meta(gt=0, le=1_000_000)] | None = None  # letters a second


async def _choice(ask: Ask) -> tuple[Desk, Choice, str]:
    asked: Choice = await ask.json(Choice)
    name = check_topic(ask.path("topic"))
    ask.require("admin", name)
    return await desk_of(ask, name), asked, name


async def redrive(ask: Ask) -> Response:
    desk, asked, name = await _choice(ask)

    async def work(job: Job) -> None:
        async for one in desk.redrive(
            group=asked.group,
            offsets=None if asked.offsets is None else set(asked.offsets),
            where=readable(asked.where, partial(ask.hub.may_read, ask.who)),
            rate=asked.rate,
            dry_run=asked.dry_run,
            max_redrives=asked.max_redrives,
        ):
            job.step(refused=bool(one.refused))
            letter = one.letter
            job.keep(
                {"offset": letter.offset, "origin": letter.origin, "refused": one.refused or None}
            )
            if job.done % 100 == 0:
                await asyncio.sleep(0)  # others have their turn

    return await _started(ask, "redrive", name, work, lambda job: {"redriven": job.results})


async def drop_dead(ask: Ask) -> Response:
    desk, asked, name = await _choice(ask)

    async def work(job: Job) -> None:
        async for letter in desk.drop(
            group=asked.group,
            offsets=None if asked.offsets is None else set(asked.offsets),
            where=readable(asked.where, partial(ask.hub.may_read, ask.who)),
            dry_run=asked.dry_run,
        ):
            job.step()
            job.keep(letter.offset)

    return await _started(ask, "drop", name, work, lambda job: {"dropped": job.results})


# -- groups and topics -----------------------------------------------------------------------------


class Seek(msgspec.Struct, forbid_unknown_fields=True):
    to: str | Annotated[int, Meta(ge=0, le=2**62)]


async def seek_group(ask: Ask) -> Response:
    asked: Seek = await ask.json(Seek)
    keys = await keys_of(ask, "admin")
    to = str(asked.to)
    floors = [await offset_of(ask, key.topic, key.partition, to, "to") - 1 for key in keys]
    store = ask.hub.bus.store

    async def work(job: Job) -> None:
        job.total = len(keys)
        for key, floor in zip(keys, floors, strict=True):
            async with store.group(key) as group:
                group.seek(floor)
            store.bell.ring(key.topic)
            job.step()
        for key in keys:
            job.keep(await show_group(ask.hub.bus, key))
        ask.hub.groups_shown.forget()

    named = f"{keys[0].topic} as {keys[0].group}"
    return await _started(ask, "seek", named, work, lambda job: {"partitions": job.results})


class Purge(msgspec.Struct, forbid_unknown_fields=True):
    before: str | Annotated[int, Meta(ge=0, le=2**62)] = "latest"


async def purge_topic(ask: Ask) -> Response:
    """Remove records below an offset or a time, settled or not; the topic stays."""
    asked: Purge = await ask.json(Purge)
    name = await known_topic(ask, "admin")
    ask.hub.refuse_reserved(ask.who, "admin", name)
    count = (await ask.hub.bus.topics())[name].partitions
    before = [await offset_of(ask, name, n, str(asked.before), "before") for n in range(count)]
    store = ask.hub.bus.store

    async def work(job: Job) -> None:
        job.total = count
        for number, offset in enumerate(before):
            bounds = await store.trim(name, number, offset)
            job.step()
            job.keep({"partition": number, "first": bounds.first, "next": bounds.next})
        ask.hub.topics_shown.forget()

    return await _started(ask, "purge", name, work, lambda job: {"partitions": job.results})


async def compact_topic(ask: Ask) -> Response:
    """Keep the latest record of each key, now."""
    name = await known_topic(ask, "admin")
    ask.hub.refuse_reserved(ask.who, "admin", name)
    options = (await ask.hub.bus.topics())[name]
    store = ask.hub.bus.store
    if not store.features.compact_on_request:
        raise Conflict("this bus does not compact on request", code="unsupported")
    if not options.compact:
        raise InvalidOption(
            f"{name} is not compacted by key",
            name="compact",
            hint='POST /topics with {"topic": "…", "options": {"compact": true}}',
        )

    async def work(job: Job) -> None:
        job.total = options.partitions
        for number in range(options.partitions):
            gone = await store.compact(name, number)
            job.step()
            job.keep({"partition": number, "removed": gone})
        ask.hub.topics_shown.forget()

    return await _started(ask, "compact", name, work, lambda job: {"partitions": job.results})


# -- jobs ------------------------------------------------------------------------------------------


def _own(ask: Ask) -> Job:
    job = ask.hub.jobs.get(ask.path("job"))
    if not _may_see(ask, job):
        raise Denied("access denied", actor=ask.who.agent, action="admin", topic=job.topic)
    return job


def _may_see(ask: Ask, job: Job) -> bool:
    return ask.hub.allows(ask.who, "admin", job.topic.partition(" ")[0])


async def list_jobs(ask: Ask) -> Response:
    rows = [job.show() for job in ask.hub.jobs.all() if _may_see(ask, job)]
    return reply({"jobs": [{k: v for k, v in row.items() if k != "results"} for row in rows]})


async def get_job(ask: Ask) -> Response:
    return reply(_own(ask).show())


async def cancel_job(ask: Ask) -> Response:
    job = _own(ask)
    await ask.hub.jobs.cancel(job)
    return reply(job.show())
