"""``bus.json``: what makes a folder a bus, its format and its name."""

from __future__ import annotations

import contextlib
import os

import msgspec

from trunkline.errors import Corrupt, UnsupportedFormat
from trunkline.explain import reason
from trunkline.log import atomic
from trunkline.log.head import FORMAT
from trunkline.log.line import Damaged, close_line, decode, is_intact


class _About(msgspec.Struct):
    format: int = 0
    id: str = ""
    crc: str | None = None  # there was none in early folders


_decode = msgspec.json.Decoder(_About).decode
_MOST = 64 * 1024


def read(path: str) -> str:
    """The name of the folder; "" where one may only read, and it was never given one."""
    try:
        about = _About()
        with contextlib.suppress(FileNotFoundError):
            about = decode(_decode, data := atomic.read_file(path, _MOST))
            if about.crc and about.format <= FORMAT and not is_intact(data.rstrip(b"\n")):
                raise Damaged("the checksum does not fit")
    except Damaged as error:
        raise Corrupt(
            f"bus.json is damaged: {reason(error)}",
            path=path,
            position=0,
            hint="put it back from a backup; or remove it, and the folder gets a new name",
        ) from error
    if about.format > FORMAT:
        root = os.path.dirname(path)
        raise UnsupportedFormat(
            f"{root} has format {about.format}, this version reads up to {FORMAT}",
            path=root,
            hint="upgrade trunkline",
        )
    return about.id


def encode(name: str, created: str) -> bytes:
    return close_line(msgspec.json.encode({"format": FORMAT, "id": name, "created": created})[:-1])
