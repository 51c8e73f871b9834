"""``python -m trunkline.broker``: the same as ``trunkline serve``."""

import sys

from trunkline.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
