"""The table of features in docs/mongodb.md is the one of the code."""

from __future__ import annotations

from pathlib import Path

import msgspec

from trunkline.features import Features
from trunkline.store.mongo.store import FEATURES

PAGE = Path(__file__).parents[2] / "docs" / "mongodb.md"


def test_the_page_has_the_features_of_the_code() -> None:
    folder = msgspec.structs.asdict(Features())
    rows = [
        f"| `{name}` | {folder[name]} | {value} |"
        for name, value in msgspec.structs.asdict(FEATURES).items()
        if value != folder[name]
    ]
    table = "\n".join(["| promise | a folder | mongodb:// |", "|---|---|---|", *rows])
    assert f"<!-- features -->\n{table}\n" in PAGE.read_text("utf-8")
