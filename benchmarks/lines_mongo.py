"""The store in MongoDB beside bare pymongo, on one server that is a replica set of one.

Fairness. Both sides run in this process, on the same event loop and server, with the same write
concern: the majority, journaled. Ours makes events of Python values and encodes them; the bare side
is handed ready documents of the same values, and numbers nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import trunkline
from benchmarks.harness import TOPIC, MissingPeerError, Pair, Run, alternate, line, payloads
from trunkline.event import Event

sys.path.append(str(Path(__file__).parents[1] / "tests"))

_names = itertools.count(1)
HUNDRED = 100


@contextlib.asynccontextmanager
async def server(run: Run) -> AsyncIterator[str]:
    """The URL of a database on a server of this line's own, on the disk that is measured."""
    from kit.mongod import find_mongod, fresh_database, replica_set

    if find_mongod() is None:
        raise MissingPeerError("mongod: run make mongo")
    with replica_set(folder=run.fresh()) as (url, _):
        yield fresh_database(url)


Write = Callable[[], Awaitable[None]]


async def _rate(writes: Sequence[Write], seconds: float) -> float:
    """Events a second of writers that each await a hundred before the next hundred."""
    started = perf_counter()
    end = started + seconds

    async def writer(write: Write) -> int:
        count = 0
        while perf_counter() < end:
            await write()
            count += HUNDRED
        return count

    return sum(await asyncio.gather(*map(writer, writes))) / (perf_counter() - started)


async def _beside_bare(run: Run, writers: int) -> Pair:
    from pymongo import AsyncMongoClient, WriteConcern

    from trunkline.store.mongo import MongoStore

    rows = payloads(HUNDRED)
    async with server(run) as url, contextlib.AsyncExitStack() as stack:
        ours: list[Write] = []
        theirs: list[Write] = []
        for number in range(writers):
            store = MongoStore(url)
            stack.push_async_callback(store.close)
            client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(url)
            stack.push_async_callback(client.close)
            bare = client.get_default_database().get_collection(
                "bare", write_concern=WriteConcern("majority", j=True)
            )

            async def append(store: MongoStore = store) -> None:
                await store.append(TOPIC, [Event(topic=TOPIC, payload=row) for row in rows])

            async def insert(bare: Any = bare, number: int = number) -> None:
                await bare.insert_many([{"topic": TOPIC, "key": number, **row} for row in rows])

            ours.append(append)
            theirs.append(insert)

        return await alternate(run, lambda s: _rate(ours, s), lambda s: _rate(theirs, s))


@line("mongo-append-100", against="bare insert_many", unit="events/s", goal=">= 1.3")
async def mongo_append(run: Run) -> Pair:
    """One writer, a hundred events at a time, majority and journaled."""
    return await _beside_bare(run, 1)


@line("mongo-four-writers", against="four of bare insert_many", unit="events/s", goal=">= 0.6")
async def mongo_four(run: Run) -> Pair:
    """Four writers on one partition; the bare ones need no order among each other."""
    return await _beside_bare(run, 4)


async def _group(run: Run, members: int) -> tuple[float, list[int]]:
    """Records a second that the members of a group settle together, and each one's share."""
    count = run.count(10_000, 400)
    async with server(run) as url:
        async with trunkline.connect(url) as bus:
            for start in range(0, count, 1000):
                await bus.publish_many(TOPIC, list(range(start, min(start + 1000, count))))
        processes = [
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "benchmarks.lines_mongo", url, str(members)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            for _ in range(members)
        ]
        try:
            for process in processes:
                assert process.stdout is not None
                await asyncio.wait_for(process.stdout.readline(), 60)
            started = perf_counter()
            for process in processes:
                assert process.stdin is not None
                process.stdin.write(b"go\n")
            async with asyncio.timeout(120), trunkline.connect(url) as bus:
                while not await _is_settled(bus):  # noqa: ASYNC110 -- by other processes
                    await asyncio.sleep(0.05)
            took = perf_counter() - started
            answers = [await process.communicate(b"end\n") for process in processes]
        finally:
            for process in processes:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        return count / took, [json.loads(said) for said, _ in answers]


async def _is_settled(bus: trunkline.Bus) -> bool:
    found = await bus.groups(TOPIC, "billing")
    return bool(found) and not any(group.lag for group in found)


async def member(url: str) -> None:
    """One process of a group: it settles what it gets, and tells at the end how much that was."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    handled = 0
    policy = trunkline.GroupOptions(ordering="none")
    async with trunkline.connect(url) as bus:
        await bus.lag(TOPIC, "billing")  # it is connected
        print("ready", flush=True)
        await reader.readline()
        async with bus.subscribe(TOPIC, group="billing", policy=policy, max_inflight=100) as stream:

            async def work() -> None:
                nonlocal handled
                async for delivery in stream:
                    handled += 1
                    await delivery.ack()

            working = asyncio.ensure_future(work())
            await reader.readline()
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
    print(json.dumps(handled), flush=True)


def _tell(members: int, rate: float, shares: list[int]) -> None:
    print(
        f"group of {members}: {rate:,.0f} records/s, shares {min(shares)} to {max(shares)}",
        file=sys.stderr,
    )


async def _rates(run: Run, members: int) -> Pair:
    """The rate of a group of many beside that of one member; the shares are told besides."""
    many, shares = await _group(run, members)
    alone, whole = await _group(run, 1)
    _tell(members, many, shares)
    _tell(1, alone, whole)
    return Pair(many, alone)


async def _shares(run: Run, members: int) -> Pair:
    rate, shares = await _group(run, members)
    _tell(members, rate, shares)
    return Pair(min(shares), max(shares))


@line("mongo-group-2", against="one process", unit="records/s", goal=">= 0.2")
async def group_of_two(run: Run) -> Pair:
    """Two processes share a group on one partition."""
    return await _rates(run, 2)


@line("mongo-group-8", against="one process", unit="records/s", goal=">= 0.05")
async def group_of_eight(run: Run) -> Pair:
    """Eight processes share a group on one partition; all of them on the cores of one machine."""
    return await _rates(run, 8)


@line("mongo-share-2", against="the largest share", unit="records", goal=">= 0.25")
async def shares_of_two(run: Run) -> Pair:
    """The smallest share of two processes beside the largest."""
    return await _shares(run, 2)


@line("mongo-share-8", against="the largest share", unit="records", goal=">= 0.1")
async def shares_of_eight(run: Run) -> Pair:
    """The smallest share of eight processes beside the largest."""
    return await _shares(run, 8)


if __name__ == "__main__":
    asyncio.run(member(sys.argv[1]))
