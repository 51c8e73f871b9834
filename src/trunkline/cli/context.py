"""``trunkline context``: names for buses, so that a command says ``--context prod``.

A context is a URL and the path of a file with a token. Contexts are kept in one file of the user:
``$XDG_CONFIG_HOME/trunkline/contexts.json``. A token itself is never written there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from typing import Any, NamedTuple

from trunkline.cli import BUS_OPTIONS, OK, Commands, branch, leaf
from trunkline.cli.render import Printer
from trunkline.errors import Corrupt, InvalidOption, NotFound
from trunkline.explain import nearest

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)
_PASSWORD = re.compile(r"(?<=://)([^/@:]*:)[^/]*(?=@)")
_TOKEN = re.compile(r"^(nats(?:\+tls)?://)[^/@:]+(?=@)")  # a name without a password is a token
_OPTION = re.compile(r"(?i)([?&][a-z]*password=)[^&]*")


class NamedBus(NamedTuple):
    url: str
    token_file: str | None = None


def register(commands: Commands[Any]) -> None:
    below = branch(commands, "context", "name buses, for --context")
    add = leaf(below, "add", run_add, "add a context, or replace it", without=BUS_OPTIONS)
    add.add_argument("name", metavar="NAME")
    add.add_argument("place", metavar="URL")
    add.add_argument("--token-file", metavar="FILE", help="where its token is")
    leaf(below, "ls", run_ls, "list contexts", without=BUS_OPTIONS)
    rm = leaf(below, "rm", run_rm, "remove a context", without=BUS_OPTIONS)
    rm.add_argument("name", metavar="NAME")


def contexts_file() -> str:
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return os.path.join(home, "trunkline", "contexts.json")


def load() -> dict[str, NamedBus]:
    path = contexts_file()
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        return {
            name: NamedBus(one["url"], one.get("token_file"))
            for name, one in found["contexts"].items()
        }
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        hint = "correct it, or remove it and add the contexts again"
        raise Corrupt(f"the contexts cannot be read: {path}", path=path, hint=hint) from error


def find(name: str) -> NamedBus:
    found = load()
    if name not in found:
        guess = nearest(name, found)
        hint = f"did you mean {guess}?" if guess else "trunkline context ls"
        raise NotFound(f"there is no context {name}", name=name, hint=hint)
    return found[name]


def read_token(path: str) -> str:
    """The token in a file: its first line that is not empty."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.strip() for line in file]
    except UnicodeDecodeError:
        lines = []
    token = next(filter(None, lines), "")
    if not token:
        raise InvalidOption(
            f"there is no token in {path}", hint="one line, as token create printed"
        )
    return token


def _save(contexts: dict[str, NamedBus]) -> None:
    from trunkline.log import atomic

    path = contexts_file()
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    body = {name: one._asdict() for name, one in sorted(contexts.items())}
    atomic.replace_file(path, json.dumps({"contexts": body}, indent=2).encode() + b"\n")
    os.chmod(path, 0o600)  # a URL may hold a password


def run_add(args: argparse.Namespace) -> int:
    from trunkline.cli.arguments import check_scheme

    if not _NAME.fullmatch(args.name):
        raise InvalidOption(f"not a name: {args.name!r}", hint="letters, digits, '_', '-' and '.'")
    scheme = check_scheme(args.place)
    url = args.place
    if scheme == "file":
        url = "file:" + os.path.abspath(os.path.expanduser(url.partition(":")[2]))
    token_file = None
    if args.token_file is not None:
        token_file = os.path.abspath(os.path.expanduser(args.token_file))
        read_token(token_file)
    contexts = load()
    contexts[args.name] = NamedBus(url, token_file)
    _save(contexts)
    Printer(args).row({"context": args.name, **_shown(contexts[args.name])}, f"added {args.name}")
    return OK


def run_ls(args: argparse.Namespace) -> int:
    rows = [{"context": name, **_shown(one)} for name, one in sorted(load().items())]
    Printer(args).table(rows, ("context", "url", "token_file"), "there are no contexts")
    return OK


def run_rm(args: argparse.Namespace) -> int:
    contexts = load()
    find(args.name)
    del contexts[args.name]
    _save(contexts)
    Printer(args).row({"context": args.name}, f"removed {args.name}")
    return OK


def _shown(context: NamedBus) -> dict[str, Any]:
    return {"url": without_secrets(context.url), "token_file": context.token_file}


def without_secrets(url: str) -> str:
    """The URL as it may be shown."""
    return _OPTION.sub(r"\1***", _TOKEN.sub(r"\1***", _PASSWORD.sub(r"\1***", url)))
