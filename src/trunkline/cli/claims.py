"""``trunkline claim``, ``release`` and ``claims``: leases on paths and globs.

Claims live where ``--url`` says, else ``TRUNKLINE_URL``, else in the NDJSON file of this tree if it
has one, else in ``file:.bus``. The actor is ``--actor``, else ``TRUNKLINE_ACTOR``, ``NBS_HANDLE``
or the user's name.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import shlex
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from trunkline.claims import TTL_S, Claims, export_table, import_table, open_claims
from trunkline.cli import ERROR, OK, Run, leaf
from trunkline.errors import Conflict, InvalidOption, NoBus, NotFound
from trunkline.files import ndjson

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_HOOK_MARK = "# trunkline claims guard"


def register(commands: argparse._SubParsersAction[Any]) -> None:
    claim = _parser(commands, "claim", run_claim, "hold a path or glob for a while")
    claim.add_argument("path", metavar="PATH-OR-GLOB")
    claim.add_argument("--ttl", type=seconds, default=TTL_S, help="how long: 90, 10m, 2h (10m)")
    claim.add_argument(
        "--wait", nargs="?", type=seconds, const=-1, default=0, help="queue for it, at most so long"
    )
    claim.add_argument("--intent", default="edit")

    release = _parser(commands, "release", run_release, "give a claim back")
    release.add_argument("path", nargs="?", metavar="PATH-OR-GLOB")
    release.add_argument("--token", type=int)
    release.add_argument("--force", action="store_true", help="also the claims of others")

    claims = _parser(commands, "claims", run_list, "list who holds what")
    claims.add_argument("--all", action="store_true", help="with those that have run out")
    more = claims.add_subparsers(metavar="COMMAND")
    check = _parser(more, "check", run_check, "say whether a token still holds")
    check.add_argument("token", type=int)
    check.add_argument("path", nargs="?")
    _parser(more, "guard", run_guard, "refuse a commit that touches someone else's claim")
    _parser(more, "install-hook", run_hook, "run the guard before every commit of this repository")
    table = _parser(more, "export", run_export, "write a coord_claims.md to stdout")
    table.add_argument("--header", action="store_true", help="as a Markdown table")
    load = _parser(more, "import", run_import, "claim what a coord_claims.md says")
    load.add_argument("file", nargs="?", default="coord_claims.md")
    load.add_argument("--ttl", type=seconds, default=TTL_S, help="lifetime of a row (10m)")


def _parser(
    commands: argparse._SubParsersAction[Any], name: str, run: Run, about: str
) -> argparse.ArgumentParser:
    parser = leaf(commands, name, run, about)
    parser.add_argument("--actor", default=argparse.SUPPRESS, help="who you are")
    return parser


def seconds(text: str) -> int:
    unit = _UNITS.get(text[-1:], 0)
    digits = text[:-1] if unit else text
    if not digits.isdigit():
        raise argparse.ArgumentTypeError(f"not a time: {text!r}, use 90, 10m, 2h or 1d")
    return int(digits) * (unit or 1)


def run_claim(args: argparse.Namespace) -> int:
    with _open(args) as claims:
        wait_s = None if args.wait == -1 else args.wait
        claim = claims.claim(_path(args.path), ttl_s=args.ttl, intent=args.intent, wait_s=wait_s)
        _show(args, claim.to_json("held"), "claimed")
    return OK


def run_release(args: argparse.Namespace) -> int:
    if args.path is None and args.token is None:
        raise InvalidOption("say what to release: a path, or --token")
    with _open(args, create=False) as claims:
        path = None if args.path is None else _path(args.path)
        for claim in claims.release(path, token=args.token, force=args.force):
            _show(args, claim.to_json("released"), "released")
    return OK


def run_list(args: argparse.Namespace) -> int:
    with _open(args, create=False) as claims:
        for claim, state in claims.table(every=args.all):
            if args.quiet and not args.json:
                print(claim.path)
            else:
                _show(args, claim.to_json(state), state)
    return OK


def run_check(args: argparse.Namespace) -> int:
    with _open(args, create=False) as claims:
        path = None if args.path is None else _path(args.path)
        _show(args, claims.verify(args.token, path).to_json("held"), "held")
    return OK


def run_guard(args: argparse.Namespace) -> int:
    root = _git("rev-parse", "--show-toplevel").rstrip("\n")
    staged = _git("diff", "--cached", "--name-only", "--no-renames", "-z", cwd=root).split("\0")
    os.chdir(root)
    try:
        with _open(args, create=False) as claims:
            found = claims.conflicts(path for path in staged if path)
    except NoBus:
        return OK
    for path, claim in found:
        until = f" until {claim.expires_at:%H:%M:%SZ}" if claim.expires_at else ""
        print(
            f"trunkline: {path} is claimed by {claim.actor}{until} "
            f"({claim.path}, token {claim.token})",
            file=sys.stderr,
        )
    return ERROR if found else OK


def run_hook(args: argparse.Namespace) -> int:
    folder = os.path.abspath(_git("rev-parse", "--git-path", "hooks").rstrip("\n"))
    path = os.path.join(folder, "pre-commit")
    words = ["claims", "guard"]
    for flag in ("url", "actor"):
        if hasattr(args, flag):
            words += [f"--{flag}", getattr(args, flag)]
    if hasattr(args, "url"):
        words[words.index("--url") + 1] = _anchored(args.url)
    here = f"exec {shlex.quote(sys.executable)} -m trunkline.cli {shlex.join(words)}"
    text = f"#!/bin/sh\n{_HOOK_MARK}\n{here}\n"
    if os.path.exists(path):
        with open(path, encoding="utf-8", errors="replace") as file:
            if _HOOK_MARK not in file.read():
                raise Conflict(
                    f"there is a pre-commit hook already: {path}",
                    path=path,
                    hint=f"add this line to it: {here.removeprefix('exec ')} || exit 1",
                )
    os.makedirs(folder, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(path, 0o755)
    print(path)
    return OK


def run_export(args: argparse.Namespace) -> int:
    with _open(args, create=False) as claims:
        sys.stdout.write(export_table(claims.table(), header=args.header))
    return OK


def run_import(args: argparse.Namespace) -> int:
    try:
        with open(args.file, encoding="utf-8") as file:
            rows = import_table(file.read())
    except FileNotFoundError:
        raise NotFound(f"there is no file {args.file}", path=args.file) from None
    now = datetime.now(UTC)
    code = OK
    for path, actor, moment in rows:
        # A time to come is a fast clock or a slip of the pen, and no reason for a longer lease.
        left_s = args.ttl - max(0, int((now - moment).total_seconds()))
        if left_s <= 0:
            continue
        with open_claims(_url(args), actor, allow_network=args.allow_network) as claims:
            try:
                claim = claims.claim(path, ttl_s=left_s)
            except Conflict as error:
                print(f"trunkline: {error.message}", file=sys.stderr)
                code = ERROR
            else:
                _show(args, claim.to_json("held"), "claimed")
    return code


def _open(args: argparse.Namespace, *, create: bool = True) -> Claims:
    actor = getattr(args, "actor", "") or os.environ.get("TRUNKLINE_ACTOR", "")
    actor = actor or os.environ.get("NBS_HANDLE", "") or getpass.getuser()
    url = _url(args)
    claims = open_claims(url, actor, create=create, allow_network=args.allow_network)
    if url == f"file:{os.path.join(_top(), '.bus')}":
        _hide(os.path.join(_top(), ".bus"))
    return claims


def _hide(folder: str) -> None:
    """Keep our folder out of the commits of the tree it guards: were it committed, every reset or
    change of branch would bring back claims that are over and drop those that are not.
    """
    with suppress(OSError), open(os.path.join(folder, ".gitignore"), "x", encoding="ascii") as file:
        file.write("*\n")


def _url(args: argparse.Namespace) -> str:
    given = getattr(args, "url", "") or os.environ.get("TRUNKLINE_URL", "")
    if given:
        return given
    top = _top()
    events = os.path.join(top, ndjson.EVENTS_FILE)
    return f"ndjson:{events}" if os.path.exists(events) else f"file:{os.path.join(top, '.bus')}"


def _top() -> str:
    """The top of the tree we are in, or where we are: claims mean the same from every folder."""
    place = os.getcwd()
    while not os.path.exists(os.path.join(place, ".git")):
        above = os.path.dirname(place)
        if above == place:
            return os.getcwd()
        place = above
    return place


def _path(path: str) -> str:
    if os.path.isabs(path):
        return os.path.relpath(path, _top())
    prefix = os.path.relpath(os.getcwd(), _top())
    return path if prefix == "." else os.path.normpath(os.path.join(prefix, path))


def _anchored(url: str) -> str:
    """The URL as it reads from any folder: a hook runs at the top of the tree."""
    scheme, found, place = url.partition(":")
    local = found and scheme in ("file", "ndjson") and place and not place.startswith("/")
    return f"{scheme}:{os.path.abspath(os.path.expanduser(place))}" if local else url


def _git(*words: str, cwd: str | None = None) -> str:
    done = subprocess.run(["git", *words], cwd=cwd, capture_output=True, check=False)
    if done.returncode:
        raise NoBus(f"git {words[0]}: {os.fsdecode(done.stderr).strip()}")
    return os.fsdecode(done.stdout)


def _show(args: argparse.Namespace, row: dict[str, Any], verb: str) -> None:
    if args.json:
        print(json.dumps(row, sort_keys=True), flush=True)
    if args.json or args.quiet:
        return
    until = f" until {row['expires_at']}" if row["expires_at"] else ""
    print(f"{verb} {row['path']} by {row['actor']}, token {row['token']}{until}", flush=True)
