"""The store of files: one maker, no half files, damage found, and only files and folders that
nobody else can write to.
"""

from __future__ import annotations

import contextvars
import ctypes
import errno
import fcntl
import logging
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fusion_moe import options
from fusion_moe.errors import BuildError
from fusion_moe.runtime import store, trust

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

    def work(_):
        return (
            store.get_or_make("key.bin", lambda p: (made.append(p), slowly(p))).read_bytes()
            == CONTENT
        )

    with ThreadPoolExecutor(8) as pool:
        # a thread does not inherit the options in force
        contexts = [contextvars.copy_context() for _ in range(16)]
        assert all(pool.map(lambda context: context.run(work, None), contexts))
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
        time.sleep(60)

    maker = FORK.Process(target=store.get_or_make, args=("key.bin", make))
    maker.start()
    assert writing.wait(20)
    os.kill(maker.pid, signal.SIGKILL)
    maker.join()

    assert list(folder.glob("*.tmp"))
    start = time.monotonic()
    assert store.get_or_make("other.bin", slowly).read_bytes() == CONTENT
    assert not list(folder.glob("*.tmp")), "what the dead have left is swept"
    assert store.get_or_make("key.bin", slowly).read_bytes() == CONTENT
    assert time.monotonic() - start < 10, "the lock of the dead was waited for"


@pytest.mark.parametrize("locks", [True, False])
def test_what_a_living_maker_has_is_not_swept_whatever_a_clock_says(locks, folder, monkeypatch):
    """One that the system puts no lock on cannot be told from a dead one, and stays."""

    def no_locks(file, how):
        raise OSError(errno.ENOLCK, "no locks available")

    if not locks:
        monkeypatch.setattr(fcntl, "flock", no_locks)
    writing, end = FORK.Event(), FORK.Event()

    def make(path):
        path.write_bytes(CONTENT[:100])
        os.utime(path.parent, (0, 0))
        writing.set()
        end.wait(20)
        path.write_bytes(CONTENT)

    maker = FORK.Process(target=store.get_or_make, args=("key.bin", make))
    maker.start()
    assert writing.wait(20)
    store.get_or_make("other.bin", slowly)
    (left,) = folder.glob("key.bin-*.tmp")
    assert [p.name for p in left.iterdir()] == ["key.bin"]
    end.set()
    maker.join()
    assert store.get_or_make("key.bin", wrong).read_bytes() == CONTENT


def test_who_is_waited_for_is_said(folder, monkeypatch, capfd):
    """A stopped process holds its locks for as long as it is stopped."""
    monkeypatch.setattr(store, "_PATIENCE", 0.2)
    maker = FORK.Process(
        target=store.get_or_make, args=("key.bin", lambda path: (time.sleep(1), slowly(path)))
    )
    maker.start()
    while not list(folder.glob("*.tmp")):
        time.sleep(0.01)
    os.kill(maker.pid, signal.SIGSTOP)
    going_on = threading.Timer(0.6, os.kill, (maker.pid, signal.SIGCONT))
    going_on.start()
    store.get_or_make("key.bin", wrong)
    going_on.join()
    maker.join()
    host = os.uname().nodename
    assert capfd.readouterr().err == (
        f"waiting for process {maker.pid} on {host}, which makes key.bin; end it if it is stopped\n"
    )


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
    "another key's": lambda path: [
        p.rename(str(p).replace("other", "key")) for p in path.parent.glob("other.bin*")
    ],
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


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
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
    assert modes == {"cache": "0o700"} | {
        f"cache/key.bin{end}": "0o600" for end in ("", ".lock", ".sha256")
    }
    assert folder.parent.stat().st_mode & 0o7777 == 0o700


def test_what_make_raises_is_raised_and_leaves_no_file(folder):
    def full(path):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        store.get_or_make("key.bin", full)
    assert [p.name for p in folder.iterdir()] == ["key.bin.lock"]
    assert store.get_or_make("key.bin", slowly).read_bytes() == CONTENT


@pytest.fixture(params=["size=64k", "nr_inodes=3", "nr_inodes=5"])
def small(request, folder):
    """cache_dir is a file system of 16 pages, or of so few files."""
    folder.mkdir(parents=True)
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"mode=700,{request.param}", "small", folder],
        capture_output=True,
    ).returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_no_space_left(small):
    with pytest.raises(OSError, match="No space left on device") as e:
        store.get_or_make("key.bin", slowly)
    assert e.value.errno == errno.ENOSPC
    assert [p.name for p in small.iterdir()] in ([], ["key.bin.lock"])
    said = (
        "k: the compiled kernel could not be written: .* free some space, or set "
        "FUSION_MOE_CACHE_DIR to another folder"
    )
    with pytest.raises(BuildError, match=said), store.as_build_error("k"):
        store.get_or_make("key.bin", slowly)
    subprocess.run(["mount", "-o", "remount,size=1m,nr_inodes=50", small], check=True)
    assert store.get_or_make("key.bin", slowly).read_bytes() == CONTENT


# Other users --------------------------------------------------------------------------------------


ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs another user to become")
OTHER = 12345


@pytest.fixture
def entered(tmp_path):
    """Lets other users enter the folders that lead to the test's, which pytest keeps to itself."""
    closed = [p for p in tmp_path.parents if p.stat().st_mode & 0o011 != 0o011]
    for p in [tmp_path, *closed]:
        p.chmod(p.stat().st_mode | 0o011)
    yield tmp_path
    for p in closed:
        p.chmod(p.stat().st_mode & ~0o011)


def as_another(work):
    """What `work()` gave in a process of another user."""

    def process():
        os.setgroups([])
        os.setgid(OTHER)
        os.setuid(OTHER)
        return work()

    return together(process, 1)[0]


PLANTED = b"\x7fELF, and evil"


@ROOT
def test_a_file_that_another_user_has_written(entered, folder, caplog):
    path = store.get_or_make("key.bin", lambda path: path.write_bytes(CONTENT))
    digest = path.with_name("key.bin.sha256")
    folder.parent.chmod(0o755)
    folder.chmod(0o755)
    path.chmod(0o666)  # as a umask of 0 had it
    digest.chmod(0o666)

    def plant():
        path.write_bytes(PLANTED)
        return digest.write_bytes(store._digest("key.bin", PLANTED))

    assert as_another(plant) == 64
    with caplog.at_level(logging.WARNING, "fusion_moe"):
        assert store.get_or_make("key.bin", slowly).read_bytes() == CONTENT
    assert (
        f"{path} can be written by other users (mode 666, expected 644: chmod go-w {path}); "
        "rebuilding it"
    ) in caplog.text
    assert store.get_or_make("key.bin", wrong).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o620, 0o602])
@pytest.mark.parametrize("name", ["key.bin", "key.bin.sha256"])
def test_a_file_that_another_user_can_write(name, mode, folder, caplog):
    store.get_or_make("key.bin", lambda path: path.write_bytes(CONTENT))
    (folder / name).chmod(mode)
    made = []
    with caplog.at_level(logging.WARNING, "fusion_moe"):
        store.get_or_make("key.bin", lambda path: (made.append(path), slowly(path)))
    assert len(made) == 1
    assert (
        f"{name} can be written by other users (mode {mode:o}, expected 600: chmod go-w "
        f"{folder / name}); rebuilding it"
    ) in caplog.text
    assert (folder / name).stat().st_mode & 0o777 == 0o600


@ROOT
@pytest.mark.parametrize("name", ["key.bin", "key.bin.sha256"])
def test_a_file_of_another_user_with_the_right_digest_is_not_used(name, folder, caplog):
    store.get_or_make("key.bin", lambda path: path.write_bytes(CONTENT))
    os.chown(folder / name, OTHER, -1)
    with caplog.at_level(logging.WARNING, "fusion_moe"):
        store.get_or_make("key.bin", slowly)
    assert f"{name} belongs to another user (12345, expected 0); rebuilding it" in caplog.text
    assert (folder / name).stat().st_uid == 0


def test_a_link_in_place_of_a_file(folder, tmp_path, caplog):
    path = store.get_or_make("key.bin", lambda path: path.write_bytes(CONTENT))
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with caplog.at_level(logging.WARNING, "fusion_moe"):
        assert store.get_or_make("key.bin", slowly).read_bytes() == CONTENT
    assert "key.bin is not a plain file (mode lrwxrwxrwx, expected -rw-------)" in caplog.text
    assert not path.is_symlink()


@ROOT
def test_a_lock_that_another_user_holds_is_not_waited_for(entered, folder, caplog):
    folder.mkdir(parents=True)
    lock = folder / "key.bin.lock"
    lock.touch()
    lock.chmod(0o666)
    held, end = FORK.Event(), FORK.Event()

    def hold():
        with lock.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            held.set()
            end.wait(60)

    other = FORK.Process(target=as_another, args=(hold,))
    other.start()
    assert held.wait(20)
    with caplog.at_level(logging.WARNING, "fusion_moe"):
        assert store.get_or_make("key.bin", slowly).read_bytes() == CONTENT
    assert "key.bin.lock can be written by other users (mode 666, expected 644" in caplog.text
    assert not end.is_set()
    end.set()
    other.join()


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


@ROOT
def test_a_folder_in_one_of_another_user(folder, temporary, caplog):
    folder.mkdir(parents=True, mode=0o700)
    os.chown(folder.parent, OTHER, -1)
    said(
        caplog,
        temporary,
        f"lies in {folder.parent}, which belongs to another user (12345, expected 0)",
    )


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


@ROOT
def test_a_container_that_has_no_name_for_root(entered, folder):
    """There what root owns seems to belong to nobody."""
    folder.mkdir(parents=True, mode=0o700)
    os.chown(folder, OTHER, OTHER)
    libc, dumpable, new_user = ctypes.CDLL(None), 4, 0x10000000

    def work():
        libc.prctl(dumpable, 1, 0, 0, 0)
        if libc.unshare(new_user):
            return None
        Path("/proc/self/uid_map").write_text(f"{OTHER} {OTHER} 1")
        trust._unmapped.cache_clear()
        return Path("/").stat().st_uid, str(store.folder())

    if (found := as_another(work)) is None:
        pytest.skip("needs the right to make a user namespace")
    assert found == (65534, str(folder))


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
    assert (chosen.parent, chosen.stat().st_mode & 0o777, list(chosen.iterdir())) == (
        temporary,
        0o700,
        [],
    )
    assert chosen == store.folder()


@ROOT
def test_a_folder_without_the_right_to_write(entered, folder, temporary):
    """In a process of a user who, unlike root, can be refused."""
    folder.mkdir(parents=True, mode=0o700)
    for path in folder, folder.parent, temporary:
        os.chown(path, OTHER, -1)

    def work():
        path = store.get_or_make("key.bin", slowly)
        folder.chmod(0o500)
        return store.get_or_make("key.bin", wrong) == path, str(
            store.get_or_make("other.bin", slowly).parent
        )

    assert as_another(work) == (True, str(temporary / f"fusion_moe-{OTHER}"))
