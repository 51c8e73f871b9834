"""A program to be killed: it merges the small files of a table each time it is given a line."""

from __future__ import annotations

import sys

from trunkline.spark.lake import Lake
from trunkline.spark.lake.optimize import optimize


def main(place: str, table: str) -> None:
    print("ready", flush=True)
    for _ in sys.stdin:
        print(optimize(Lake(place), table, many=2), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
