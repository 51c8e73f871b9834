"""``topics.json``: the options of the topics that were defined, as far as they are not defaults.

Its last member is the CRC-32 of the bytes in front of it, under a name that no topic has: what is
kept, and for how long, must not hang on one bit. A file without it was written by hand.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

import msgspec

from trunkline.errors import Corrupt, InvalidOption, UnsupportedFormat, reason
from trunkline.options import TopicOptions, changed, make

_CRC = "__crc"
_TAIL = b',\n  "__crc": "%08x"\n}\n'


def read_raw(path: str) -> dict[str, dict[str, Any]]:
    with open(path, "rb") as file:
        data = file.read()
    try:
        stored: dict[str, Any] = msgspec.json.decode(data, type=dict[str, dict[str, Any] | str])
        if stored.pop(_CRC, None) is not None:
            head = data[: data.rfind(_TAIL[:2])]
            if data != head + _TAIL % crc32(head):
                raise Corrupt(
                    "topics.json is damaged: the checksum does not fit",
                    path=path,
                    position=0,
                    hint=f"put it back from a backup; if it was edited, take out {_CRC}",
                )
        return msgspec.convert(stored, dict[str, dict[str, Any]])
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
    text = msgspec.json.format(msgspec.json.encode(plain), indent=2)
    head = text.removesuffix(b"\n}")
    return text + b"\n" if head == text else head + _TAIL % crc32(head)
