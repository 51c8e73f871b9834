"""``topics.json``: the options of the topics that were defined, as far as they are not defaults.

Its last member is the CRC-32 of the bytes in front of it, under a name that no topic has: what is
kept, and for how long, must not hang on one bit. A file without it was written by hand.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any
from zlib import crc32

import msgspec

from trunkline.errors import Corrupt, InvalidOption, UnsupportedFormat
from trunkline.explain import reason
from trunkline.log import atomic
from trunkline.log.line import Damaged, decode
from trunkline.options import TopicOptions, changed, make

_CRC = "__crc"
_decode = msgspec.json.Decoder(dict[str, dict[str, Any] | str]).decode
_encode = msgspec.json.Encoder(order="deterministic").encode
_decode_values = msgspec.json.Decoder(dict[str, Any]).decode
_TAIL = b',\n  "__crc": "%08x"\n}\n'


def read_raw(path: str) -> dict[str, dict[str, Any]]:
    data = atomic.read_file(path)
    try:
        stored: dict[str, Any] = decode(_decode, data)
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
    except (Damaged, msgspec.ValidationError) as error:
        said = f"topics.json is damaged: {reason(error)}"
        raise Corrupt(said, path=path, position=0) from error


@lru_cache(maxsize=1024)
def _made(values: bytes) -> TopicOptions:
    """Many topics have the same options, and all are read with each that is defined."""
    return make(TopicOptions, _decode_values(values))


def read(path: str) -> dict[str, TopicOptions]:
    try:
        return {name: _made(_encode(values)) for name, values in read_raw(path).items()}
    except InvalidOption as error:
        raise UnsupportedFormat(
            f"topics.json: {error.message}",
            path=path,
            hint="a newer version wrote it, or it was edited: upgrade, or mend it",
        ) from error


@lru_cache(maxsize=1024)
def _changed(options: TopicOptions) -> dict[str, Any]:
    return changed(options)


def encode(topics: dict[str, TopicOptions]) -> bytes:
    plain = {name: _changed(options) for name, options in sorted(topics.items())}
    text = msgspec.json.format(msgspec.json.encode(plain), indent=2)
    head = text.removesuffix(b"\n}")
    return text + b"\n" if head == text else head + _TAIL % crc32(head)
