"""The store of files: one maker, no half files, damage found, and only folders that nobody else can write to."""

from __future__ import annotations

import contextvars
import errno
import fcntl
import logging
import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fusion_moe import options
from fusion_moe.errors import OptionError
from fusion_moe.runtime import store

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
FORK = multiprocessing.get_context("fork")
CONTENT = os.urandom(1 << 18)


@pytest.fixture(autouse=True)
def folder(tmp_path):
    """cache_dir of the test: not there yet."""
    with options.override(cache_dir=str(tmp_path / "a" / "cache")):
        yield tmp_path / "a" / "cache"


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """The system's folder for temporary files, as far as the store knows."""
    made = tmp_path / "tmp"
    made.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(made))
    store._private_folder.cache_clear()
    return made


def slowly(path):
    """Makes CONTENT in 16 pieces, in a third of a second."""
    with path.with_name("made").open("ab"), path.open("wb", buffering=0) as file:
        for at in range(0, len(CONTENT), len(CONTENT) // 16):
            file.write(CONTENT[at : at + len(CONTENT) // 16])
            time.sleep(0.02)


def wrong(path):
    raise AssertionError(f"{path} was made again")


def together(work, count=20):
    """What `work()` gave in `count` processes that run at once."""
    answers, start = FORK.SimpleQueue(), FORK.Barrier(count)

    def process():
        start.wait()
        try:
            answers.put(work())
        except BaseException as e:
            answers.put(repr(e))

    running = [FORK.Process(target=process) for _ in range(count)]
    for p in running:
        p.start()
    found = [answers.get() for _ in running]
    for p in running:
        p.join()
    return found


def test_a_file_is_made_once_and_nothing_else_is_left(folder):
    path = store.get_or_make("key.bin", slowly)
    assert path.read_bytes() == CONTENT
    assert store.get_or_make("key.bin", wrong) == path
    assert sorted(p.name for p in folder.iterdir()) == ["key.bin", "key.bin.lock", "key.bin.sha256"]
    assert folder.stat().st_mode & 0o777 == 0o700


def test_keys_tell_their_parts_apart():
    keys = [store.key_of(*parts) for parts in [(), ("",), ("ab",), ("a", "b"), ("b", "a"), ("a", "b", ""), (b"a", "c")]]
    assert len(set(keys)) == len(keys)
    assert store.key_of("a", b"b") == store.key_of(b"a", "b")


def test_twenty_processes_make_it_once():
    def work():
        made = []
        path = store.get_or_make("key.bin", lambda p: (made.append(p), slowly(p)))
        return path.read_bytes() == CONTENT, len(made)

    found = together(work)
    assert all(whole for whole, _ in found), found
    assert sum(makers for _, makers in found) == 1


def test_threads_make_it_once():
    made = []

    def work(_):
        return store.get_or_make("key.bin", lambda p: (made.append(p), slowly(p))).read_bytes() == CONTENT

    with ThreadPoolExecutor(8) as pool:
        contexts = [contextvars.copy_context() for _ in range(16)]  # a thread does not inherit the options in force
        assert all(pool.map(lambda context: context.run(work, None), contexts))
    assert len(made) == 1


def test_a_file_system_without_locks(monkeypatch):
    def no_locks(file, how):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert together(lambda: store.get_or_make("key.bin", slowly).read_bytes() == CONTENT, 6) == [True] * 6


def test_a_killed_maker_leaves_nothing_that_matters(folder):
    writing = FORK.Event()

    def make(path):
        path.write_bytes(CONTENT[:100])
        writing.set()
        time.sleep(60)

    maker = FORK.Process(target=store.get_or_make, args=("key.bin", make))
    maker.start()
    assert writing.wait(20)
    os.kill(maker.pid, signal.SIGKILL)
    maker.join()

    start = time.monotonic()
    assert store.get_or_make("key.bin", slowly).read_bytes() == CONTENT
    assert time.monotonic() - start < 10, "the lock of the dead was waited for"
    (left,) = folder.glob("*.tmp")
    os.utime(left, (0, 0))
    store.get_or_make("other.bin", slowly)
    assert not left.exists(), "what was left long ago is swept"


def test_a_lock_does_not_outlive_its_block_in_a_forked_child(folder):
    """A child inherits the open lock file of a parent that forks while it makes something."""
    end = FORK.Event()
    child = FORK.Process(target=end.wait, args=(60,))
    store.get_or_make("key.bin", lambda path: (child.start(), slowly(path)))
    (folder / "key.bin").unlink()
    start = time.monotonic()
    assert store.get_or_make("key.bin", slowly).read_bytes() == CONTENT
    assert time.monotonic() - start < 20, "waited for a child that holds the file and not the lock"
    end.set()
    child.join()


DAMAGE = {
    "cut short": lambda path: os.truncate(path, 1000),
    "emptied": lambda path: os.truncate(path, 0),
    "one bit": lambda path: path.write_bytes(bytes([CONTENT[0] ^ 1]) + CONTENT[1:]),
    "longer": lambda path: path.write_bytes(CONTENT + b"\0"),
    "gone": lambda path: path.unlink(),
    "no digest": lambda path: path.with_name("key.bin.sha256").unlink(),
    "digest cut short": lambda path: os.truncate(path.with_name("key.bin.sha256"), 7),
    "another key's": lambda path: [p.rename(str(p).replace("other", "key")) for p in path.parent.glob("other.bin*")],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_is_not_as_it_was_made_is_made_again(damage, folder):
    store.get_or_make("other.bin", lambda path: path.write_bytes(b"other"))
    path = store.get_or_make("key.bin", slowly)
    DAMAGE[damage](path)
    assert store.get_or_make("key.bin", slowly).read_bytes() == CONTENT
    assert store.get_or_make("key.bin", wrong).read_bytes() == CONTENT


def test_a_file_put_there_by_somebody_else(folder):
    folder.mkdir(parents=True, mode=0o700)
    (folder / "key.bin").write_bytes(b"\x7fELF, and evil")
    assert store.get_or_make("key.bin", slowly).read_bytes() == CONTENT


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_with_the_right_digest_is_not_used():
    path = store.get_or_make("key.bin", lambda path: path.write_bytes(CONTENT))
    os.chown(path, 12345, -1)
    store.get_or_make("key.bin", slowly)
    assert path.stat().st_uid == 0


def test_what_make_raises_is_raised_and_leaves_no_file(folder):
    def full(path):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        store.get_or_make("key.bin", full)
    assert [p.name for p in folder.iterdir()] == ["key.bin.lock"]
    assert store.get_or_make("key.bin", slowly).read_bytes() == CONTENT


# Folders ------------------------------------------------------------------------------------------------------------


def said(caplog, temporary, why):
    """Whether one warning said why the folder is not used, and the file lies in a folder of this user instead."""
    with caplog.at_level(logging.WARNING, "fusion_moe"):
        for key in "a.bin", "b.bin", "a.bin":
            path = store.get_or_make(key, lambda path: path.write_bytes(CONTENT))
    (record,) = caplog.records
    assert why in record.getMessage()
    assert "FUSION_MOE_CACHE_DIR" in record.getMessage()
    assert path.parent.parent == temporary
    assert path.parent.stat().st_mode & 0o777 == 0o700
    return path.parent.name


@pytest.mark.parametrize("place", ["a file", "a system folder"])
def test_a_folder_that_cannot_be_made(place, tmp_path, temporary, caplog):
    (tmp_path / "file").write_text("")
    with options.override(cache_dir={"a file": str(tmp_path / "file" / "cache"), "a system folder": "/proc/cache"}[place]):
        assert said(caplog, temporary, "cannot be made") == f"fusion_moe-{os.geteuid()}"


def test_a_folder_that_others_can_write_to(folder, temporary, caplog):
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    said(caplog, temporary, "can be written by other users (mode 777; chmod 700 would do)")
    assert not list(folder.iterdir())


def test_a_folder_of_another_user_and_a_temporary_one_too(folder, temporary, monkeypatch, caplog):
    me = os.geteuid() + 1
    folder.mkdir(parents=True)
    (temporary / f"fusion_moe-{me}").mkdir()  # as somebody would who knows our name for it
    if me == 1:  # what root owns is trusted
        os.chown(folder, 12345, -1)
        os.chown(temporary / f"fusion_moe-{me}", 12345, -1)
    monkeypatch.setattr(os, "geteuid", lambda: me)
    with caplog.at_level(logging.WARNING, "fusion_moe"):
        chosen = store.folder()
    assert "belongs to another user" in caplog.text
    assert (chosen.parent, chosen.stat().st_mode & 0o777, list(chosen.iterdir())) == (temporary, 0o700, [])
    assert chosen == store.folder()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a user to become")
def test_a_folder_without_the_right_to_write(folder, temporary):
    """In a process of a user who, unlike root, can be refused."""
    folder.mkdir(parents=True, mode=0o700)
    for path in [folder, temporary, *folder.parents]:
        if path.is_relative_to(folder.parents[2]):
            os.chown(path, 12345, -1)

    def work():
        os.setuid(12345)
        path = store.get_or_make("key.bin", slowly)
        folder.chmod(0o500)
        return store.get_or_make("key.bin", wrong) == path, str(store.get_or_make("other.bin", slowly).parent)

    grandparents = [p for p in folder.parents if p.stat().st_mode & 0o011 == 0]  # pytest's own folders, which only root enters
    try:
        for p in grandparents:
            p.chmod(p.stat().st_mode | 0o011)
        assert together(work, 1) == [(True, str(temporary / "fusion_moe-12345"))]
    finally:
        for p in grandparents:
            p.chmod(p.stat().st_mode & ~0o011)


# The option ---------------------------------------------------------------------------------------------------------


def test_the_folder_is_no_part_of_keys():
    with options.override(cache_dir="/one"):
        one = options.current()
    with options.override(cache_dir="/two"):
        two = options.current()
        carried = options.from_key(one.key())
    assert (one, hash(one), one.key()) == (two, hash(two), two.key())
    assert "/one" not in one.key()
    assert carried.cache_dir == "/two"
    forced = one.replace(cpu_isa="generic")
    assert forced != one
    assert options.from_key(forced.key()) == forced


def test_where_caches_belong(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert options._cache_home({}) == options._cache_home({"XDG_CACHE_HOME": "relative"}) == "/home/someone/.cache/fusion_moe"
    assert options._cache_home({"XDG_CACHE_HOME": "/elsewhere"}) == "/elsewhere/fusion_moe"
    assert options.from_environment({"FUSION_MOE_CACHE_DIR": "~/x"}).cache_dir == "~/x"
    with options.override(cache_dir="~/x"), pytest.raises(OptionError):
        options.current().replace(cache_dir=Path("x"))
