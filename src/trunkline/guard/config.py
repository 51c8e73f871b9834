"""Read the tables of a guard file. One TOML file may hold the tables of several guards."""

from __future__ import annotations

import os
import tomllib
from typing import Any, TypeVar

import msgspec

from trunkline.errors import InvalidOption, NotFound
from trunkline.explain import reason

T = TypeVar("T")


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The whole file; ``InvalidOption`` names the file and the line that is wrong."""
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise NotFound(f"there is no file {name}", path=name) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidOption(f"{name} is not TOML: {error}", path=name) from None


def convert(value: Any, kind: type[T], where: str) -> T:
    """A table as a struct; ``InvalidOption`` names the table and the field that is wrong."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InvalidOption(f"{where}: {reason(error, value)}", name=where) from None
