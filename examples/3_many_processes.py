"""Several processes on one folder: two publish, three share the work of one group.

There is no server. Each process opens the folder, as it would open a file.
"""

import multiprocessing
import sys
import time
from collections import Counter
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier

import trunkline

ORDERS = 200


def publish(url: str, together: Barrier, name: str) -> None:
    with trunkline.open(url) as bus:
        together.wait()
        for start in range(0, ORDERS, 20):
            batch = [{"from": name, "number": start + n} for n in range(20)]
            bus.publish_many("shared.orders", batch)


def work(url: str, together: Barrier, results: "Queue[list[int]]") -> None:
    with trunkline.open(url) as bus:
        together.wait()
        done = []
        for delivery in bus.subscribe(
            "shared.orders", group="billing", max_inflight=5, timeout_s=1.5
        ):
            time.sleep(0.001)  # the work
            delivery.ack()
            done.append(delivery.offset)
        results.put(done)


def main(url: str) -> None:
    context = multiprocessing.get_context("spawn")
    together = context.Barrier(5)
    results: Queue[list[int]] = context.Queue()
    processes = [
        *(context.Process(target=publish, args=(url, together, name)) for name in ("ann", "ben")),
        *(context.Process(target=work, args=(url, together, results)) for _ in range(3)),
    ]
    for process in processes:
        process.start()
    shares = [results.get(timeout=60) for _ in range(3)]
    for process in processes:
        process.join()

    times = Counter(offset for share in shares for offset in share)
    print(f"published {2 * ORDERS}, handled {len(times)}")
    print(
        f"offsets {min(times)} to {max(times)}, each delivered once: {set(times.values()) == {1}}"
    )
    print(f"shares of the three workers: {sorted(map(len, shares))}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "file:.bus")
