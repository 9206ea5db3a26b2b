"""The store of files: one maker, no half files, and only files and folders that nobody else can
write to.
"""

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

import pytest

from fusion_moe import options
from fusion_moe.errors import BuildError
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
    assert sorted(p.name for p in folder.iterdir()) == ["key.bin", "key.bin.lock"]


def test_keys_tell_their_parts_apart():
    keys = [
        store.key_of(*parts)
        for parts in [(), ("",), ("ab",), ("a", "b"), ("b", "a"), ("a", "b", ""), (b"a", "c")]
    ]
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

    def work():
        store.get_or_make("key.bin", lambda p: (made.append(p), slowly(p)))

    with ThreadPoolExecutor(8) as pool:
        # a thread does not inherit the options in force
        for ran in [pool.submit(contextvars.copy_context().run, work) for _ in range(16)]:
            ran.result()
    assert len(made) == 1


def test_a_file_system_without_locks(monkeypatch):
    def no_locks(file, how):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert (
        together(lambda: store.get_or_make("key.bin", slowly).read_bytes() == CONTENT, 6)
        == [True] * 6
    )


def test_a_killed_maker_leaves_nothing_that_matters(folder):
    writing = FORK.Event()

    def make(path):
        path.write_bytes(CONTENT[:100])
        writing.set()
        time.sleep(600)

    maker = FORK.Process(target=store.get_or_make, args=("key.bin", make))
    maker.start()
    assert writing.wait(300)
    store.get_or_make("other.bin", slowly)  # whose maker leaves alone what the living have
    assert list(folder.glob("key.bin-*.tmp"))
    os.kill(maker.pid, signal.SIGKILL)
    maker.join()
    start = time.monotonic()
    assert store.get_or_make("key.bin", slowly).read_bytes() == CONTENT
    assert time.monotonic() - start < 60, "the lock of the dead was waited for"
    assert not list(folder.glob("*.tmp"))


def test_a_lock_does_not_outlive_its_block_in_a_forked_child(folder):
    """A child inherits the open lock file of a parent that forks while it makes something."""
    end = FORK.Event()
    child = FORK.Process(target=end.wait, args=(600,))
    store.get_or_make("key.bin", lambda path: (child.start(), slowly(path)))
    (folder / "key.bin").unlink()
    start = time.monotonic()
    assert store.get_or_make("key.bin", slowly).read_bytes() == CONTENT
    assert time.monotonic() - start < 60, "waited for a child that holds the file and not the lock"
    end.set()
    child.join()


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_what_is_made_is_this_users_alone_whatever_the_umask_is(umask, folder):
    before = os.umask(umask)
    try:
        store.get_or_make("key.bin", lambda path: path.touch(0o777))
    finally:
        os.umask(before)
    modes = {
        str(path.relative_to(folder.parent)): oct(path.stat().st_mode & 0o7777)
        for path in folder.parent.rglob("*")
    }
    assert modes == {"cache": "0o700", "cache/key.bin": "0o600", "cache/key.bin.lock": "0o600"}
    assert folder.parent.stat().st_mode & 0o7777 == 0o700


def test_what_make_raises_is_raised_and_leaves_no_file(folder):
    def full(path):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    said = (
        "k: the compiled kernel could not be written: .* free some space, or set "
        "FUSION_MOE_CACHE_DIR to another folder"
    )
    with pytest.raises(BuildError, match=said), store.as_build_error("k"):
        store.get_or_make("key.bin", full)
    assert [p.name for p in folder.iterdir()] == ["key.bin.lock"]
    assert store.get_or_make("key.bin", slowly).read_bytes() == CONTENT


# Other users --------------------------------------------------------------------------------------


ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs another user to become")
OTHER = 12345


def as_a_link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda path: path.chmod(0o620), "can be written by other users (mode 620, expected 600"),
        (lambda path: path.chmod(0o602), "can be written by other users (mode 602, expected 600"),
        (lambda path: os.truncate(path, 4), "has 4 bytes, not 14 as when it was made"),
        (lambda path: os.truncate(path, 0), "has 0 bytes, not 14 as when it was made"),
        (as_a_link, "is neither a plain file nor a folder (mode lrwxrwxrwx)"),
        pytest.param(
            lambda path: os.chown(path, OTHER, -1),
            "belongs to another user (12345, expected 0)",
            marks=ROOT,
        ),
    ],
)
def test_a_file_that_is_not_what_was_made_is_made_again(change, why, folder, caplog):
    path = store.get_or_make("key.bin", lambda path: path.write_bytes(b"\x7fELF, and evil"))
    change(path)
    with caplog.at_level(logging.WARNING, "fusion_moe"):
        assert store.get_or_make("key.bin", slowly).read_bytes() == CONTENT
    assert f"{path} {why}" in caplog.text
    assert "rebuilding it" in caplog.text
    assert store.get_or_make("key.bin", wrong).lstat().st_mode & 0o777 == 0o600


# Folders ------------------------------------------------------------------------------------------


def said(caplog, temporary, why):
    """Whether one warning said why the folder is not used, and the file lies in a folder of this
    user instead.
    """
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
    with options.override(
        cache_dir={"a file": str(tmp_path / "file" / "cache"), "a system folder": "/proc/cache"}[
            place
        ]
    ):
        assert said(caplog, temporary, "cannot be created") == f"fusion_moe-{os.geteuid()}"


def test_a_folder_that_others_can_write_to(folder, temporary, caplog):
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    said(
        caplog,
        temporary,
        f"cache_dir {folder} can be written by other users (mode 777, "
        f"expected 755: chmod go-w {folder})",
    )
    assert not list(folder.iterdir())


def test_a_folder_that_others_can_replace(folder, temporary, caplog):
    folder.mkdir(parents=True, mode=0o700)
    folder.parent.chmod(0o770)
    said(
        caplog,
        temporary,
        f"lies in {folder.parent}, which can be written by other users (mode "
        "770, expected 750: chmod go-w",
    )
    folder.parent.chmod(0o1777)  # as /tmp: nobody can rename what belongs to others
    assert store.folder() == folder


def test_a_link_to_a_folder(folder, tmp_path):
    """What it points to is used: who can change the link cannot change that."""
    (tmp_path / "anywhere").mkdir()
    (tmp_path / "anywhere" / "link").symlink_to(folder)
    (tmp_path / "anywhere").chmod(0o777)
    with options.override(cache_dir=str(tmp_path / "anywhere" / "link")):
        assert store.get_or_make("key.bin", slowly) == folder / "key.bin"


def test_no_folder_at_all(folder, temporary):
    folder.mkdir(parents=True)
    for p in folder, temporary:
        p.chmod(0o777)
    with pytest.raises(
        OSError,
        match=f"cache_dir {folder} can be .*, and the temporary folder .* "
        f"lies in {temporary}, which can be ",
    ):
        store.get_or_make("key.bin", slowly)


def test_a_folder_without_the_right_to_write(folder, temporary, monkeypatch):
    path = store.get_or_make("key.bin", slowly)
    monkeypatch.setattr(
        os, "access", lambda place, mode: place != folder
    )  # root is refused nowhere
    assert store.get_or_make("key.bin", wrong) == path
    assert store.get_or_make("other.bin", slowly).parent.parent == temporary


@ROOT
def test_a_folder_of_another_user(folder, temporary, caplog):
    folder.mkdir(parents=True)
    os.chown(folder, OTHER, -1)
    said(caplog, temporary, f"cache_dir {folder} belongs to another user (12345, expected 0)")
