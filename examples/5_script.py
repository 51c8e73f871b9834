"""A script without asyncio: ``trunkline.open`` has the same calls, without ``await``."""

import sys

import trunkline


def main(url: str) -> None:
    with trunkline.open(url) as bus:
        bus.publish("jobs", {"do": "resize", "file": "a.png"}, priority="low")
        bus.publish("jobs", {"do": "page", "who": "on call"}, priority="critical")
        for delivery in bus.subscribe("jobs", group="worker", timeout_s=0.5):
            print(f"{delivery.event.priority}: {delivery.event.payload['do']}")
            delivery.ack()
        print(f"{len(bus.read('jobs'))} records stay in the log")


main(sys.argv[1] if len(sys.argv) > 1 else "file:.bus")
