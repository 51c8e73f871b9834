"""``trunkline claim``, ``release`` and ``claims``: leases on paths and globs.

Claims live where ``--url`` says, else ``TRUNKLINE_URL``, else where this repository decided, see
``trunkline.patterns.claims.place``. The actor is ``--actor``, else ``TRUNKLINE_ACTOR`` or
``NBS_HANDLE``, else the user at this terminal. Without any of them a claim is refused: two agents
of one user would not exclude each other.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from time import monotonic
from typing import Any, NoReturn

from trunkline.cli import ERROR, OK, TAKEN, Enough, Run, leaf
from trunkline.cli.arguments import add_bounds, duration
from trunkline.errors import (
    Conflict,
    ConnectionLost,
    Denied,
    InvalidOption,
    NoBus,
    NotFound,
    TrunklineError,
)
from trunkline.files.globs import expand, overlap
from trunkline.patterns.claims import (
    TTL_S,
    Claim,
    Claims,
    Process,
    export_table,
    import_table,
    open_claims,
)
from trunkline.patterns.claims.place import find_place, find_tree, set_place

_HOOK_MARK = "# trunkline claims guard"
_GUARD_S = 1.4  # how long a commit waits for claims that are not on this machine
_NOBODY = "nobody"
_BELOW = ("check", "guard", "install-hook", "export", "import", "place")
_VALUED = ("--url", "--context", "--actor", "--limit", "--budget")


def arrange(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words for the parser, and the command behind ``claim … --``. ``claims PATH`` becomes
    ``claims show PATH``, as the other words behind ``claims`` are commands.
    """
    words, rest = list(argv), list[str]()
    if "--" in words and "claim" in words[: words.index("--")]:
        at = words.index("--")
        words, rest = words[:at], words[at + 1 :]
    if "claims" in words:
        at = words.index("claims") + 1
        while at < len(words) and words[at].startswith("-"):
            at += 2 if words[at] in _VALUED else 1
        if at < len(words) and words[at] not in _BELOW:
            words.insert(at, "show")
    return words, rest


def register(commands: argparse._SubParsersAction[Any]) -> None:
    claim = _parser(commands, "claim", run_claim, "hold paths or globs for a while, all or none")
    claim.usage = "trunkline claim PATH… [--ttl TIME] [--wait [TIME]] [--hold-pid PID] [-- COMMAND]"
    claim.add_argument("paths", nargs="*", metavar="PATH-OR-GLOB")
    claim.add_argument("--ttl", type=seconds, default=TTL_S, help="how long: 90, 10m, 2h (10m)")
    claim.add_argument(
        "--wait",
        nargs="?",
        type=_patience,
        const=_FOREVER,
        default=0,
        help="queue for it, at most so long",
    )
    claim.add_argument("--intent", default="edit")
    claim.add_argument(
        "--hold-pid", type=int, metavar="PID", help="end the claim with this process as well"
    )

    release = _parser(commands, "release", run_release, "give claims back")
    release.add_argument("paths", nargs="*", metavar="PATH-OR-GLOB")
    release.add_argument("--token", type=int)
    release.add_argument("--mine", action="store_true", help="all claims of this actor")
    release.add_argument("--force", action="store_true", help="also the claims of others")

    about = "list claims and their holders; claims PATH: those on a path"
    claims = _parser(commands, "claims", run_list, about)
    _listing(claims)
    more = claims.add_subparsers(metavar="COMMAND")
    show = _parser(more, "show", run_list, "list the claims that overlap a path")
    show.add_argument("paths", nargs="+", metavar="PATH-OR-GLOB")
    _listing(show)
    check = _parser(more, "check", run_check, "say whether a token still holds")
    check.add_argument("token", type=int)
    check.add_argument("path", nargs="?")
    guard = _parser(more, "guard", run_guard, "refuse a commit that touches someone else's claim")
    guard.add_argument(
        "--require", action="store_true", help="refuse paths as well that this actor does not hold"
    )
    guard.add_argument(
        "--offline",
        choices=("refuse", "allow"),
        default="refuse",
        help="the commit when the claims cannot be read (refuse)",
    )
    _parser(more, "install-hook", run_hook, "run the guard before every commit of this repository")
    table = _parser(more, "export", run_export, "write a coord_claims.md to stdout")
    table.add_argument("--header", action="store_true", help="as a Markdown table")
    load = _parser(more, "import", run_import, "claim the paths of a coord_claims.md")
    load.add_argument("file", nargs="?", default="coord_claims.md")
    load.add_argument("--ttl", type=seconds, default=TTL_S, help="lifetime of a row (10m)")
    place = _parser(more, "place", run_place, "say where claims live, or decide it")
    place.add_argument("place", nargs="?", metavar="URL")


def _listing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="also claims that have run out")
    parser.add_argument("--mine", action="store_true", help="only claims of this actor")
    add_bounds(parser)


def _parser(
    commands: argparse._SubParsersAction[Any], name: str, run: Run, about: str
) -> argparse.ArgumentParser:
    parser = leaf(commands, name, run, about, without=("--token",))  # a claim has a token itself
    parser.add_argument("--actor", default=argparse.SUPPRESS, help="the actor that claims")
    return parser


def seconds(text: str) -> int:
    return int(duration(text))


_FOREVER = -1


def _patience(text: str) -> int | str:
    """A time; anything else is a path that follows a ``--wait`` without a time."""
    return seconds(text) if text[:1].isdigit() and "/" not in text and "." not in text else text


def run_claim(args: argparse.Namespace) -> int:
    paths, wait = list(args.paths), args.wait
    if isinstance(wait, str):
        paths, wait = [wait, *paths], _FOREVER
    if not paths:
        raise InvalidOption("give a path or a glob to claim")
    wait_s = None if wait == _FOREVER else wait
    holder = os.getpid() if args.rest else args.hold_pid
    process = None if holder is None else Process.by_pid(holder)
    if holder is not None and process is None:
        raise NotFound(f"there is no process {holder}", pid=holder)
    with _ended_by_signals(), _open(args) as claims:
        chosen = [one for path in paths for one in expand(path)]
        try:
            claim = claims.claim(
                *map(_path, chosen),
                ttl_s=args.ttl,
                intent=args.intent,
                wait_s=wait_s,
                process=process,
            )
        except Conflict as error:
            return _show_taken(args, error)
        if args.rest:
            return _hold(args, claims, claim)
        _show(args, claim.to_json("held"), "claimed")
    return OK


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """A waiter that is told to end leaves the queue first."""

    def end(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _show_taken(args: argparse.Namespace, error: Conflict) -> int:
    print(f"trunkline: {error}", file=sys.stderr)
    if args.json:
        holder: Claim = error.fields["claim"]
        left_s = error.fields.get("left_s")
        row = {
            "state": "taken",
            "path": error.fields["path"],
            "holder": holder.actor,
            "holds": list(holder.paths),
            "token": holder.token,
            "left_s": None if left_s is None else round(left_s, 3),
            "place": error.fields.get("ahead", 0),
            "circle": error.fields.get("circle"),
        }
        print(json.dumps(row, sort_keys=True), flush=True)
    return TAKEN


def _hold(args: argparse.Namespace, claims: Claims, claim: Claim) -> int:
    """Run a command while the claim is held and renewed; then release it."""
    import subprocess

    env = {**os.environ, "TRUNKLINE_CLAIM_TOKEN": str(claim.token)}
    try:
        child = subprocess.Popen(args.rest, env=env)
    except OSError as error:
        claims.release(token=claim.token)
        raise NotFound(f"cannot run {args.rest[0]}: {error.strerror}") from error
    # A kill -9 of this process leaves the command behind: the claim is the command's.
    if (process := Process.by_pid(child.pid)) is not None:
        with suppress(Denied):
            claims.renew(claim.token, ttl_s=args.ttl, process=process)
    renew_at = monotonic() + args.ttl / 3
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                return child.wait(timeout=max(0.05, renew_at - monotonic()))
            try:
                claims.renew(claim.token, ttl_s=args.ttl)
            except Denied as error:
                print(f"trunkline: {error}; {args.rest[0]} is told to end", file=sys.stderr)
                return TAKEN
            renew_at = monotonic() + args.ttl / 3
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait()
        with suppress(NotFound):
            claims.release(token=claim.token)


def run_release(args: argparse.Namespace) -> int:
    if not args.paths and args.token is None and not args.mine:
        raise InvalidOption("give a claim to release: a path, --token or --mine")
    with _open(args, create=False) as claims:
        chosen = [_path(one) for path in args.paths for one in expand(path)]
        for claim in claims.release(*chosen, token=args.token, mine=args.mine, force=args.force):
            _show(args, claim.to_json("released"), "released")
    return OK


def run_list(args: argparse.Namespace) -> int:
    wanted = [_path(one) for path in getattr(args, "paths", ()) for one in expand(path)]
    try:
        claims = _open(args, create=False, anonymous=not args.mine)
    except NoBus:
        if getattr(args, "url", ""):
            raise
        return _nobody(args)
    shown = used = 0
    with claims:
        for claim, state in claims.table(every=args.all):
            if args.mine and claim.actor != claims.actor:
                continue
            if wanted and not any(overlap(one, path) for one in wanted for path in claim.paths):
                continue
            row = claim.to_json(state)
            used += len(json.dumps(row) if args.json else f"{claim.path} {claim.actor}") + 1
            if shown and (shown == args.limit or used > (args.budget or used)):
                raise Enough
            if args.quiet and not args.json:
                print(claim.path)
            else:
                _show(args, row, state)
            shown += 1
    return OK if shown else _nobody(args)


def _nobody(args: argparse.Namespace) -> int:
    """An empty list says so to a person, and nothing to a program."""
    if not (args.json or args.quiet):
        print("trunkline: there are no claims here", file=sys.stderr)
    return OK


def run_check(args: argparse.Namespace) -> int:
    with _open(args, create=False, anonymous=True) as claims:
        path = None if args.path is None else _path(args.path)
        _show(args, claims.verify(args.token, path).to_json("held"), "held")
    return OK


def run_place(args: argparse.Namespace) -> int:
    tree = find_tree()
    if args.place is not None:
        set_place(tree, _anchored(args.place))
    print(find_place(tree))
    return OK


def run_guard(args: argparse.Namespace) -> int:
    root = _git("rev-parse", "--show-toplevel").rstrip("\n")
    staged = _git("diff", "--cached", "--name-only", "--no-renames", "-z", cwd=root).split("\0")
    os.chdir(root)
    paths = [path for path in staged if path]
    try:
        found, missing = _in_time(args, paths)
    except NoBus:
        found, missing = [], paths if args.require else []
    except TrunklineError as error:
        outcome = "the commit is refused" if args.offline == "refuse" else "the commit goes on"
        print(
            f"trunkline: the claims cannot be read, {outcome} (--offline {args.offline}): {error}",
            file=sys.stderr,
        )
        return ERROR if args.offline == "refuse" else OK
    for path, claim in found:
        until = f" until {claim.expires_at:%H:%M:%SZ}" if claim.expires_at else ""
        print(
            f"trunkline: {path} is claimed by {claim.actor}{until} "
            f"({claim.path}, token {claim.token}); wait for it: "
            f"trunkline claim {shlex.quote(path)} --wait",
            file=sys.stderr,
        )
    for path in missing:
        print(
            f"trunkline: you hold no claim on {path}; claim it: trunkline claim "
            f"{shlex.quote(path)}",
            file=sys.stderr,
        )
    return ERROR if found or missing else OK


Found = tuple[list[tuple[str, Claim]], list[str]]


def _in_time(args: argparse.Namespace, paths: list[str]) -> Found:
    """What is in the way of a commit. A server that does not answer is not waited for."""

    def look() -> Found:
        with _open(args, create=False, anonymous=True, patience_s=_GUARD_S - 0.4) as claims:
            return claims.conflicts(paths), claims.unheld(paths) if args.require else []

    url = _url(args)
    if url.startswith(("file:", "ndjson:")):
        return look()
    import logging
    from queue import Empty, SimpleQueue
    from threading import Thread

    logging.getLogger("trunkline").setLevel(logging.ERROR)  # the outcome is told once
    answers: SimpleQueue[Found | BaseException] = SimpleQueue()

    def ask() -> None:
        try:
            answers.put(look())
        except BaseException as error:  # noqa: BLE001 -- raised again below
            answers.put(error)

    Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=_GUARD_S)
    except Empty:
        raise ConnectionLost(f"{url} does not answer within {_GUARD_S:g} s") from None
    if isinstance(answer, BaseException):
        raise answer
    return answer


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
    with _open(args, create=False, anonymous=True) as claims:
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
        with open_claims(
            _url(args, decide=True), actor, allow_network=args.allow_network
        ) as claims:
            try:
                claim = claims.claim(path, ttl_s=left_s)
            except Conflict as error:
                print(f"trunkline: {error.message}", file=sys.stderr)
                code = ERROR
            else:
                _show(args, claim.to_json("held"), "claimed")
    return code


def _open(
    args: argparse.Namespace, *, create: bool = True, anonymous: bool = False, **options: Any
) -> Claims:
    actor = _actor(args) or (_NOBODY if anonymous else "")
    if not actor and not create:
        with open_claims(_url(args), _NOBODY, create=False):
            pass  # where there is no log, that is the answer
    if not actor:
        raise InvalidOption(
            "a claim needs an actor: give --actor NAME, or set TRUNKLINE_ACTOR",
            name="actor",
            hint="each agent needs a name of its own, or two of them do not exclude each other",
        )
    url = _url(args, decide=create)
    if url.startswith(("file:", "ndjson:")):
        options = {}
    elif url.startswith("mongodb"):
        options = {}  # it has a patience of its own, in the URL
    elif (token := _token(args)) is not None:
        options["token"] = token
    return open_claims(url, actor, create=create, allow_network=args.allow_network, **options)


def _actor(args: argparse.Namespace) -> str:
    """The actor; at a terminal the user there, so that two terminals exclude each other."""
    named = getattr(args, "actor", "") or os.environ.get("TRUNKLINE_ACTOR", "")
    named = named or os.environ.get("NBS_HANDLE", "")
    if named:
        return named
    import getpass

    for stream in (sys.stdin, sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            return f"{getpass.getuser()}@{os.ttyname(stream.fileno()).removeprefix('/dev/')}"
    return ""


def _url(args: argparse.Namespace, *, decide: bool = False) -> str:
    given = getattr(args, "url", "")
    if getattr(args, "context", "") or not (given or os.environ.get("TRUNKLINE_URL")):
        if getattr(args, "context", "") or os.environ.get("TRUNKLINE_CONTEXT"):
            from trunkline.cli.arguments import choose_bus

            return choose_bus(args).url
        return find_place(find_tree(), decide=decide)
    return given or os.environ["TRUNKLINE_URL"]


def _token(args: argparse.Namespace) -> str | None:
    from trunkline.cli.arguments import choose_bus

    return choose_bus(args).token


def _top() -> str:
    return find_tree().top


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
    import subprocess

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
    print(
        f"{verb} {' '.join(row['paths'])} by {row['actor']}, token {row['token']}{until}",
        flush=True,
    )
