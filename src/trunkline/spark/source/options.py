"""What a query asks for: the reader's options, and the offsets they mean in a given log.

The names and meanings are those of Spark's Kafka source. Offsets count from 1; in JSON -2 stands
for the earliest and -1 for the latest.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import msgspec

from trunkline import units
from trunkline.access import bare_token
from trunkline.errors import InvalidOption
from trunkline.log.layout import folder_path
from trunkline.names import check_group, check_pattern, check_topic, is_pattern
from trunkline.spark.source.catalogs import address_of, is_remote
from trunkline.spark.source.scan import BadRecords

if TYPE_CHECKING:
    pass

Edge = Literal["starting", "ending"]
EARLIEST: Final = -2
LATEST: Final = -1

_STREAM_ONLY: Final = frozenset(
    {"maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay"}
    | {"groupId", "latencyMode"}
)
_BATCH_ONLY: Final = frozenset({"endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"})
_BOTH: Final = frozenset(
    {"url", "path", "subscribe", "subscribePattern", "assign", "startingOffsets"}
    | {"startingTimestamp", "startingOffsetsByTimestamp", "startingOffsetsByTimestampStrategy"}
    | {"minPartitions", "failOnDataLoss", "includeHeaders", "eventTypes", "spaces", "badRecords"}
    | {"tier", "lake", "token", "payloadSchema"}
)


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """The options, read and checked. Made by ``read_options``."""

    root: str
    topics: tuple[str, ...] = ()
    pattern: str = ""
    assign: dict[str, tuple[int, ...]] = {}
    starting: Any = "earliest"
    ending: Any = "latest"
    unmatched: Literal["error", "latest"] = "error"
    min_partitions: int = 0
    fail_on_data_loss: bool = True
    headers: bool = False
    types: frozenset[str] = frozenset()
    spaces: frozenset[str] = frozenset()
    bad_records: BadRecords = "fail"
    rows_max: int = 0
    bytes_max: int = 0
    rows_min: int = 0
    wait_s: float = 900.0
    group: str = ""
    low_latency: bool = False
    lake: str = ""
    token: str = ""
    payload: str = ""


class When(NamedTuple):
    """A moment, in place of an offset."""

    at: datetime


def bus_of(options: Mapping[str, str]) -> str:
    """The folder that option ``url`` (or ``path``) names, as every executor can find it, or the
    address of a log on a server.
    """
    url = options.get("url") or options.get("path") or os.environ.get("TRUNKLINE_URL") or ""
    if not url:
        raise InvalidOption("option 'url' is missing", hint="for example file:.bus")
    address = address_of(url)
    if is_remote(address):
        return address.rstrip("/") if address.startswith("http") else address
    scheme, colon, place = url.partition(":")
    if not colon or scheme not in ("file", "memory"):
        scheme, place = "file", url
    if scheme != "file" or not place or "://" in url.removeprefix("file://"):
        raise InvalidOption(
            f"Spark cannot read {url!r}",
            hint="file:.bus, ws:// or http:// of a broker, nats://, mongodb://",
        )
    return os.path.abspath(folder_path(place))


def token_of(options: Mapping[str, str]) -> str:
    return bare_token(options.get("token") or os.environ.get("TRUNKLINE_TOKEN"))


def read_options(options: Mapping[str, str], *, stream: bool) -> Selection:
    """Check what was typed; ``InvalidOption`` says what is wrong and what to type instead."""
    given = _named(options, stream)
    chosen = [name for name in ("subscribe", "subscribePattern", "assign") if given.get(name)]
    if len(chosen) != 1:
        raise InvalidOption(
            "give one of the options subscribe, subscribePattern and assign"
            + (f", not {' and '.join(chosen)}" if chosen else ""),
            hint="for example subscribe=orders,payments",
        )
    default = "latest" if stream else "earliest"
    starting = _edge(given, "starting", default)
    if starting == "latest" and not stream:
        raise InvalidOption("startingOffsets=latest reads nothing in a batch", hint="use earliest")
    subscribe = _names(given.get("subscribe", ""))
    for name in subscribe:
        check_topic(name) if not is_pattern(name) else check_pattern(name)
    root = bus_of(options)
    if given.get("groupId"):
        check_group(given["groupId"])
        if is_remote(root):
            raise InvalidOption("groupId needs a bus in a folder", hint="for example url=file:.bus")
    return Selection(
        root=root,
        topics=subscribe,
        pattern=given.get("subscribePattern", ""),
        assign=_assigned(given.get("assign", "")),
        starting=starting,
        ending=_edge(given, "ending", "latest"),
        unmatched=_one_of(given, "startingOffsetsByTimestampStrategy", ("error", "latest")),
        min_partitions=_number(given, "minPartitions"),
        fail_on_data_loss=_switch(given, "failOnDataLoss", True),
        headers=_switch(given, "includeHeaders", False),
        types=frozenset(_names(given.get("eventTypes", ""))),
        spaces=frozenset(_names(given.get("spaces", ""))),
        bad_records=_one_of(given, "badRecords", ("fail", "column", "skip")),
        rows_max=_number(given, "maxOffsetsPerTrigger"),
        bytes_max=_bytes(given, "maxBytesPerTrigger"),
        rows_min=_number(given, "minOffsetsPerTrigger"),
        wait_s=_duration(given.get("maxTriggerDelay", "15m")),
        group=given.get("groupId", ""),
        low_latency=_one_of(given, "latencyMode", ("throughput", "low")) == "low",
        lake=_lake(given),
        token=token_of(given),
        payload=given.get("payloadSchema", ""),
    )


def _lake(given: dict[str, str]) -> str:
    tier = _one_of(given, "tier", ("log", "auto"))
    lake = given.get("lake", "")
    if tier == "auto" and not lake:
        raise InvalidOption("tier=auto needs option lake, the folder of the lake")
    if tier == "auto" and given.get("latencyMode", "").lower() == "low":
        raise InvalidOption("latencyMode=low reads the log alone", hint="leave tier out")
    if not lake or tier != "auto":
        return ""
    return lake if "://" in lake else os.path.abspath(lake.removeprefix("file:"))


def _named(options: Mapping[str, str], stream: bool) -> dict[str, str]:
    """The options under their proper names: Spark hands them over in lower case."""
    known = _BOTH | (_STREAM_ONLY if stream else _BATCH_ONLY)
    proper = {name.lower(): name for name in known}
    other = {name.lower(): name for name in (_BATCH_ONLY if stream else _STREAM_ONLY)}
    given = {}
    for key, value in options.items():
        name = proper.get(key.lower())
        if name is not None:
            given[name] = value
        elif key.lower() in other:
            kind, instead = ("stream", "batch") if stream else ("batch", "stream")
            raise InvalidOption(
                f"option {other[key.lower()]} is for a {instead}, this is a {kind}",
                hint="remove it",
            )
        else:
            close = difflib.get_close_matches(key.lower(), proper, 1)
            hint = f"did you mean {proper[close[0]]}?" if close else f"known: {_list(known)}"
            raise InvalidOption(f"there is no option {key}", hint=hint)
    return given


def _list(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _json(name: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise InvalidOption(
            f"{name}={text!r} is no JSON: {error}", hint='for example {"orders":{"0":23,"1":-2}}'
        ) from None


def _assigned(text: str) -> dict[str, tuple[int, ...]]:
    if not text:
        return {}
    try:
        return msgspec.convert(_json("assign", text), dict[str, tuple[int, ...]])
    except msgspec.ValidationError:
        raise InvalidOption(
            f"assign={text!r} does not name partitions", hint='for example {"orders":[0,1]}'
        ) from None


def _edge(given: dict[str, str], edge: Edge, default: str) -> Any:
    """``earliest``, ``latest``, a ``When`` for all, or ``{topic: {partition: offset | When}}``."""
    if text := given.get(f"{edge}Timestamp"):
        return When(_moment(f"{edge}Timestamp", text))
    if text := given.get(f"{edge}OffsetsByTimestamp"):
        name = f"{edge}OffsetsByTimestamp"
        return {
            topic: {int(p): When(_moment(name, str(at))) for p, at in parts.items()}
            for topic, parts in _by_partition(name, text).items()
        }
    text = given.get(f"{edge}Offsets", default)
    if text in ("earliest", "latest"):
        if text == "earliest" and edge == "ending":
            raise InvalidOption("endingOffsets=earliest reads nothing", hint="use latest")
        return text
    if text[:1].isalpha():
        words = "earliest, latest or JSON" if edge == "starting" else "latest or JSON"
        raise InvalidOption(
            f"{edge}Offsets={text!r} is not {words}", hint='for example {"orders":{"0":23,"1":-2}}'
        )
    found = _by_partition(f"{edge}Offsets", text)
    placed = {topic: {int(p): int(at) for p, at in ps.items()} for topic, ps in found.items()}
    for topic, parts in placed.items():
        for partition, at in parts.items():
            if at < EARLIEST or at == 0 or (edge == "ending" and at == EARLIEST):
                raise InvalidOption(
                    f"{edge}Offsets: {topic}/{partition} cannot be {at}",
                    hint="offsets count from 1; -1 is the latest"
                    + (", -2 the earliest" if edge == "starting" else ""),
                )
    return placed


def _by_partition(name: str, text: str) -> dict[str, dict[str, int | str]]:
    try:
        return msgspec.convert(_json(name, text), dict[str, dict[str, int | str]])
    except msgspec.ValidationError:
        raise InvalidOption(
            f"{name}={text!r} does not say which partition",
            hint='for example {"orders":{"0":23,"1":-2}}',
        ) from None


def _moment(name: str, text: str) -> datetime:
    try:
        if text.isdigit():
            return datetime.fromtimestamp(int(text) / 1000, UTC)
        return units.read_time(text)
    except (ValueError, OverflowError):
        raise InvalidOption(
            f"{name}={text!r} is no time", hint="epoch milliseconds, or 2026-01-31T12:00:00Z"
        ) from None


def _number(given: dict[str, str], name: str) -> int:
    text = given.get(name, "0")
    if not text.isdigit():
        raise InvalidOption(f"{name}={text!r} is no number of at least 0")
    return int(text)


def _bytes(given: dict[str, str], name: str) -> int:
    try:
        return units.read_size(given.get(name, "0").replace(" ", ""))
    except ValueError:
        raise InvalidOption(f"{name}={given[name]!r} is no size", hint=units.SIZES) from None


def _duration(text: str) -> float:
    try:
        return units.read_duration(text.replace(" ", ""))
    except ValueError:
        why = f"maxTriggerDelay={text!r} is no duration"
        raise InvalidOption(why, hint=units.DURATIONS) from None


def _switch(given: dict[str, str], name: str, default: bool) -> bool:
    text = given.get(name, str(default)).lower()
    if text not in ("true", "false"):
        raise InvalidOption(f"{name}={text!r}", hint="true or false")
    return text == "true"


def _one_of(given: dict[str, str], name: str, words: tuple[str, ...]) -> Any:
    text = given.get(name, words[0]).lower()
    if text not in words:
        raise InvalidOption(f"{name}={text!r}", hint=" or ".join(words))
    return text
