"""The table of features in docs/nats.md is the one of the code."""

from __future__ import annotations

from pathlib import Path

import msgspec

from trunkline.bus.nats import FEATURES
from trunkline.features import Features

PAGE = Path(__file__).parents[2] / "docs" / "nats.md"


def table() -> str:
    """Each promise that differs from that of a bus in a folder."""
    folder = msgspec.structs.asdict(Features())
    rows = [
        f"| `{name}` | {folder[name]} | {value} |"
        for name, value in msgspec.structs.asdict(FEATURES).items()
        if value != folder[name]
    ]
    return "\n".join(["| promise | a folder | nats:// |", "|---|---|---|", *rows])


def test_the_page_has_the_features_of_the_code() -> None:
    assert f"<!-- features -->\n{table()}\n" in PAGE.read_text("utf-8")
