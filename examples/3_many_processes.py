"""Several processes on one folder: two publish, three share the work of one group.

There is no server. Each process opens the folder, as it would open a file.
"""

import asyncio
import multiprocessing
import sys
from collections import Counter

import trunkline

ORDERS = 200


def publish(url: str, name: str) -> None:
    with trunkline.open(url) as bus:
        for start in range(0, ORDERS, 20):
            batch = [{"from": name, "number": start + n} for n in range(20)]
            bus.publish_many("orders", batch)


def work(url: str, results: "multiprocessing.Queue[list[int]]") -> None:
    with trunkline.open(url) as bus:
        done = []
        for delivery in bus.subscribe("orders", group="billing", max_inflight=10, timeout_s=1.0):
            delivery.ack()
            done.append(delivery.offset)
        results.put(done)


async def floor_of(url: str) -> int:
    async with trunkline.connect(url) as bus:
        key = (await bus.store.groups())[0]
        return await bus.store.update(key, lambda group: group.floor)


def main(url: str) -> None:
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[list[int]] = context.Queue()
    makers = [context.Process(target=publish, args=(url, name)) for name in ("anna", "ben")]
    workers = [context.Process(target=work, args=(url, results)) for _ in range(3)]
    for process in [*makers, *workers]:
        process.start()
    shares = [results.get(timeout=60) for _ in workers]
    for process in [*makers, *workers]:
        process.join()

    times = Counter(offset for share in shares for offset in share)
    print(f"published {2 * ORDERS}, handled {len(times)} records, {sum(times.values())} deliveries")
    print(f"offsets {min(times)} to {max(times)}, every worker had some: {all(shares)}")
    print(f"the group has settled everything up to offset {asyncio.run(floor_of(url))}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "file:.bus")
