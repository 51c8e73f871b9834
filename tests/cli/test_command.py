"""What all commands share: exit codes, help, options everywhere, terminals, the manual."""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import trunkline
from trunkline.cli import VERBS, Parser, render

from .conftest import ENV, PROGRAM, Run, lines

MINE = ("records", "receive", "topics", "groups", "dead", "folder", "doctor", "copies")
MANUAL = Path(__file__).parents[2] / "docs" / "cli.md"


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Every command of this part of the command line, by its words."""
    top = Parser(prog="trunkline")
    commands = top.add_subparsers()
    for module in MINE:
        import_module(f"trunkline.cli.{module}").register(commands)
    found: dict[str, argparse.ArgumentParser] = {}
    for verb, parser in commands.choices.items():
        below = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        for action in below:
            found |= {f"{verb} {name}": leaf for name, leaf in action.choices.items()}
        if not below:
            found[verb] = parser
    return found


COMMANDS = parsers()
WORDS = {
    "pub": ("t", "1"),
    "sub": ("t",),
    "tail": ("t",),
    "grep": ("t", "x"),
    "get": ("t", "1"),
    "topic info": ("t",),
    "topic create": ("t",),
    "topic edit": ("t", "--compact"),
    "topic rm": ("t", "--yes"),
    "topic purge": ("t", "--yes"),
    "topic compact": ("t", "--yes"),
    "group info": ("t", "g"),
    "group lag": ("t", "g"),
    "group edit": ("t", "g", "--max-retries", "1"),
    "group seek": ("t", "g", "--to", "1"),
    "group pause": ("t", "g"),
    "group resume": ("t", "g"),
    "group rm": ("t", "g", "--yes"),
    "dlq show": ("t", "1"),
    "dlq redrive": ("t",),
    "dlq drop": ("t", "--yes"),
    "backup": ("x",),
}
MAKERS = ("pub", "init", "bench", "restore")


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in MAKERS])
def test_without_a_bus_a_command_says_so_and_makes_none(run: Run, home: Path, command: str) -> None:
    done = run(*command.split(), *WORDS.get(command, ()))

    assert (done.code, done.out) == (2, "")
    assert done.err == f"trunkline: there is no bus at {home}/.bus (trunkline init makes one)\n"
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "restore"])
def test_a_bus_in_memory_is_refused(run: Run, command: str) -> None:
    done = run(*command.split(), *WORDS.get(command, ()), "--url", "memory:")

    assert done.code == 4
    assert "memory: ends with the process" in done.err
    assert done.err.count("\n") == 1


def test_the_bus_is_the_option_else_the_environment_else_the_folder(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("pub", "t", '"default"')
    monkeypatch.setenv("TRUNKLINE_URL", "file:environment")
    run("pub", "t", '"environment"')
    run("pub", "t", '"after"', "--url", "file:option")
    run("--url", "file:option", "pub", "t", '"before"')

    assert [row["payload"] for row in run("get", "t", "1:").rows] == ["environment"]
    both = run("get", "--url", "file:option", "t", "1:").rows
    assert [row["payload"] for row in both] == ["after", "before"]
    monkeypatch.delenv("TRUNKLINE_URL")
    assert [row["payload"] for row in run("get", "t", "1:").rows] == ["default"]


def test_options_that_are_everywhere_go_before_or_after_the_verb(run: Run) -> None:
    run("pub", "t", "1")

    before = run("--json", "topic", "ls")
    between = run("topic", "--json", "ls")
    after = run("topic", "ls", "--json")

    assert before.rows == between.rows == after.rows
    assert before.rows[0]["topic"] == "t"


def test_exit_codes_of_a_real_process(program: Run) -> None:
    codes = {
        "no bus": program("topic", "ls").code,
        "ok": program("pub", "t", "1").code,
        "not found": program("get", "t", "9").code,
        "bad arguments": program("get", "t").code,
        "unknown verb": program("nope").code,
        "no verb": program().code,
        "nothing to ask at": program("topic", "rm", "t").code,
        "no claims to import": program("claims", "import", "missing.md").code,
        "no settings": program("serve", "--config", "missing.toml").code,
    }

    assert codes == {
        "no bus": 2,
        "ok": 0,
        "not found": 3,
        "bad arguments": 4,
        "unknown verb": 4,
        "no verb": 0,
        "nothing to ask at": 4,
        "no claims to import": 3,
        "no settings": 3,
    }


def test_an_error_is_one_line(run: Run, home: Path) -> None:
    (home / "file").write_text("")

    for words in (("get",), ("nope",), ("topic",), ("topic", "nope"), ("get", "t", "1", "--x")):
        done = run(*words)
        assert done.code == 4
        assert re.fullmatch(r"trunkline: .+\(see trunkline.* --help\)\n", done.err)


@pytest.mark.parametrize("place", ["file", "file/bus"])
@pytest.mark.parametrize("command", ["topic ls", "pub t 1", "init", "doctor", "sub t --group g"])
def test_a_file_in_the_place_of_a_bus_is_told(
    run: Run, home: Path, place: str, command: str
) -> None:
    (home / "file").write_text("")

    done = run(*command.split(), "--url", f"file:{place}")

    said = f"trunkline: there is no bus at {home}/{place}: it is, or is in, a file"
    assert (done.code, done.err) == (2, f"{said} (a bus is a folder)\n")


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("pub t 1 --bogus", "pub"),
        ("pub --bogus t 1", "pub"),
        ("get t 1 2", "get"),
        ("topic create t --bogus", "topic create"),
        ("dlq redrive t --yes", "dlq redrive"),
        ("dlq redrive", "dlq redrive"),
        ("--bogus pub t 1", "pub"),
    ],
)
def test_a_wrong_option_leads_to_the_help_of_its_own_command(
    run: Run, words: str, asked: str
) -> None:
    done = run(*words.split())

    assert done.code == 4
    assert done.err.endswith(f"(see trunkline {asked} --help)\n")
    assert "LETTER" not in done.err  # which is not required


@pytest.mark.parametrize("command", ["topic ls", "group ls", "dlq ls", "verify", "tail"])
def test_a_topic_that_is_not_there_is_not_found_and_a_pattern_may_match_none(
    run: Run, command: str
) -> None:
    run("pub", "t", "1")

    assert run(*command.split(), "nope").code == 3
    if command.endswith("ls"):
        assert run(*command.split(), "nope.*").code == 0


def test_help_lists_every_verb_with_what_it_does(run: Run) -> None:
    shown = run("help")

    assert shown.code == 0
    for verb, (_, about) in VERBS.items():
        assert re.search(rf"^ +{verb} +{re.escape(about[:40])}", shown.out, re.MULTILINE)
    assert run("-h").out == shown.out
    assert run("help", "pub").out == run("pub", "--help").out
    assert "--idem-key" in run("help", "pub").out
    assert "--to PLACE" in run("help", "group", "seek").out


def test_version(run: Run) -> None:
    assert run("--version").out == f"trunkline {trunkline.__version__}\n"


def test_a_newer_or_damaged_folder_is_told_apart(run: Run, home: Path) -> None:
    run("init")
    marker = home / ".bus" / "bus.json"

    marker.write_text('{"format":99}')
    newer = run("topic", "ls")
    marker.write_text("{")
    damaged = run("topic", "ls")

    assert (newer.code, "upgrade trunkline" in newer.err) == (1, True)
    assert (damaged.code, "bus.json is damaged" in damaged.err) == (1, True)


def in_terminal(home: Path, *words: str, answer: str = "", **env: str) -> tuple[int, str]:
    """Run a command at a terminal of its own; what it shows there."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*PROGRAM, *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=home,
        env={**ENV, "TERM": "xterm-256color", "COLUMNS": "100", **env},
    )
    os.close(theirs)
    if answer:
        os.write(ours, answer.encode())
    shown = b""
    while True:
        try:
            chunk = os.read(ours, 4096)
        except OSError:
            break
        if not chunk:
            break
        shown += chunk
    os.close(ours)
    return process.wait(20), shown.decode()


def test_a_person_at_a_terminal_sees_tables_and_lines(run: Run, home: Path) -> None:
    run("pub", "t", '{"n":"\\u001b[31m"}', "--key", "k\x1b[2J")

    code, table = in_terminal(home, "topic", "ls")
    _, record = in_terminal(home, "tail", "t")
    _, formatted = in_terminal(home, "tail", "t", "--format", "%k")
    _, verified = in_terminal(home, "verify", NO_COLOR="1")

    assert code == 0
    assert "─" in table
    assert re.match(r"t/0@1 \S+Z key=k\\x1b\[2J \{", record)
    assert "\x1b" not in record + formatted
    assert "1 topic, 1 record: no damage" in verified


def test_json_at_a_terminal_escapes_what_a_terminal_obeys(run: Run, home: Path) -> None:
    run("pub", "t", '"\\u009b31m\\u202e"')

    _, shown = in_terminal(home, "get", "t", "1", "--json")

    assert "\\u009b31m\\u202e" in shown
    assert json.loads(shown)["payload"] == "\x9b31m\u202e", "it is the same JSON"
    assert "\x9b31m\u202e" in run("get", "t", "1", "--json").out


def test_colours_are_left_out_on_request(run: Run, home: Path) -> None:
    run("pub", "t", "1")
    colour = re.compile(r"\x1b\[(?:3|4|9)\dm")

    _, plain = in_terminal(home, "topic", "ls", NO_COLOR="1")
    _, option = in_terminal(home, "topic", "ls", "--no-color")

    assert not colour.search(plain)
    assert not colour.search(option)
    assert "topic" in plain


@pytest.mark.parametrize(("answer", "code", "left"), [("n\n", 1, "t\n"), ("y\n", 0, "")])
def test_a_person_is_asked_before_something_goes(
    run: Run, home: Path, answer: str, code: int, left: str
) -> None:
    run("pub", "t", "1")

    done, shown = in_terminal(home, "topic", "rm", "t", answer=answer)

    assert done == code
    assert "remove t: 1 record," in shown
    assert run("topic", "ls", "-q").out == left


def test_without_rich_tables_are_plain_text(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run("pub", "t", "1")
    plain = run("topic", "ls").out
    monkeypatch.setattr(render, "is_terminal", lambda: True)
    for name in ("rich.box", "rich.console", "rich.table", "rich.text"):
        monkeypatch.setitem(sys.modules, name, None)

    assert run("topic", "ls").out == plain


def test_the_command_line_needs_no_extra(home: Path) -> None:
    """Where nothing but msgspec is installed, everything but ``--where`` works."""
    script = (
        "import sys\n"
        "for name in ('rich', 'sqlglot', 'zstandard'): sys.modules[name] = None\n"
        "from trunkline.cli import main\n"
        "codes = [main(words.split()) for words in sys.argv[1:]]\n"
        "print(codes)\n"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-c", script, "pub t 1", "sub t --group g --count 1 --wait 5"),
            *("topic ls", "group ls", "verify", "doctor", "dlq ls", "backup b.tgz"),
            *("restore b.tgz new", "grep t 1 --where offset=1"),
        ],
        cwd=home,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=40,
    )

    assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0, 0, 0, 0, 0, 0, 4]"
    assert "pip install" in done.stderr


def test_a_command_whose_extra_is_missing_says_what_to_install(home: Path) -> None:
    script = (
        "import sys\n"
        "for name in ('pyspark', 'pyarrow', 'uvicorn'): sys.modules[name] = None\n"
        "from trunkline.cli import main\n"
        "for words in sys.argv[1:]: assert main(words.split()) in (3, 4)\n"
    )
    words = ["serve", "spark shell", "spark cluster up", "pipeline run", "pipeline replay t --to x"]
    done = subprocess.run(
        [sys.executable, "-c", script, *words],
        cwd=home,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=40,
    )

    assert done.returncode == 0, done.stderr
    told = re.findall(r"^trunkline: .* \(pip install 'trunkline\[(\w+)\]'\)$", done.stderr, re.M)
    assert told == ["broker", "spark", "spark", "spark", "spark"]


def test_lists_are_one_json_object_a_line(run: Run) -> None:
    run("pub", "a", stdin=lines(2))
    run("pub", "b", "1")
    run("sub", ">", "--group", "g", "--wait", "0.2")

    for command in ("topic ls", "group ls", "get a 1:", "doctor", "verify", "dlq ls"):
        done = run(*command.split(), "--json")
        assert all(isinstance(json.loads(line), dict) for line in done.out.splitlines())
    assert len(run("topic", "ls", "--json").rows) == 2


def section(command: str) -> str:
    """The part of the manual that is about a command."""
    text = MANUAL.read_text("utf-8")
    found = re.search(
        rf"^##+ `trunkline {command}[` ].*?(?=^##+ |\Z)", text, re.MULTILINE | re.DOTALL
    )
    assert found, f"docs/cli.md has no section for trunkline {command}"
    return found[0]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_manual_has_each_command_with_each_option_and_an_example(command: str) -> None:
    text = section(command)
    shared = MANUAL.read_text("utf-8").partition("\n## ")[0]
    options = {
        max(action.option_strings, key=len)
        for action in COMMANDS[command]._actions
        if action.option_strings and not isinstance(action, argparse._HelpAction)
    }

    assert re.search(rf"^trunkline (?:--\S+ )*{command}\b", text, re.MULTILINE)
    missing = [
        name
        for name in sorted(options)
        if not re.search(
            rf"(?<![\w-]){name.replace('--no-', '--(?:no-)?')}(?![\w-])", text + shared
        )
    ]
    assert missing == []


def test_the_examples_of_the_manual_work(run: Run) -> None:
    blocks = re.findall(
        r"^(<!-- not run: [^\n]*\n)?```sh\n(.*?)^```",
        MANUAL.read_text("utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    failed = []
    for line in "".join(block for unrun, block in blocks if not unrun).splitlines():
        before, pipe, command = line.rpartition(" | ")
        stdin = (
            subprocess.run(before.split(), capture_output=True, text=True).stdout if pipe else ""
        )
        done = run(*shlex.split(command)[1:], stdin=stdin)
        if done.code != 0:
            failed.append(f"{line}: {done.code} {done.err}")

    assert failed == []


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "1>&- 2>&-"])
def test_a_closed_stream_is_no_stream_to_fail_on(run: Run, home: Path, closed: str) -> None:
    run("pub", "t", stdin=lines(2))

    for words, code in (("tail t", 0), ("pub t 3", 0), ("get t 9", 3), ("pub t - </dev/null", 0)):
        command = f"{shlex.join(PROGRAM)} {words} {closed}"
        done = subprocess.run(command, shell=True, cwd=home, env=ENV, capture_output=True)
        assert (done.returncode, b"Traceback" in done.stderr) == (code, False)
    assert [row["payload"] for row in run("get", "t", "1:").rows] == [{"n": 1}, {"n": 2}, 3]


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ('{"format":"x"}', "bus.json is damaged: format must be a whole number, not text"),
        ("[]", "bus.json is damaged: it must be an object, not a list"),
        ("", "bus.json is damaged: it ends in the middle"),
        ('{"format":2}', "has format 2, this version reads up to 1 (upgrade trunkline)"),
    ],
)
def test_a_folder_that_says_something_strange_about_itself_is_left_alone(
    run: Run, home: Path, about: str, said: str
) -> None:
    run("pub", "t", "1")
    (home / ".bus" / "bus.json").write_text(about)

    for command in ("topic ls", "pub t 2", "sub t --group g --wait 0.1", "doctor"):
        done = run(*command.split())
        assert (done.code, done.out, said in done.err) == (1, "", True)
    assert len((home / ".bus" / "wal" / "t.00000001.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    "words",
    [
        "token ls",
        "token revoke x",
        "release x",
        "release --token 1",
        "claims check 1",
        "claims export",
    ],
)
def test_a_look_at_tokens_and_claims_makes_no_folder(run: Run, home: Path, words: str) -> None:
    done = run(*words.split())
    assert (done.code, done.out) == (2, "")
    assert "there is no bus at" in done.err
    assert list(home.iterdir()) == []


def test_nobody_holds_anything_where_there_is_no_bus(run: Run, home: Path) -> None:
    done = run("claims")
    assert (done.code, done.out) == (0, "")
    assert done.err == "trunkline: there are no claims here\n"
    assert list(home.iterdir()) == []


def test_a_claim_without_an_actor_is_refused(run: Run, home: Path) -> None:
    done = run("claim", "x")
    assert (done.code, done.out) == (4, "")
    assert "--actor" in done.err
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("url", ["memory:", "ws://127.0.0.1:1"])
@pytest.mark.parametrize("words", ["ls", "create x --admin", "revoke x"])
def test_tokens_are_kept_in_a_folder(run: Run, url: str, words: str) -> None:
    done = run("token", *words.split(), "--url", url)
    assert (done.code, done.out) == (4, "")
    assert "file:<folder>" in done.err


def test_claims_and_bridges_take_the_options_of_all(run: Run) -> None:
    who = ("--actor", "ann")
    assert run("claim", "src/**", "-q", "--no-color", "--allow-network", *who).out == ""
    assert run("claims", "-q").out == "src/**\n"
    assert run("--quiet", "claims").out == "src/**\n"
    assert run("--json", "claims").rows[0]["path"] == "src/**"
    assert run("release", "src/**", "--quiet", *who).out == ""
    run("pub", "t", "1")
    for words in (("--json", "bridge"), ("bridge", "--json")):
        assert run(*words, "file:.bus", "ndjson:events").rows[0]["copied"] in (0, 3)
    done = run("bridge", "file:.bus", "ndjson:more", "--quiet")
    assert (done.code, done.out) == (0, "")


@pytest.mark.parametrize("verb", ["claim", "claims", "release", "bridge"])
def test_an_unknown_option_is_told_by_the_command(run: Run, verb: str) -> None:
    done = run(verb, *(("a", "b") if verb == "bridge" else ()), "--bogus", "x")
    assert done.code == 4
    named = "claims show" if verb == "claims" else verb
    assert f"(see trunkline {named} --help)" in done.err


def test_a_bridge_that_cannot_be_leaves_nothing(run: Run, home: Path) -> None:
    run("pub", "t", "1")
    assert run("bridge", "file:.bus", "file:new", "--topics", "a..b").code == 4
    assert sorted(path.name for path in home.iterdir()) == [".bus"]


def test_what_is_written_is_utf_8_whatever_the_locale(run: Run, program: Run) -> None:
    """As the files are. A locale that lacks a letter ended the command in the middle."""
    run("pub", "orders", '{"name": "żółw"}')
    words = ("sub", "orders", "--group", "g", "--count", "1")
    done = program(*words, env={"PYTHONIOENCODING": "latin-1"})
    assert (done.code, done.err) == (0, "")
    assert [row["payload"] for row in done.rows] == [{"name": "żółw"}]


def test_a_folder_may_have_more_partitions_than_a_process_has_files(run: Run, home: Path) -> None:
    """Those it has at first: more are often allowed, and 1,024 are common."""
    run("init")
    run("topic", "create", "orders", "--partitions", "100")
    run("pub", "orders", stdin=lines(100))
    for words in ("topic ls --json", "tail orders -n 100", "verify --json", "doctor"):
        command = f"ulimit -S -n 40; exec {shlex.join(PROGRAM)} {words}"
        done = subprocess.run(["bash", "-c", command], cwd=home, env=ENV, capture_output=True)
        assert (done.returncode, done.stderr) == (0, b"")
