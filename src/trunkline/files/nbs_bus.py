"""``nbs-bus``: the event queue of a directory on the command line.

Outputs, exit codes and the order of checks are those of the original program. Three things are
added where a script for the original does not meet them: the command ``watch``, the option
``--limit``, and the last line of ``status``. Every argument stays bytes: what the caller typed is
what lands in the file.
"""

from __future__ import annotations

import errno
import os
import sys
import time

from trunkline.files import spool
from trunkline.files.event_file import PRIORITIES, SECONDS_MAX, iso, parse_int

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

OK, ERROR, NO_DIRECTORY, NOT_FOUND, BAD_ARGUMENTS, DUPLICATE = range(6)
_PATH_MAX = 4096

USAGE = b"""\
Usage: nbs-bus <command> [args...]

A directory as a priority queue: one file per event, no process running.

Commands:
  publish <dir> <source> <type> <priority> [payload] [--dedup-window=N]
      Put an event in the queue; prints its file name.
      Priorities: critical, high, normal, low.
      --dedup-window=N  exit 5 instead, if an event with the same source and type is
                        pending and younger than N seconds (0 or unset: never;
                        dedup-window in config.yaml sets another default)

  check <dir> [--handle=<name>] [--limit=N]
      One line per pending event, most urgent first: [priority] file (age)
      --handle=<name>   only what this source published
      --limit=N         the first N; how many more there are is told on stderr

  read <dir> <event-file>
      Print an event.

  ack <dir> <event-file>
      Done with it, for all readers: it goes to processed/.

  ack-all <dir> [--handle=<name>]
      The same for every pending event, or every one of a source.

  prune <dir> [--max-bytes=N]
      Remove the oldest processed events until N bytes are left
      (16777216, or retention-max-bytes in config.yaml; where that is set, ack and
      ack-all prune by themselves).

  status <dir>
      What is pending, by priority, and what is processed; what has been pending longer
      than ack-timeout in config.yaml; the last activity.

  watch <dir> [--handle=<name>] [--timeout=N] [--limit=N]
      Wait until an event is pending, then do as check does.

  help
      This text.

Exit codes:
  0  done
  1  something failed
  2  no such directory
  3  no such event
  4  wrong arguments
  5  not published: a duplicate is pending
"""

_SYNOPSES = {
    b"publish": b"<dir> <source> <type> <priority> [payload] [--dedup-window=N]",
    b"check": b"<dir> [--handle=<name>]",
    b"read": b"<dir> <event-file>",
    b"ack": b"<dir> <event-file>",
    b"ack-all": b"<dir> [--handle=<name>]",
    b"prune": b"<dir> [--max-bytes=N]",
    b"status": b"<dir>",
    b"watch": b"<dir> [--handle=<name>] [--timeout=<seconds>]",
}


class Exit(Exception):
    """Ends the command with a code, after one line on stderr."""

    def __init__(self, code: int, line: bytes) -> None:
        super().__init__(code)
        self.code = code
        self.line = line


def main(argv: list[str] | None = None) -> int:
    args = [os.fsencode(word) for word in (sys.argv[1:] if argv is None else argv)]
    if not args:
        _write(2, USAGE)
        return BAD_ARGUMENTS
    if args[0] == b"help":  # the original has no --help: it is an unknown command there
        _write(2, USAGE)
        return OK
    command = _COMMANDS.get(args[0])
    if command is None:
        _write(2, b"Error: unknown command: %b\n" % args[0] + USAGE)
        return BAD_ARGUMENTS
    run, needed = command
    if len(args) < needed + 1:
        _write(2, b"Usage: nbs-bus %b %b\n" % (args[0], _SYNOPSES[args[0]]))
        return BAD_ARGUMENTS
    try:
        return run(args[1:])
    except Exit as exit_:
        _write(2, exit_.line + b"\n")
        return exit_.code
    except BrokenPipeError:
        return ERROR
    except OSError as error:
        _write(2, b"Error: %b\n" % os.fsencode(str(error)))
        return ERROR
    except KeyboardInterrupt:
        return 130


def _publish(args: list[bytes]) -> int:
    directory, source, type_, priority = args[:4]
    check_words(source, type_)
    # Only the fifth word can be the payload, and only if it does not look like an option.
    payload = args[4] if len(args) > 4 and not args[4].startswith(b"--") else b""
    return publish(directory, source, type_, priority, payload, args[4:])


def check_words(source: bytes, type_: bytes) -> None:
    for label, text in ((b"source", source), (b"type", type_)):
        if not text:
            raise Exit(BAD_ARGUMENTS, b"Error: %b must not be empty" % label)
        if any(byte in b" \t\n\v\f\r" for byte in text):
            message = b"Error: %b must not contain whitespace: '%b'" % (label, text)
            raise Exit(BAD_ARGUMENTS, message)


def publish(
    directory: bytes,
    source: bytes,
    type_: bytes,
    priority: bytes,
    payload: bytes,
    options: list[bytes],
) -> int:
    queue = _open(directory)
    name = os.fsdecode(priority)
    if name not in PRIORITIES:
        raise Exit(
            BAD_ARGUMENTS,
            b"Error: invalid priority '%b' (use: critical, high, normal, low)" % priority,
        )
    window_s = _window(options, queue)
    queue.notice_config()
    try:
        shown = queue.publish(source, type_, name, payload, dedup_window_s=window_s)
    except Exception as error:
        raise _publish_failed(error) from error
    return _write(1, os.fsencode(shown) + b"\n")


def _window(options: list[bytes], queue: spool.Spool) -> int:
    text = _option(options, b"--dedup-window=")
    if text is None:
        return queue.config().dedup_window_s
    value = parse_int(text)
    if value is None or value < 0:
        raise Exit(BAD_ARGUMENTS, b"Error: invalid --dedup-window value: " + text)
    if value > SECONDS_MAX:
        message = b"Error: --dedup-window value too large (overflow): " + text
        raise Exit(BAD_ARGUMENTS, message)
    return value


def _publish_failed(error: Exception) -> Exception:
    from trunkline.errors import Duplicate, InvalidName

    if isinstance(error, Duplicate):
        return Exit(DUPLICATE, b"Dedup: " + os.fsencode(error.message))
    if isinstance(error, InvalidName):  # a "/": to the original, a folder that is not there
        error = OSError(errno.ENOENT, "", "", None, "")
    return _failed(error, b"failed to finalise event file") if isinstance(error, OSError) else error


def _failed(error: OSError, renaming: bytes) -> Exit:
    """What failed is told from the paths the error names: none while writing, one while making a
    file or folder, two while renaming.
    """
    if error.filename is None:
        what = b"failed to flush event file"
    elif error.filename2 is not None:
        what = renaming
    elif os.fsencode(error.filename).endswith(b"/" + spool.PROCESSED):
        what = b"cannot create processed directory"
    else:
        what = b"cannot create event file"
    return Exit(ERROR, b"Error: %b: %b" % (what, os.fsencode(os.strerror(error.errno or 0))))


def _check(args: list[bytes]) -> int:
    queue = _open(args[0])
    queue.notice_config()
    return _list(queue.pending(_handle(args)), _limit(args))


def _watch(args: list[bytes]) -> int:
    queue = _open(args[0])
    text = _option(args[1:], b"--timeout=")
    timeout_s: float | None = None
    if text is not None:
        try:
            timeout_s = float(text)
        except ValueError:
            timeout_s = -1.0
        if not 0 <= timeout_s < 1e9:
            raise Exit(BAD_ARGUMENTS, b"Error: invalid --timeout value: " + text)
    queue.notice_config()
    rows = queue.wait(_handle(args), timeout_s)
    return _list(rows, _limit(args)) if rows else NOT_FOUND


def _limit(args: list[bytes]) -> int | None:
    text = _option(args[1:], b"--limit=")
    value = None if text is None else parse_int(text)
    if text is not None and (value is None or value <= 0):
        raise Exit(BAD_ARGUMENTS, b"Error: invalid --limit value: " + text)
    return value


def _list(rows: list[spool.Pending], limit: int | None) -> int:
    if limit is not None and len(rows) > limit:
        _write(2, b"%d more events are pending\n" % (len(rows) - limit))
        rows = rows[:limit]
    now_us = time.time_ns() // 1000
    shown = _spelled_out if os.isatty(1) else bytes
    return _write(
        1,
        b"".join(
            b"[%b] %b (%b)\n"
            % (row.priority.encode(), shown(os.fsencode(row.name)), age(now_us - row.timestamp_us))
            for row in rows
        ),
    )


def _spelled_out(name: bytes) -> bytes:
    """A file name for a terminal, which would obey its control characters."""
    shown = [one if one.isprintable() else repr(one)[1:-1] for one in os.fsdecode(name)]
    return os.fsencode("".join(shown))


def age(delta_us: int) -> bytes:
    seconds = max(delta_us // 1_000_000, 0)
    for limit, size, unit in ((60, 1, b"s"), (3600, 60, b"m"), (86_400, 3600, b"h")):
        if seconds < limit:
            return b"%d%b ago" % (seconds // size, unit)
    return b"%dd ago" % (seconds // 86_400)


def _read(args: list[bytes]) -> int:
    queue = _open(args[0])
    return _write(1, _named(queue.read, args[1]))


def _ack(args: list[bytes]) -> int:
    queue = _open(args[0])
    queue.notice_config()
    _named(queue.ack, args[1])
    return OK


def _ack_all(args: list[bytes]) -> int:
    count = _open(args[0]).ack_all(_handle(args))
    return _write(1, b"Acknowledged %d event%b\n" % (count, b"" if count == 1 else b"s"))


def _prune(args: list[bytes]) -> int:
    queue = _open(args[0])
    text = _option(args[1:], b"--max-bytes=")
    limit = queue.config().retention_max_bytes if text is None else parse_int(text)
    if limit is None or limit <= 0:
        raise Exit(BAD_ARGUMENTS, b"Error: invalid --max-bytes value: " + (text or b""))
    done = queue.prune(limit)
    for name, reason in done.failed:
        _write(2, os.fsencode(f"Warning: failed to prune {name}: {reason}\n"))
    if not done.found:
        return _write(1, b"Pruned 0 events (no processed directory)\n")
    total, of = done.total_bytes / 1024, done.limit_bytes / 1024
    if not done.count and not done.failed:
        return _write(1, b"Pruned 0 events (%.1f KB / %.1f KB limit)\n" % (total, of))
    plural = b"" if done.count == 1 else b"s"
    line = b"Pruned %d event%b (%.1f KB remaining, %.1f KB limit)\n"
    return _write(1, line % (done.count, plural, total, of))


def _status(args: list[bytes]) -> int:
    state = _open(args[0]).status()
    lines = b"Pending: %d total" % state.pending
    if state.pending:
        lines += b" (critical=%d, high=%d, normal=%d, low=%d)" % tuple(state.counts)
    lines += b"\n"
    if state.pending:
        lines += b"Oldest pending: %b\n" % iso(state.oldest_us // 1_000_000).encode()
    lines += b"Processed: %d events (%.1f KB)\n" % (state.processed, state.processed_bytes / 1024)
    if state.stale:
        lines += b"WARNING: %d stale event%b (unacked > %ds)\n" % (
            state.stale,
            b"" if state.stale == 1 else b"s",
            state.ack_timeout_s,
        )
    # The original has no such line. It comes last, so the original's lines keep their numbers.
    if state.last_us:
        lines += b"Last activity: %b\n" % iso(state.last_us // 1_000_000).encode()
    return _write(1, lines)


def _open(directory: bytes) -> spool.Spool:
    if len(directory) >= _PATH_MAX:
        raise Exit(
            BAD_ARGUMENTS,
            b"Error: directory path too long (%d >= %d): %b"
            % (len(directory), _PATH_MAX, directory),
        )
    if not os.path.isdir(directory):
        found = os.path.exists(directory)
        what = b"not a directory" if found else b"events directory not found"
        raise Exit(NO_DIRECTORY, b"Error: %b: %b" % (what, directory))
    return spool.Spool(directory)


def _named(action: Callable[[str], bytes | None], name: bytes) -> bytes:
    try:
        return action(os.fsdecode(name)) or b""
    except OSError as error:
        raise _failed(error, b"cannot acknowledge event") from error
    except Exception as error:
        from trunkline.errors import InvalidName, NotFound

        if not isinstance(error, InvalidName | NotFound):
            raise
        code = NOT_FOUND if isinstance(error, NotFound) else ERROR
        raise Exit(code, b"Error: " + os.fsencode(error.message)) from error


def _handle(args: list[bytes]) -> str:
    return os.fsdecode(_option(args[1:], b"--handle=") or b"")


def _option(args: list[bytes], prefix: bytes) -> bytes | None:
    for word in args:
        if word.startswith(prefix):
            return word[len(prefix) :]
    return None


def _write(fd: int, text: bytes) -> int:
    view = memoryview(text)
    while view:
        view = view[os.write(fd, view) :]
    return OK


_COMMANDS = {
    b"publish": (_publish, 4),
    b"check": (_check, 1),
    b"read": (_read, 2),
    b"ack": (_ack, 2),
    b"ack-all": (_ack_all, 1),
    b"prune": (_prune, 1),
    b"status": (_status, 1),
    b"watch": (_watch, 1),
}
