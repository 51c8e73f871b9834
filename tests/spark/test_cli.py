"""``trunkline pipeline`` and ``trunkline spark``: without a session as far as they go, and with."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

from pyspark.errors import AnalysisException

from trunkline.cli import Parser, main, pipeline
from trunkline.cli import spark as spark_command
from trunkline.errors import NotFound
from trunkline.folder import Folder
from trunkline.spark.session import java
from trunkline.spark.session.progress import Watch, show_progress

from .logs import append, make_event, make_log, read_log

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def run(*words: str) -> int | None:
    parser = Parser(prog="trunkline")
    commands = parser.add_subparsers(dest="verb")
    pipeline.register(commands)
    spark_command.register(commands)
    args = parser.parse_args(words)
    for name in ("json", "quiet", "no_color", "allow_network"):
        setattr(args, name, getattr(args, name, False))
    code: int | None = args.run(args)
    return code


def test_the_pipelines_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("pipeline", "ls", "--json") == 0

    listed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = [one["name"] for one in listed]
    assert names[:3] == ["lake", "clean", "verify"]
    assert {"traffic", "latency", "lag", "dead_letters", "claims", "temporal"} <= set(names)
    assert {"consolidation", "learning", "sequences", "compaction"} <= set(names)


def test_the_surroundings_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("spark", "info", "--json") == 0

    told = json.loads(capsys.readouterr().out)
    assert int(told["java"].partition(".")[0]) >= 17
    assert told["pyspark"].startswith("4.")


def test_without_java_one_line_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old = tmp_path / "bin" / "java"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    old.chmod(0o755)
    monkeypatch.setattr(java, "_homes", lambda: [str(tmp_path)])
    monkeypatch.setattr(java, "_from_pip", lambda: None)

    with pytest.raises(NotFound, match=r"needs Java 17 or later; found 11\.0\.2") as caught:
        java.find_java.__wrapped__()

    assert "pip install 'trunkline[jre]'" in str(caught.value)


def test_the_java_of_pip_is_not_asked_for_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    home = java.make_shim("/bin/echo")

    words = ["-a b", "--add-modules=jdk.incubator.vector", "-c"]
    said = subprocess.run([f"{home}/bin/java", *words], capture_output=True, text=True, check=True)

    assert said.stdout == "-a b -c\n"


def test_a_run_a_status_and_a_report(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file:{make_log(tmp_path / 'bus', 50)}"
    lake = str(tmp_path / "lake")
    assert spark.range(1).count() == 1

    assert run("pipeline", "run", "traffic", "lag", "--url", url, "--lake", lake, "--json") == 0
    outcomes = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["name"], one["error"]) for one in outcomes] == [("traffic", ""), ("lag", "")]
    assert run("pipeline", "run", "traffic", "--url", url, "--lake", lake) == 0
    said = capsys.readouterr()
    assert said.out.startswith("traffic        3 rows")
    assert (said.out.count("\n"), said.err) == (1, "")
    assert run("pipeline", "status", "--lake", lake, "--json") == 0
    status = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["name"], one["state"]) for one in status] == [("traffic", "ok"), ("lag", "ok")]
    out = tmp_path / "report.html"
    assert run("pipeline", "report", "--lake", lake, "--out", str(out)) == 0
    assert "traffic" in out.read_text()
    assert str(out) in capsys.readouterr().out


def test_a_run_tells_what_was_set_aside(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = make_log(tmp_path / "bus", 5)
    folder = Folder(root)
    append(folder, [make_event(9), make_event(10)])  # without a type
    folder.close()
    lake = str(tmp_path / "lake")
    assert spark.range(1).count() == 1

    words = ("--url", f"file:{root}", "--lake", lake, "--set", "clean.type=quarantine")
    assert run("pipeline", "run", "clean", *words) == 0

    said = capsys.readouterr().out
    assert said.startswith("clean          5 rows, 2 set aside (see table quarantine) in ")
    assert run("pipeline", "status", "--lake", lake, "--json") == 0
    (status,) = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (status["rows"], status["set_aside"], status["refused"]) == (5, 2, "quarantine")


def test_a_replay_that_has_a_name_is_sent_once(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file:{make_log(tmp_path / 'bus', 5)}"
    assert spark.range(1).count() == 1
    words = ("pipeline", "replay", "orders", "--to", "again", "--url", url, "--name", "monday")

    assert [run(*words, "--speed", "2"), run(*words)] == [0, 0]

    said = capsys.readouterr().out
    assert said == "replayed 5 records\nreplayed 0 records: monday was sent before\n"
    assert len(read_log(str(tmp_path / "bus"), "again")) == 5


def test_a_program_piped_into_the_shell_finds_the_topics(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = make_log(tmp_path / "bus", 20)
    folder = Folder(root)
    append(folder, [make_event(1, topic="9.lives-left")])
    folder.close()
    assert spark.range(1).count() == 1
    program = "print(sql('SELECT count(*) AS n FROM _9_lives_left').first().n, orders.count())"
    monkeypatch.setattr("sys.stdin", io.StringIO(program))

    assert run("spark", "shell", "--url", f"file:{root}") == 0

    assert capsys.readouterr().out == "1 20\n"


def test_a_file_is_run_in_a_session(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert spark.range(1).count() == 1
    root = make_log(tmp_path / "bus", 20)
    job = tmp_path / "job.py"
    job.write_text("import sys\nprint(__name__, sys.argv[1:], spark.table(sys.argv[1]).count())\n")
    monkeypatch.setattr("sys.argv", ["trunkline"])

    assert run("spark", "submit", "--url", f"file:{root}", str(job), "orders", "--b") == 0

    assert capsys.readouterr().out == "__main__ ['orders', '--b'] 20\n"


def test_a_file_that_needs_no_bus_is_run_without_one(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = tmp_path / "job.py"
    job.write_text("print(spark.range(3).count())\n")
    monkeypatch.setattr("sys.argv", ["trunkline"])

    assert run("spark", "submit", "--url", f"file:{tmp_path / 'nowhere'}", str(job)) == 0

    assert capsys.readouterr().out == "3\n"
    assert not (tmp_path / "nowhere").exists()


def test_an_error_in_a_query_is_raised_and_not_printed_as_well(
    spark: SparkSession, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AnalysisException, match="nothing_there"):
        spark.sql("SELECT * FROM nothing_there")
    assert "nothing_there" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("pipeline run nope --url file:bus", 3, "there is no pipeline nope (known: lake"),
        ("pipeline run replay --url file:bus", 3, "replay has a command of its own (trunkline pi"),
        ("pipeline run --url file:nowhere", 2, "there is no bus at"),
        ("spark shell --url file:nowhere", 2, "there is no bus at"),
        ("pipeline run --url file:bus --master sprak://x", 4, "'sprak://x' is no Spark (local"),
        ("pipeline run --url file:bus --master local[x]", 4, "'local[x]' is no Spark (local"),
        ("spark shell --url file:bus --master spark://127.0.0.1:1", 1, "no Spark answers at"),
        ("spark submit nope.py", 3, "there is no file nope.py"),
        ("pipeline report --lake nowhere", 3, "there is no lake at"),
        ("pipeline status --lake nowhere", 3, "there is no lake at"),
        ("pipeline replay orders --to x --url file:bus --from-lake", 3, "there is no lake at"),
        ("pipeline replay orders --to x --url file:nowhere", 2, "there is no bus at"),
        ("pipeline replay ordres --to x --url file:bus", 3, "there is no topic ordres"),
        ("pipeline ls --load no_such_module", 3, "cannot load pipelines"),
    ],
)
def test_an_error_is_one_line_that_says_what_to_do(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    code: int,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    make_log(tmp_path / "bus", 1)

    assert main(words.split()) == code

    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert told.err.startswith(f"trunkline: {said}")


def test_without_java_the_command_line_says_what_to_do(tmp_path: Path) -> None:
    make_log(tmp_path / "bus", 1)
    program = (
        "import sys\nfrom trunkline.cli import main\nfrom trunkline.spark.session import java\n"
        "java._homes = lambda: []\njava._from_pip = lambda: None\n"
        "sys.exit(main(['pipeline', 'run', 'traffic', '--url', 'file:bus']))"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )

    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == (
        "trunkline: Spark needs Java 17 or later "
        "(pip install 'trunkline[jre]', or install a JDK and set JAVA_HOME)\n"
    )


def test_a_terminal_sees_a_bar_and_nobody_else_does(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            time.sleep(0.7)
            yield batch

    root = make_log(tmp_path / "bus", 4000, partitions=4)
    reader = spark.read.format("trunkline").options(url=root, subscribe="orders", minPartitions="8")
    slow = reader.load().select("offset").mapInArrow(slowly, "offset bigint")
    ours, theirs = os.openpty()
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    drawn = ""

    def look() -> None:
        nonlocal drawn
        with contextlib.suppress(OSError):  # which is how a terminal ends
            while seen := os.read(ours, 4096):
                drawn += seen.decode(errors="replace")

    eyes = threading.Thread(target=look)
    eyes.start()
    with open(theirs, "w", encoding="utf-8") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        with show_progress(spark, "counting"):
            assert slow.count() == 4000
    eyes.join()
    os.close(ours)

    assert "counting" in drawn
    assert "1 stage" in drawn
    assert "rows/s" in drawn
    nobody = io.StringIO()
    monkeypatch.setattr("sys.stderr", nobody)
    with show_progress(spark, "counting"):
        assert spark.range(3).count() == 3
    assert nobody.getvalue() == ""


def test_a_stream_tells_its_rate_and_its_lag(spark: SparkSession, tmp_path: Path) -> None:
    root = make_log(tmp_path / "bus", 500)
    stream = spark.readStream.format("trunkline").options(
        url=root, subscribe="orders", startingOffsets="earliest", maxOffsetsPerTrigger="10"
    )
    query = (
        stream.load()
        .writeStream.format("noop")
        .option("checkpointLocation", str(tmp_path / "check"))
        .trigger(processingTime="300 seconds")
        .start()
    )
    try:
        deadline = time.monotonic() + 100
        while not query.lastProgress and time.monotonic() < deadline:
            time.sleep(0.05)
        said = Watch(spark).look().text
    finally:
        query.stop()

    assert re.fullmatch(r"[\d,]+ rows/s, 490 behind", said)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_what_is_published_arrives_until_the_command_is_interrupted(tmp_path: Path) -> None:
    root = make_log(tmp_path / "bus", 5)
    words = ["pipeline", "run", "traffic", "--follow", "--every", "0.5", "--json"]
    words += ["--url", f"file:{root}", "--lake", str(tmp_path / "lake")]
    program = [sys.executable, "-m", "trunkline.cli", *words]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = json.loads(process.stdout.readline())
        folder = Folder(root)
        append(folder, [make_event(n, type="new") for n in range(5, 8)])
        folder.close()
        second = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()

    assert (first["rows"], first["events"]) == (3, 5)
    assert (second["rows"], second["events"]) == (4, 3)
    assert (process.returncode, said) == (130, b"")
