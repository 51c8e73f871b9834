"""Families of metrics in Prometheus' text format, written by its own library, a piece at a time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, Final

from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from trunkline.patterns.measures import Family, to_metrics

MEDIA_TYPE: Final = CONTENT_TYPE_LATEST
_SAMPLES = 25  # that are written before the loop gets its turn


class _Piece:
    """What ``generate_latest`` takes for a registry."""

    def __init__(self, family: Family) -> None:
        self._family = family

    def collect(self) -> Iterator[Any]:
        return to_metrics([self._family])


async def write(families: Iterable[Family], turn: Callable[[], Awaitable[None]]) -> bytes:
    pieces: list[bytes] = []
    for family in families:
        for start in range(0, len(family.samples), _SAMPLES):
            some = family._replace(samples=family.samples[start : start + _SAMPLES])
            text = generate_latest(_Piece(some))
            if start:  # HELP and TYPE stand before the first piece
                text = b"".join(
                    one for one in text.splitlines(keepends=True) if not one.startswith(b"#")
                )
            pieces.append(text)
            await turn()
    return b"".join(pieces)
