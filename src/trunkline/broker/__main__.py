"""``python -m trunkline.broker``: the same as ``trunkline serve``."""

import sys

from trunkline.cli import VERBS, main

if __name__ == "__main__":
    VERBS.setdefault("serve", ("serve", "run the broker"))
    sys.exit(main(["serve", *sys.argv[1:]]))
