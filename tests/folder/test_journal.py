"""A group's files: shared by processes, cut off anywhere, damaged, newer."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from kit.folders import Opener
from kit.log_events import TOPIC, publish
from trunkline.errors import Conflict, Corrupt, LockTimeout, UnsupportedFormat
from trunkline.folder import Folder, upkeep
from trunkline.folder.group_file import GroupFile
from trunkline.group import Group
from trunkline.log import atomic
from trunkline.log.line import close_line
from trunkline.names import GroupKey
from trunkline.options import GroupOptions
from trunkline.testing.clock import ManualClock

KEY = GroupKey(TOPIC, 0, "g")
JOURNAL, SNAPSHOT, BACKUP = (f"offsets/t__g.{kind}" for kind in ("journal", "json", "json.bak"))


@pytest.fixture
def folder(opener: Opener) -> Folder:
    folder = opener(snapshot_bytes=1024)
    publish(folder, range(1, 21))
    folder.step(KEY, lambda group: group.define(GroupOptions(ordering="none"), 0))
    return folder


def settle(folder: Folder, *offsets: int) -> None:
    folder.step(KEY, lambda group: group.settle(offsets))


def settled(folder: Folder) -> set[int]:
    group = folder.group(KEY)
    return {offset for offset in range(1, 21) if group.is_settled(offset)}


def take(folder: Folder, *offsets: int) -> None:
    def step(group: Group) -> None:
        for offset in offsets:
            group.offer(offset)
        group.take(folder.join(), now=folder.clock.monotonic(), wall=0.0, limit=len(offsets))

    folder.step(KEY, step)


def test_another_process_sees_each_change(folder: Folder, opener: Opener) -> None:
    other = opener()
    for offset in range(1, 20, 2):
        settle(folder, offset)
        assert settled(other) == set(range(1, offset + 1))
        settle(other, offset + 1)
        assert settled(folder) == set(range(1, offset + 2))


def test_a_new_generation_is_seen_by_another_process(folder: Folder, opener: Opener) -> None:
    other = opener(snapshot_bytes=1024)
    settle(other)
    for _ in range(30):
        folder.step(KEY, lambda group: group.pause(not group.paused))
    settle(folder, 1, 3)
    assert b'"generation":1,' not in Path(f"{folder.path}/{JOURNAL}").read_bytes()
    assert os.stat(f"{folder.path}/{JOURNAL}").st_size < 1200
    assert settled(other) == {1, 3}
    settle(other, 2)
    assert settled(folder) == {1, 2, 3}


def test_a_death_between_snapshot_and_journal_loses_nothing_of_the_others(
    folder: Folder, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others go on with the old journal; what they note there counts."""
    other = opener()
    settle(other, 1)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(GroupFile, "_begin_journal", die)
        with pytest.raises(KeyboardInterrupt):
            folder._groups._files[KEY].renew(1)
    settle(other, 2, 5)
    assert settled(opener()) == {1, 2, 5}
    assert settled(other) == {1, 2, 5}


@pytest.mark.parametrize("name", [SNAPSHOT, BACKUP])
@pytest.mark.parametrize("how", ["damaged", "gone"])
def test_either_copy_of_the_base_will_do(
    name: str, how: str, folder: Folder, root: str, opener: Opener
) -> None:
    settle(folder, 1, 4)
    folder._groups._files[KEY].renew(1)
    settle(folder, 2)
    path = Path(root, name)
    assert path.exists()
    path.unlink() if how == "gone" else path.write_bytes(path.read_bytes()[:-9])
    assert settled(opener()) == {1, 2, 4}


def test_without_any_base_it_is_an_error(folder: Folder, root: str, opener: Opener) -> None:
    folder._groups._files[KEY].renew(1)
    for name in (SNAPSHOT, BACKUP):
        os.unlink(f"{root}/{name}")
    with pytest.raises(Corrupt, match="snapshot"):
        opener().group(KEY)


def test_a_damaged_snapshot_does_not_hide_an_older_one(
    folder: Folder, root: str, opener: Opener
) -> None:
    settle(folder, 1)
    folder._groups._files[KEY].save(1)
    settle(folder, 2)
    folder._groups._files[KEY].save(1)
    Path(root, SNAPSHOT).write_bytes(b"{}")
    assert settled(opener()) == {1, 2}
    Path(root, BACKUP).write_bytes(b"{}")
    assert settled(opener()) == {1, 2}, "the first journal needs no snapshot"
    folder._groups._files[KEY].renew(1)
    for name in (SNAPSHOT, BACKUP):
        Path(root, name).write_bytes(b"{}")
    with pytest.raises(Corrupt, match="no intact snapshot"):
        opener().group(KEY)


@pytest.mark.parametrize("name", [JOURNAL, SNAPSHOT])
def test_a_newer_format_is_refused_and_left_alone(
    name: str, folder: Folder, root: str, opener: Opener
) -> None:
    folder._groups._files[KEY].save(1)
    path = Path(root, name)
    first, _, rest = path.read_bytes().partition(b"\n")
    newer = close_line(first[:-18].replace(b'"format":1', b'"format":2')) + rest
    path.write_bytes(newer)
    before = {p: p.read_bytes() for p in Path(root, "offsets").iterdir()}
    said = rf"^offsets/\S+ has format 2, this version reads up to 1: see {path} "
    for _ in range(2):
        with pytest.raises(UnsupportedFormat, match=said):
            opener().group(KEY)
        with pytest.raises(UnsupportedFormat, match=said):
            opener().step(KEY, lambda group: group)
    assert {p: p.read_bytes() for p in Path(root, "offsets").iterdir()} == before


@pytest.mark.parametrize("line", [b'{"op":"renamed","to":"x"', b'{"op":"settled","offsets":5'])
def test_what_only_a_newer_version_knows_is_refused_and_left_alone(
    line: bytes, folder: Folder, root: str, opener: Opener
) -> None:
    folder.close()
    with open(f"{root}/{JOURNAL}", "ab") as file:
        file.write(close_line(line))
    before = Path(root, JOURNAL).read_bytes()
    with pytest.raises(UnsupportedFormat, match=r"t__g\.journal: .* \(a newer version"):
        opener().group(KEY)
    with pytest.raises(UnsupportedFormat, match=r"t__g\.journal: .* \(a newer version"):
        opener().step(KEY, lambda group: group.seek(1))
    assert Path(root, JOURNAL).read_bytes() == before


def test_a_snapshot_with_an_option_of_a_newer_version_is_refused(
    folder: Folder, root: str, opener: Opener
) -> None:
    folder.close()
    path = Path(root, SNAPSHOT)
    text = path.read_bytes().rstrip()[:-18].replace(b'"options":{', b'"options":{"x":1,')
    path.write_bytes(close_line(text))
    with pytest.raises(UnsupportedFormat, match=r"there is no field options\.x \(a newer version"):
        opener().group(KEY)


def test_damage_below_what_was_synced_is_an_error(
    folder: Folder, root: str, opener: Opener
) -> None:
    settle(folder, 1)
    folder.sync_groups()
    settle(folder, 2)
    settle(folder, 3)
    good = Path(root, JOURNAL).read_bytes()
    early = good.replace(b"[[1,1]]", b"[[9,9]]")
    Path(root, JOURNAL).write_bytes(early)
    other = opener()
    for _ in range(2):
        with pytest.raises(Corrupt) as caught:
            other.group(KEY)
        assert caught.value.position == early.index(b'{"op":"settled"')
    late = good.replace(b"[[2,2]]", b"[[9,9]]")
    Path(root, JOURNAL).write_bytes(late)
    assert settled(opener()) == {1}, "what was never durable is done again"


def test_a_journal_without_its_first_line_is_an_error(
    folder: Folder, root: str, opener: Opener
) -> None:
    journal = Path(root, JOURNAL)
    whole = journal.read_bytes()
    rest = whole.partition(b"\n")[2]
    journal.write_bytes(rest)
    with pytest.raises(Corrupt, match="its first line is missing"):
        opener().group(KEY)
    assert journal.read_bytes() == rest
    journal.write_bytes(whole)


@pytest.mark.parametrize("junk", [b"\xff\xfe" * 200 + b"\n", b"\xff\xfe" * 200, b'{"op":"x"}\n'])
def test_a_journal_that_is_one_strange_line_is_not_taken_for_a_new_one(
    folder: Folder, root: str, opener: Opener, junk: bytes
) -> None:
    journal = Path(root, JOURNAL)
    settle(folder, 1)
    whole = journal.read_bytes()
    journal.write_bytes(junk)
    with pytest.raises(Corrupt, match="its first line is damaged"):
        opener().group(KEY)
    assert journal.read_bytes() == junk
    journal.write_bytes(whole)


@pytest.mark.parametrize("left", [0, 1, 100])
@pytest.mark.parametrize("end", [b"", b"\0" * 400])
def test_a_journal_that_was_torn_when_it_was_begun_is_begun_again(
    folder: Folder, root: str, opener: Opener, left: int, end: bytes
) -> None:
    journal = Path(root, JOURNAL)
    journal.write_bytes(journal.read_bytes()[:left] + end)
    assert not opener().group(KEY).created


def test_a_step_that_fails_leaves_no_trace(folder: Folder, opener: Opener) -> None:
    def step(group: Group) -> None:
        group.settle([1])
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        folder.step(KEY, step)
    assert settled(folder) == settled(opener()) == set()


def test_threads_step_one_after_the_other(folder: Folder, opener: Opener) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(group: Group) -> None:
        begun.set()
        go_on.wait(20)
        group.settle([1])

    thread = threading.Thread(target=folder.step, args=(KEY, slow))
    thread.start()
    assert begun.wait(20)
    with pytest.raises(LockTimeout):
        folder.step(KEY, lambda group: group.settle([2]), timeout_s=0.01)
    go_on.set()
    settle(folder, 2)
    thread.join()
    assert settled(folder) == settled(opener()) == {1, 2}


def test_a_conflicting_policy_is_refused(folder: Folder) -> None:
    with pytest.raises(Conflict):
        folder.step(KEY, lambda group: group.define(GroupOptions(max_retries=1), 0))


def test_what_was_asked_for_is_durable_at_once(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    sync = atomic.sync

    def note(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        sync(fd)

    monkeypatch.setattr(atomic, "sync", note)
    settle(folder, 1)
    assert synced == []
    folder.step(KEY, lambda group: group.seek(3))
    assert [os.path.basename(path) for path in synced] == ["t__g.journal"]
    folder.step(KEY, lambda group: group.edit(GroupOptions(max_retries=1)))
    assert len(synced) == 2


def test_leases_survive_a_snapshot_of_a_later_boot(
    folder: Folder, opener: Opener, clock: ManualClock
) -> None:
    """The journal began under one boot; now is another, and a third process joins."""
    settle(folder, 1)
    folder.close()
    clock.boot = "another"
    second = opener()
    take(second, 2, 3)
    second._groups._files[KEY].save(1)
    third = opener()
    assert {lease.by for lease in third.group(KEY).leases.values()} == {second.member}
    assert sorted(third.group(KEY).leases) == [2, 3]


def test_leases_do_not_survive_a_boot(folder: Folder, opener: Opener, clock: ManualClock) -> None:
    take(folder, 1, 2)
    folder.abandon()
    clock.boot = "another"
    assert opener().group(KEY).leases == {}


def test_a_dead_member_holds_nothing(folder: Folder, opener: Opener) -> None:
    take(folder, 1, 2)
    other = opener()
    assert sorted(other.group(KEY).leases) == [1, 2]
    folder.abandon()
    assert other.group(KEY).leases == {}
    assert other.group(KEY).attempts == {1: 1, 2: 1}, "the attempt counts, whoever died of it"


def test_a_removed_group_begins_anew(folder: Folder, opener: Opener) -> None:
    other = opener()
    settle(folder, 1)
    assert settled(other) == {1}
    folder.remove_group(KEY)
    assert folder.groups() == []
    other.step(KEY, lambda group: group.define(GroupOptions(), 0))
    assert settled(other) == settled(folder) == set()


@pytest.mark.parametrize("renewed", [False, True])
@pytest.mark.parametrize("removed", range(5))
def test_a_removal_that_is_cut_short_leaves_a_group_or_none(
    folder: Folder,
    opener: Opener,
    root: str,
    monkeypatch: pytest.MonkeyPatch,
    removed: int,
    renewed: bool,
) -> None:
    settle(folder, 1)
    if renewed:
        folder._groups._files[KEY].renew(1)
    settle(folder, 2)
    folder.close()
    dies = opener()
    remove = atomic.remove_files
    with monkeypatch.context() as patch:
        patch.setattr(atomic, "remove_files", lambda paths: remove(paths[:removed]))
        dies.remove_group(KEY)
    dies.abandon()

    after = opener()
    assert after.groups() == ([KEY] if removed < 3 else [])
    upkeep.tend(after)
    assert bool(os.listdir(os.path.join(root, "offsets"))) is (removed < 3)
    after.step(KEY, lambda group: group.define(GroupOptions(ordering="none"), 0))
    assert settled(after) == ({1, 2} if removed < 3 else set())
    after.remove_group(KEY)
    assert os.listdir(os.path.join(root, "offsets")) == []


def test_upkeep_leaves_the_lock_of_a_group_that_was_made_since_it_looked(
    folder: Folder, opener: Opener, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = os.path.join(root, "offsets", f"{TOPIC}__g.lock")
    settle(folder, 1)
    assert os.path.exists(lock)
    other = opener()
    monkeypatch.setattr(other._root, "names", lambda _place: [os.path.basename(lock)])
    upkeep.tend(other)
    assert os.path.exists(lock)


def test_a_process_that_only_looked_at_a_group_saves_nothing_of_it(
    folder: Folder, opener: Opener, root: str
) -> None:
    """It would read the log for it, which may be what cannot be read."""
    settle(folder, 1)
    folder.close()
    head = os.path.join(root, "wal", f"{TOPIC}.head")
    os.unlink(head)
    os.symlink("nowhere", head)
    other = opener()
    assert other.has_group(KEY)
    other.close()


def test_groups_that_come_and_go_leave_little_behind(folder: Folder) -> None:
    policy = GroupOptions(max_retries=1)
    for number in range(300):
        key = KEY._replace(group=f"g{number}")
        folder.step(key, lambda group: group.define(policy, 0))
        folder.remove_group(key)
    assert list(folder._groups._files) == [KEY]
    assert len(folder._groups._removed) == 256
    assert folder.step(key, lambda group: group.was) == policy
