"""``topics.json``: the options of the topics that were defined, as far as they are not defaults."""

from __future__ import annotations

from typing import Any

import msgspec

from trunkline.errors import Corrupt, InvalidOption, UnsupportedFormat, reason
from trunkline.options import TopicOptions, changed, make


def read_raw(path: str) -> dict[str, dict[str, Any]]:
    with open(path, "rb") as file:
        data = file.read()
    try:
        return msgspec.json.decode(data, type=dict[str, dict[str, Any]])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        said = f"topics.json is damaged: {reason(error)}"
        raise Corrupt(said, path=path, position=0) from error


def read(path: str) -> dict[str, TopicOptions]:
    try:
        return {name: make(TopicOptions, values) for name, values in read_raw(path).items()}
    except InvalidOption as error:
        raise UnsupportedFormat(
            f"topics.json: {error.message}",
            path=path,
            hint="a newer version wrote it, or it was edited: upgrade, or mend it",
        ) from error


def encode(topics: dict[str, TopicOptions]) -> bytes:
    plain = {name: changed(options) for name, options in sorted(topics.items())}
    return msgspec.json.format(msgspec.json.encode(plain), indent=2) + b"\n"
