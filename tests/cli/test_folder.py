"""init, verify, doctor and bench."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from trunkline.cli import doctor
from trunkline.folder import Folder
from trunkline.log import atomic
from trunkline.names import GroupKey

from .conftest import ENV, PROGRAM, Run, Start, lines

MIB = 1024 * 1024


@pytest.fixture
def sealed(run: Run, home: Path) -> Path:
    """A finished segment with 50 records, and a second one with 10."""
    run("init")
    run("topic", "create", "t", "--segment-records", "50")
    run("pub", "t", stdin=lines(50))
    run("pub", "t", stdin=lines(10, 51))
    return home / ".bus" / "wal" / "t.00000001.jsonl"


def flip(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def problems(run: Run, *words: str) -> list[tuple[str, str]]:
    return [(row["level"], row["where"]) for row in run("doctor", "--json", *words).rows]


def test_init_makes_a_private_folder_once(run: Run, home: Path) -> None:
    first = run("init", "--json")
    again = run("init", "--json")

    assert (first.code, again.code) == (0, 0)
    assert [first.rows[0]["created"], again.rows[0]["created"]] == [True, False]
    assert first.rows[0]["id"] == again.rows[0]["id"]
    assert (home / ".bus").stat().st_mode & 0o777 == 0o700


def test_a_sound_bus_verifies(run: Run, sealed: Path) -> None:
    done = run("verify")

    assert (done.code, done.out) == (0, "1 topic, 60 records: no damage\n")
    assert run("verify", "--json").rows == [{"ok": True, "topics": 1, "records": 60}]
    assert run("verify", "t").code == 0
    assert run("verify", "nope").code == 3


@pytest.mark.parametrize("share", [0.0, 0.1, 0.33, 0.5, 0.77, 0.9, 0.999])
@pytest.mark.parametrize("bit", [0, 5])
def test_verify_finds_a_flipped_bit_in_a_sealed_segment(
    run: Run, sealed: Path, share: float, bit: int
) -> None:
    flip(sealed, int(share * sealed.stat().st_size), bit)

    done = run("verify", "--json")

    assert done.code == 1
    assert any(row["path"] == "wal/t.00000001.jsonl" and row["severe"] for row in done.rows)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.6, 0.99])
def test_verify_finds_a_flipped_bit_in_a_compressed_segment(
    run: Run, home: Path, sealed: Path, share: float
) -> None:
    from trunkline.folder.upkeep import pack_segments

    folder = Folder(str(home / ".bus"))
    assert pack_segments(folder, "t", 0) == 1
    folder.close()
    assert run("verify").code == 0
    packed = sealed.with_suffix(".jsonl.zst")
    flip(packed, int(share * packed.stat().st_size))

    done = run("verify")

    assert done.code == 1
    assert "Traceback" not in done.err
    assert "t" in done.out


@pytest.mark.parametrize(
    "name",
    ["wal/t.head", "wal/t.00000001.jsonl", *(f"offsets/t__g.{e}" for e in ("journal", "lock"))],
)
@pytest.mark.parametrize("dangles", [False, True])
@pytest.mark.parametrize("command", ["verify", "doctor"])
def test_a_link_in_a_files_place_is_found(
    run: Run, home: Path, name: str, command: str, dangles: bool
) -> None:
    run("pub", "t", "1")
    assert run("sub", "t", "--group", "g", "--count", "1").code == 0
    path = home / ".bus" / name
    os.symlink(path.rename(home / "elsewhere"), path)
    if dangles:
        (home / "elsewhere").unlink()
        (home / ".bus/offsets/t__g.json").unlink()

    done = run(command, "--json")

    assert (done.code, done.err) == (1, "")
    found = [row for row in done.rows if row.get("severe") or row.get("level") == "error"]
    assert f"not a plain file: {path}" in [row["problem"] for row in found]


def test_verify_goes_on_where_a_group_was_removed_since_it_was_listed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("pub", "t", "1")
    monkeypatch.setattr(Folder, "groups", lambda _folder: [GroupKey("t", 0, "gone")])
    assert run("verify").code == 0


def test_verify_works_beside_writers(run: Run, start: Start) -> None:
    run("init")
    run("topic", "create", "t", "--segment-records", "100", "--retention-records", "500")
    writer = start("pub", "t", "1", "--count", "200000")

    codes = {run("verify").code for _ in range(10)}

    assert codes == {0}
    assert writer.poll() is None or writer.returncode == 0


def test_the_doctor_finds_nothing_wrong_with_a_sound_bus(run: Run, sealed: Path) -> None:
    done = run("doctor")

    assert done.code == 0
    assert done.out == (
        "nothing is wrong\n"
        "finished files of which only the seals were looked at: 1 "
        "(trunkline verify checks every byte)\n"
    )
    assert run("doctor", "--verify").out == "nothing is wrong\n"
    assert run("doctor", "--json").rows == [{"ok": True, "unread_files": 1}]
    assert run("doctor", "--json", "--verify").rows == [{"ok": True, "unread_files": 0}]


@pytest.mark.parametrize("share", [0.0, 0.4, 0.99])
def test_the_doctor_finds_damage_in_the_file_that_is_written_to(
    run: Run, sealed: Path, share: float
) -> None:
    last = sealed.with_name("t.00000002.jsonl")
    flip(last, int(share * last.stat().st_size))

    assert ("error", "wal/t.00000002.jsonl") in problems(run)
    assert run("doctor", "--salvage").code == 0
    assert run("doctor", "--verify").code == 0


@pytest.mark.parametrize("command", ["verify", "doctor"])
def test_a_file_that_cannot_be_opened_hides_no_other_damage(
    run: Run, sealed: Path, command: str
) -> None:
    run("pub", "a", "1")
    head = sealed.with_name("a.head")
    head.unlink()
    head.mkdir()
    flip(sealed, sealed.stat().st_size - 10)

    done = run(command, "--json")
    told = " ".join(map(str, done.rows))
    assert (done.code, "a.head: Is a directory" in told) == (1, True)
    assert "wal/t.00000001.jsonl" in told


def test_the_doctor_finds_a_damaged_seal_and_a_file_that_is_gone(run: Run, sealed: Path) -> None:
    run("pub", "t", stdin=lines(40, 61))
    run("pub", "t", stdin=lines(10, 101))
    flip(sealed, sealed.stat().st_size - 10)
    assert ("warning", "wal/t.00000001.jsonl") in problems(run)

    flip(sealed, sealed.stat().st_size - 10)
    sealed.with_name("t.00000002.jsonl").unlink()
    gone = run("doctor", "--json")
    assert (gone.code, gone.rows[0]["where"]) == (1, "wal/t.00000003.jsonl")
    assert "offsets 51 to 100 are missing" in gone.rows[0]["problem"]

    sealed.with_name("t.00000003.jsonl").unlink()
    last = run("doctor", "--json")
    assert (last.code, last.rows[0]["problem"]) == (1, "its last file, number 3, is gone")


def test_the_doctor_salvages_what_can_be_read(run: Run, sealed: Path, home: Path) -> None:
    data = sealed.read_bytes()
    flip(sealed, data.index(b'"offset":20') + 2)
    assert run("get", "t", "1:").code == 1

    found = run("doctor", "--verify", "--json")
    cured = run("doctor", "--salvage", "--json")

    assert found.code == 1
    assert ("error", "trunkline doctor --salvage") in [
        (row["level"], row["remedy"]) for row in found.rows
    ]
    assert cured.code == 0
    assert cured.rows[0]["problem"] == (
        "49 records of t.00000001.jsonl were brought back, offset 20 is lost; "
        "the damaged file is quarantine/t.00000001.jsonl"
    )
    assert "none was brought back" in run("doctor", "--salvage").err
    kept = [row["offset"] for row in run("get", "t", "1:").rows]
    assert kept == [n for n in range(1, 61) if n != 20]
    assert [path.name for path in (home / ".bus" / "quarantine").iterdir()] == [sealed.name]
    assert run("verify").code == 0


def test_the_doctor_speaks_of_segments_that_were_set_aside(run: Run, sealed: Path) -> None:
    sealed.rename(f"{sealed}.corrupt")

    found = run("doctor", "--json")
    assert found.code == 1
    assert ("error", "wal/t.00000001.jsonl.corrupt") in problems(run)
    cured = run("doctor", "--salvage")
    assert cured.code == 0
    assert "50 records of t.00000001.jsonl.corrupt were brought back, none is lost" in cured.out
    assert len(run("get", "t", "1:").rows) == 60


def test_the_doctor_speaks_of_groups(run: Run, sealed: Path) -> None:
    run("sub", "t", "--group", "g", "--count", "1", "--wait", "5")
    run("sub", "t", "--group", "p", "--count", "1", "--wait", "5")
    run("group", "pause", "t", "p")

    assert problems(run) == [("warning", "t/0 p")]
    assert problems(run, "--lag", "50") == [("warning", "t/0 g"), ("warning", "t/0 p")]


def test_the_doctor_speaks_of_what_is_left_lying(run: Run, sealed: Path, home: Path) -> None:
    (home / ".bus" / "wal" / "t.head.abcd.tmp").write_text("")
    (home / ".bus" / "members" / "gone").write_text("")
    (home / ".bus").chmod(0o755)

    assert sorted(problems(run)) == sorted(
        ("note", where) for where in ("members/", str(home / ".bus"), "wal/t.head.abcd.tmp")
    )


def test_the_doctor_speaks_of_missing_extras(
    run: Run, sealed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("topic", "edit", "t", "--compress")
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)

    done = run("doctor", "--json")

    found = {row["where"]: (row["level"], row["remedy"]) for row in done.rows}
    assert found["rich"] == ("note", "pip install 'trunkline[cli]'")
    assert found["zstandard"] == ("error", "pip install 'trunkline[zstd]'")


def test_the_doctor_speaks_of_a_network_file_system(
    run: Run, sealed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic, "network_kind", lambda path: "nfs4")

    refused = run("topic", "ls")
    forced = run("topic", "ls", "--allow-network")
    told = run("doctor", "--json")

    assert (refused.code, forced.code, told.code) == (1, 0, 1)
    assert "nfs4" in told.rows[0]["problem"]


def test_the_doctor_speaks_of_a_full_device(
    run: Run, sealed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    os.truncate(".bus/reserve", 0)

    done = run("doctor", "--json")

    assert done.code == 1
    assert "the device is full" in done.rows[0]["problem"]
    assert "topic purge" in done.rows[0]["remedy"]


def test_the_doctor_tells_whether_an_ndjson_file_is_used(run: Run, sealed: Path) -> None:
    os.makedirs("state/pubsub/offsets")
    Path("state/pubsub/events_v0.ndjson").write_text("")

    (row,) = run("doctor", "--json").rows

    assert (row["level"], "adoption rule not met" in row["problem"]) == ("warning", True)


def test_the_doctor_tells_of_an_ndjson_file_where_there_is_no_bus(run: Run) -> None:
    assert run("doctor").code == 2
    os.makedirs("state/pubsub/offsets")
    Path("state/pubsub/events_v0.ndjson").write_text("")

    done = run("doctor", "--json")

    assert done.code == 0
    assert "adoption rule not met" in done.rows[0]["problem"]
    assert run("doctor", "--url", "file:elsewhere").code == 2


def test_the_doctor_tells_when_a_group_is_ahead_of_its_log(
    run: Run, sealed: Path, home: Path
) -> None:
    run("sub", "t", "--group", "g", "--wait", "0.3")
    for path in (home / ".bus" / "wal").iterdir():
        path.unlink()
    run("pub", "t", "1")

    row = run("doctor", "--json").rows[0]

    assert (row["level"], row["remedy"]) == ("error", "trunkline group seek t g --to end")
    assert run("group", "seek", "t", "g", "--to", "end").code == 0
    assert run("doctor").code == 0


def test_bench_measures_where_the_bus_is_and_leaves_nothing(run: Run, home: Path) -> None:
    done = run("bench", "--seconds", "0.05", "--json")

    assert [row["name"] for row in done.rows] == [
        "write and fdatasync",
        "publish, 64 at once",
        "publish_many, 500 a batch",
    ]
    assert all(row["events_per_s"] > 0 and row["p95_ms"] > 0 for row in done.rows)
    assert list(home.iterdir()) == []
    assert run("bench", "--seconds", "0").code == 0


def test_commands_that_need_no_loop_start_without_one(home: Path) -> None:
    """Only ``sub --group``, ``dlq`` and ``bench`` run the bus; the others must not pay for it."""
    script = (
        "import sys; from trunkline.cli import main; main(['topic', 'ls']); "
        "print([m for m in sys.modules if m in ('trunkline.bus.connect', 'trunkline.store.file', "
        "'rich', 'sqlglot', 'trunkline.filters.where')])"
    )
    subprocess.run([*PROGRAM, "init", "-q"], cwd=home, env=ENV, check=True)

    done = subprocess.run(
        [PROGRAM[0], "-c", script], cwd=home, env=ENV, capture_output=True, text=True, check=True
    )

    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(("number", "lost"), [(1, "1 to 10"), (2, "11 to 20"), (3, "21 to 30")])
def test_the_doctor_misses_any_file_that_is_gone(
    run: Run, home: Path, number: int, lost: str
) -> None:
    run("init")
    run("topic", "create", "t", "--segment-records", "10")
    for _ in range(3):
        run("pub", "t", "1", "--count", "10")
    (home / ".bus" / "wal" / f"t.{number:08d}.jsonl").unlink()
    run("pub", "t", "2")  # goes on behind it, or says once that the last one is gone
    run("pub", "t", "3")

    told = run("doctor")
    assert told.code == 1
    assert f"offsets {lost} are missing" in told.out

    cured = run("doctor", "--salvage", "--json")
    assert cured.code == 0
    assert cured.rows[0]["problem"] == (
        f"t.{number:08d}.jsonl is gone: it was made with no records, offsets {lost} are lost"
    )
    assert len(run("get", "t", "1:").rows) == (21 if number == 3 else 22)
    assert run("verify").code == 0


def test_doctor_fails_on_warnings_when_a_monitor_asks_for_it(run: Run) -> None:
    run("pub", "t", "1")
    run("pub", "t", "2")
    run("take", "t", "--group", "g")
    run("group", "pause", "t", "g")
    assert run("doctor").code == 0
    done = run("doctor", "--fail-on", "warning", "--json")
    assert done.code == 1
    assert '"code":"group_paused"' in done.out
    run("group", "resume", "t", "g")
    behind = run("doctor", "--fail-on", "warning", "--lag", "2", "--json")
    assert (behind.code, "group_lag" in behind.out) == (1, True)
    assert run("doctor", "--fail-on", "warning", "--lag", "3", "--free", "0").code == 0
    full = run("doctor", "--fail-on", "warning", "--free", "100", "--json")
    assert (full.code, "storage_low" in full.out) == (1, True)


def test_doctor_says_how_to_mend_a_file_that_was_cut(run: Run, home: Path) -> None:
    run("pub", "a", stdin='{"n":1}\n{"n":2}\n')
    path = home / ".bus/wal/a.00000001.jsonl"
    path.write_bytes(path.read_bytes()[:-30])

    (found,) = run("doctor", "--json").rows
    assert found["remedy"].startswith("trunkline doctor --salvage;")
    run("doctor", "--salvage")

    assert run("pub", "a", "3").code == 0
    assert [row["offset"] for row in run("tail", "a", "--json").rows][-1] == 3
