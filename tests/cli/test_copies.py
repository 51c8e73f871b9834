"""backup and restore."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from trunkline.log import atomic

from .conftest import Done, Run, Start, lines


@pytest.fixture
def filled(run: Run) -> None:
    run("init")
    run("topic", "create", "t", "--partitions", "2", "--segment-records", "20")
    run("pub", "t", stdin=lines(100))
    run("pub", "t", stdin=lines(3, 101))
    run("sub", "t", "--group", "g", "--count", "30", "--wait", "5")


def state(run: Run, url: str) -> tuple[str, str, str]:
    """What a user sees of a bus."""
    return (
        run("get", "t", "1:", "--url", url).out,
        run("group", "ls", "--json", "--url", url).out,
        run("topic", "info", "t", "--url", url, "--json").out,
    )


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("name", ["copy", "copy.tar.gz", "copy.tgz"])
def test_what_was_backed_up_comes_back(run: Run, home: Path, name: str) -> None:
    assert run("backup", name).code == 0
    assert run("restore", name, "new", "--json").rows[0]["problems"] == []

    assert state(run, "file:new") == state(run, "file:.bus")
    assert run("verify", "--url", "file:new").code == 0
    rest = run("sub", "t", "--group", "g", "--wait", "0.3", "--url", "file:new").rows
    assert len(rest) == 73
    assert run("pub", "t", "1", "--key", "k", "--url", "file:new").code == 0
    assert sorted(path.name for path in home.iterdir()) == sorted([".bus", name, "new"])
    assert (home / "new").stat().st_mode & 0o777 == 0o700


@pytest.mark.usefixtures("filled")
def test_compressed_segments_dead_letters_and_damage_are_copied_too(run: Run, home: Path) -> None:
    from trunkline.folder import Folder
    from trunkline.folder.upkeep import pack_segments

    folder = Folder(".bus")
    assert pack_segments(folder, "t", 0) == 1
    folder.close()
    run("pub", "t.DLQ", "1", "-H", "dlq-reason:rejected")
    damaged = home / ".bus" / "wal" / "t~1.00000001.jsonl"
    damaged.rename(f"{damaged}.corrupt")

    done = run("backup", "b.tgz")
    assert (done.err, done.code) == ("", 0)
    done = run("restore", "b.tgz", "new")

    assert done.code == 1
    assert "set aside as damaged" in done.err
    assert run("doctor", "--salvage", "--url", "file:new").code == 0
    run("doctor", "--salvage")
    assert state(run, "file:new")[0] == state(run, "file:.bus")[0]
    assert len(run("get", "t.DLQ", "1:", "--url", "file:new").rows) == 1


def test_a_backup_taken_beside_writers_and_members_is_whole(run: Run, start: Start) -> None:
    run("init")
    run("topic", "create", "t", "--segment-records", "500", "--retention-records", "20000")
    writer = start("pub", "t", "1", "--count", "400000")
    member = start("sub", "t", "--group", "g", "--format", "%o")
    assert member.stdout is not None
    while int(member.stdout.readline()) < 2000:
        pass
    drain = start("sub", "t", "--wait", "60", "--count", "1")
    drain.wait(20)

    for number in range(3):
        assert run("backup", f"b{number}.tgz" if number else "b0").code == 0
    assert writer.poll() is None
    for process in (writer, member):
        process.kill()
        process.communicate()
    for number in range(3):
        name = f"b{number}.tgz" if number else "b0"
        assert run("restore", name, f"new{number}").err == ""
        url = f"file:new{number}"
        (group,) = run("group", "ls", "--json", "--url", url).rows
        (topic,) = run("topic", "ls", "--json", "--url", url).rows
        assert topic["records"] >= 2000
        assert group["lag"] == topic["records"] - group["floor"]
        following = run("sub", "t", "--group", "g", "--count", "1", "--wait", "5", "--url", url)
        assert following.rows[0]["offset"] <= group["floor"] + 1


@pytest.mark.usefixtures("filled")
def test_nothing_is_overwritten_unless_forced(run: Run, home: Path) -> None:
    (home / "full").mkdir()
    (home / "full" / "file").write_text("mine")
    (home / "empty").mkdir()
    run("backup", "b.tgz")

    assert run("backup", "b.tgz").code == 1
    assert run("backup", "b.tgz", "--force").code == 0
    assert run("backup", "full").code == 1
    assert run("backup", "empty").code == 0
    assert run("backup", ".bus/inside").code == 4
    assert run("restore", "b.tgz", "full").code == 1
    assert (home / "full" / "file").read_text() == "mine"
    shown = run("restore", "b.tgz", "full", "--force", "--dry-run")
    assert (shown.code, (home / "full" / "file").exists()) == (0, True)
    assert run("restore", "b.tgz", "full", "--force").code == 0
    assert state(run, "file:full") == state(run, "file:.bus")
    assert run("restore", "nope.tgz", "x").code == 2
    assert run("backup", "x", "--url", "file:nope").code == 2


def test_a_link_leads_to_where_the_folder_is(run: Run, home: Path) -> None:
    """A bus is often a link to another disk: who opens it there shall find what was restored."""
    run("pub", "t", "1")
    (home / "disk").mkdir()
    for name in ("copy", "bus"):
        (home / "disk" / name).mkdir()
        (home / name).symlink_to(f"disk/{name}")

    assert run("backup", "copy").code == 0
    assert run("backup", "--url", "file:disk/copy", "copy/inside").code == 4
    assert run("backup", "--url", "file:copy", "disk/copy/inside").code == 4
    run("pub", "--url", "file:bus", "other", "2")
    assert run("restore", "copy", "bus", "--force").code == 0
    assert run("topic", "ls", "-q", "--url", "file:disk/bus").out == "t\n"
    assert sorted(os.listdir(home)) == [".bus", "bus", "copy", "disk"]
    assert sorted(os.listdir(home / "disk")) == ["bus", "copy"]


def test_the_name_that_is_given_says_whether_a_backup_is_an_archive(run: Run, home: Path) -> None:
    """Also where it is a link to another name."""
    run("pub", "t", "1")
    (home / "latest.tgz").symlink_to("today")
    assert run("backup", "latest.tgz").code == 0
    assert (home / "today").is_file()
    assert run("restore", "latest.tgz", "there").code == 0


@pytest.mark.parametrize("moves", [1, 2])
def test_a_bus_is_there_whenever_its_replacement_is_interrupted(
    run: Run, home: Path, monkeypatch: pytest.MonkeyPatch, moves: int
) -> None:
    run("pub", "t", "1")
    run("backup", "copy")
    run("pub", "other", "2")
    move = atomic.move_file
    done = 0

    def interrupted(source: str, target: str) -> None:
        nonlocal done
        done += 1
        move(source, target)
        if done == moves:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "move_file", interrupted)
        assert run("restore", "copy", ".bus", "--force").code == 130
    assert run("topic", "ls", "-q").out == ("other\nt\n" if moves == 1 else "t\n")


@pytest.mark.usefixtures("filled")
def test_a_bus_in_use_is_not_replaced(run: Run, start: Start) -> None:
    run("backup", "b.tgz")
    member = start("sub", "t", "--group", "g")
    assert member.stdout is not None
    member.stdout.readline()

    done = run("restore", "b.tgz", ".bus", "--force")

    assert (done.code, "a running process uses" in done.err) == (1, True)


Entry = tuple[tarfile.TarInfo, bytes]


def entry(name: str, data: bytes = b"", **fields: object) -> Entry:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


GOOD = entry("bus.json", b'{"format":1,"id":"x"}\n')
HOSTILE: dict[str, list[Entry]] = {
    "dot dot": [GOOD, entry("wal/../../evil", b"x")],
    "dot dot first": [GOOD, entry("../evil", b"x")],
    "absolute": [GOOD, entry("/tmp/trunkline-evil", b"x")],
    "unknown file": [GOOD, entry("evil", b"x")],
    "unknown folder": [GOOD, entry("bin/evil", b"x")],
    "deeper": [GOOD, entry("wal/a/b", b"x")],
    "hidden": [GOOD, entry("wal/.evil", b"x")],
    "newline": [GOOD, entry("wal/a\nb", b"x")],
    "symlink": [GOOD, entry("wal/x", type=tarfile.SYMTYPE, linkname="/etc/passwd")],
    "hard link": [GOOD, entry("wal/x", type=tarfile.LNKTYPE, linkname="bus.json")],
    "device": [GOOD, entry("wal/x", type=tarfile.CHRTYPE, devmajor=1, devminor=3)],
    "fifo": [GOOD, entry("wal/x", type=tarfile.FIFOTYPE)],
    "folder in place of a file": [GOOD, entry("wal/x", type=tarfile.DIRTYPE)],
    "twice": [GOOD, GOOD],
    "no bus": [entry("wal/x.head", b"")],
    "nothing": [],
}


def archive(path: Path, entries: list[Entry]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for info, data in entries:
            tar.addfile(info, io.BytesIO(data))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_refused_and_leaves_nothing(run: Run, home: Path, name: str) -> None:
    archive(home / "evil.tgz", HOSTILE[name])

    done = run("restore", "evil.tgz", "new")

    assert done.code == 4
    assert done.err.startswith("trunkline: ")
    assert [path.name for path in home.iterdir()] == ["evil.tgz"]
    assert not (home.parent / "evil").exists()
    assert not os.path.exists("/tmp/trunkline-evil")


def test_an_archive_that_unpacks_to_far_too_much_is_refused(run: Run, home: Path) -> None:
    data = bytes(80 * 1024 * 1024)
    archive(home / "bomb.tgz", [GOOD, entry("wal/x.00000001.jsonl", data)])
    assert (home / "bomb.tgz").stat().st_size < 200_000

    done = run("restore", "bomb.tgz", "new")

    assert (done.code, "unpack to more than" in done.err) == (4, True)
    assert [path.name for path in home.iterdir()] == ["bomb.tgz"]


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _spoil(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes(64) + data[middle + 64 :]


def _lie(data: bytes) -> bytes:
    """An entry that says it is longer than the archive."""
    plain = bytearray(gzip.decompress(data))
    plain[124:136] = b"00007777777\0"
    plain[148:156] = b" " * 8
    plain[148:156] = b"%06o\0 " % sum(plain[:512])
    return gzip.compress(bytes(plain))


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize(
    "harm",
    [_cut, _spoil, _lie, lambda _: b"", lambda _: b"not an archive"],
    ids=["cut", "spoilt", "lying", "empty", "text"],
)
def test_a_damaged_archive_is_refused(run: Run, home: Path, harm: Callable[[bytes], bytes]) -> None:
    run("backup", "b.tgz")
    (home / "b.tgz").write_bytes(harm((home / "b.tgz").read_bytes()))

    done: Done = run("restore", "b.tgz", "new")

    assert done.code in (1, 4)
    assert done.err.startswith("trunkline: ")
    assert sorted(path.name for path in home.iterdir()) == [".bus", "b.tgz"]


@pytest.mark.usefixtures("filled")
def test_a_folder_with_links_is_refused(run: Run, home: Path) -> None:
    run("backup", "b")
    (home / "b" / "wal" / "x.00000001.jsonl").symlink_to("/etc/hostname")

    done = run("restore", "b", "new")

    assert (done.code, "not a plain file" in done.err) == (4, True)
    assert not (home / "new").exists()


def test_a_name_of_another_archive_is_refused(run: Run, home: Path) -> None:
    run("pub", "t", "1")

    for name in ("bus.zip", "bus.tar", "bus.json.gz"):
        assert run("backup", name).code == 4
    assert [path.name for path in home.iterdir()] == [".bus"]


def test_a_backup_of_no_bus_makes_no_folder(run: Run, home: Path) -> None:
    assert run("backup", "new/bus.tgz").code == 2
    assert list(home.iterdir()) == []


def test_a_redrive_meanwhile_is_in_a_backup_as_a_letter_or_as_a_record(
    run: Run, home: Path
) -> None:
    """It is given to its group first, then closed: so the books of the letters are copied first."""
    run("pub", "t", "1")
    run("sub", "t", "--group", "a", "--count", "1")
    run("pub", "t.DLQ", "1", "-H", "dlq-reason:rejected")
    run("sub", "t.DLQ", "--group", "z", "--count", "1")
    run("dlq", "drop", "t", "--yes")
    run("backup", "b.tgz")
    with tarfile.open(home / "b.tgz") as tar:
        groups = [name for name in tar.getnames() if name.endswith(".journal")]
    assert groups == [f"offsets/{name}.journal" for name in ("t.DLQ__desk", "t__a", "t.DLQ__z")]
