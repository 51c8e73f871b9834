"""The options of a topic or a group as flags, by their types, bounds and defaults."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from trunkline.cli.arguments import duration
from trunkline.cli.render import cell
from trunkline.errors import InvalidOption
from trunkline.options import GroupOptions, Options, TopicOptions, make

MEANING: dict[type[Options], dict[str, str]] = {
    TopicOptions: {
        "partitions": "how many logs its records are spread over, by key",
        "durability": "what an acknowledged publish survives: a power cut, or only a crash",
        "segment_bytes": "begin a new file after so many bytes",
        "segment_records": "begin a new file after so many records",
        "compress": "compress finished files (needs zstandard)",
        "dedup_window_s": "for how long an idempotency key is remembered",
        "dedup_keys": "how many idempotency keys are remembered",
        "ttl_policy": "what becomes of a record whose time to live has run out",
        "retention_age_s": "keep records for so long",
        "retention_bytes": "keep so many bytes of a partition",
        "retention_records": "keep so many records of a partition",
        "retain_unsettled": "keep what some group has not settled, whatever retention says",
        "retain_for_lake": "keep what the lake does not have yet, whatever retention says",
        "compact": "keep only the latest record of each key",
    },
    GroupOptions: {
        "ack_timeout_s": "deliver a record again that was not settled for so long",
        "max_retries": "give a record up after so many tries besides the first",
        "backoff_base_s": "at most so long before the second try, by chance",
        "backoff_mult": "so many times as long before each further one",
        "backoff_max_s": "and never longer than that",
        "ordering": "records of one key, or of a partition, one after the other; or none",
        "aging_s": "what waits gains a step of priority in so long",
        "lookahead": "choose among so many records",
        "where": "handle only records that meet this condition",
    },
}
_SIZE = re.compile(r"(\d+)\s*(?:([KMG])(?:iB|B)?)?", re.IGNORECASE)
_SCALE = {"K": 1024, "M": 1024**2, "G": 1024**3}
_DECIMAL = re.compile(r"\d+(\.\d+)?", re.ASCII)

T = TypeVar("T", bound=Options)


class _Kind(NamedTuple):
    """What a field of the options may hold."""

    type: Any
    choices: tuple[str, ...]
    bounds: str
    optional: bool


def _kind(hint: Any) -> _Kind:
    optional = False
    if get_origin(hint) in (Union, UnionType):
        optional = NoneType in get_args(hint)
        none = (NoneType, msgspec.UnsetType)
        hint = next(part for part in get_args(hint) if part not in none)
    bounds = ""
    if get_origin(hint) is Annotated:
        hint, *notes = get_args(hint)
        for note in notes:
            bounds += f", at least {cell(note.ge)}" if getattr(note, "ge", None) else ""
            bounds += f", at most {cell(note.le)}" if getattr(note, "le", None) else ""
    if get_origin(hint) is Literal:
        return _Kind(str, get_args(hint), bounds, optional)
    return _Kind(hint, (), bounds, optional)


def add_option_flags(
    parser: argparse.ArgumentParser, cls: type[Options], *, unset: bool = False
) -> None:
    """A flag for each option; with ``unset`` one more that puts them back to their defaults."""
    if unset:
        parser.add_argument(
            "--unset", action="append", default=[], metavar="NAME", help="back to its default"
        )
    hints = get_type_hints(cls, include_extras=True)
    group = parser.add_argument_group(
        f"options of the {cls.__name__.removesuffix('Options').lower()}"
    )
    for field in msgspec.structs.fields(cls):
        kind = _kind(hints[field.name])
        flag = f"--{field.name.replace('_', '-')}"
        default = None if field.default is msgspec.UNSET else field.default
        about = f"{MEANING[cls][field.name]}{kind.bounds} (default: {cell(default)})"
        if kind.type is bool:
            group.add_argument(
                flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=about
            )
        elif kind.choices:
            group.add_argument(flag, choices=kind.choices, default=argparse.SUPPRESS, help=about)
        else:
            group.add_argument(
                flag,
                type=_reader(field.name, kind),
                default=argparse.SUPPRESS,
                metavar=_metavar(field.name, kind),
                help=about,
            )


def _metavar(name: str, kind: _Kind) -> str:
    if name.endswith("_s"):
        return "S"
    return "TEXT" if kind.type is str else "N"


def _reader(name: str, kind: _Kind) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        if kind.type is str:
            return text
        if kind.optional and text == "none":
            return None
        if name.endswith("_s"):
            return duration(text)
        if kind.type is float and _DECIMAL.fullmatch(text):
            return float(text)
        found = _SIZE.fullmatch(text)
        if found is None or (found[2] and not name.endswith("_bytes")):
            if text[:1] == "-" and text[1:].isdigit():
                raise argparse.ArgumentTypeError(f"{text} is below 0")
            forms = "bytes, or 64KiB, 10MiB, 2GiB" if name.endswith("_bytes") else "a whole number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {forms}")
        return int(found[1]) * _SCALE.get((found[2] or "").upper(), 1)

    return read


def given(args: argparse.Namespace, cls: type[Options]) -> dict[str, Any]:
    """The options that were typed."""
    return {k: v for k, v in vars(args).items() if k in cls.__struct_fields__}


def edited(args: argparse.Namespace, cls: type[T]) -> Callable[[T], T] | None:
    """What was typed as a change of options that are there; None if nothing was."""
    values = given(args, cls)
    names = [name.replace("-", "_") for name in args.unset]
    for name in names:
        if name not in cls.__struct_fields__:
            known = ", ".join(cls.__struct_fields__)
            raise InvalidOption(f"--unset: there is no option {name}", hint=known)
        if name in values:
            raise InvalidOption(f"--unset {name} and a value for it", hint="give one of them")
    if not values and not names:
        return None

    def change(before: T) -> T:
        kept = msgspec.structs.asdict(before) | values
        return make(cls, {k: v for k, v in kept.items() if k not in names})

    return change
