"""Compiling C++ kernels: what the key depends on, errors, concurrency, threads, and arithmetic that
no tier changes.
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fusion_moe import options
from fusion_moe.errors import BuildError, OptionError
from fusion_moe.runtime import build, isa

pytestmark = pytest.mark.compiler
ANSWER = 'extern "C" int answer() { return %d; }\n'


@pytest.fixture(autouse=True)
def folder(tmp_path):
    """cache_dir of the test."""
    with options.override(cache_dir=str(tmp_path / "cache")):
        yield tmp_path / "cache"


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """$CXX: the real one, which notes each compilation in a file. -> what it noted."""
    real = build.find_compiler().command[0]
    script, log = tmp_path / "noting-g++", tmp_path / "compilations"
    script.write_text(
        f"""#!/bin/sh
[ "$1" = --version ] || echo $$ >> {log}
exec {real} "$@"
"""
    )
    script.chmod(0o700)
    monkeypatch.setenv("CXX", str(script))
    return lambda: log.read_text().split() if log.exists() else []


def answer(value=42, **how):
    return build.load(ANSWER % value, name="answer", **how).answer()


def seconds_of_an_answer(_: int) -> float:
    start = time.process_time()
    assert answer() == 42
    return time.process_time() - start


def test_a_kernel_is_compiled_once(compiler, folder):
    assert answer() == answer() == 42
    assert len(compiler()) == 1
    assert min(map(seconds_of_an_answer, range(5))) < 0.05
    assert [p.suffix for p in sorted(folder.iterdir())] == [".so", ".lock"]


def test_what_the_key_depends_on(compiler, tmp_path, monkeypatch):
    def path(text=ANSWER % 1, name="answer", tier="generic", flags=()):
        return build.build(build.LibrarySource(text, name, tier, flags=tuple(flags)))

    paths = [
        path(),
        path(ANSWER % 2),
        path(flags=["-DX"]),
        path(name="other"),
        path(tier="avx2"),
        path(flags=["-DX", "-DY"]),
    ]
    monkeypatch.setenv("CXX", os.environ["CXX"] + " -g")
    paths.append(path())
    other = tmp_path / "other-g++"
    other.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo 99.1 || exec '
        f'{build.find_compiler().command[0]} "$@"\n'
    )
    other.chmod(0o700)
    monkeypatch.setenv("CXX", str(other))
    paths.append(path())
    assert len(set(paths)) == len(paths)
    assert path() == paths[-1]


def test_headers_are_part_of_the_key(tmp_path):
    """Through all files, each found from where it is included; a folder's place is not part of
    it.
    """
    for name in "one", "two":
        inner = tmp_path / name / "inner"
        inner.mkdir(parents=True)
        (tmp_path / name / "outer.h").write_text(
            '#pragma once\n#if 0\n#include "not_there.h"\n#endif\n  #  include "inner/middle.h"\n'
        )
        (inner / "middle.h").write_text('#include "value.h"\n#include "../outer.h"\n')
        (inner / "value.h").write_text("#define VALUE 1\n")
    text = '#include "outer.h"\nextern "C" int answer() { return VALUE; }\n'

    def load(name):
        return build.load(text, name="answer", include=[tmp_path / name])

    one = load("one")
    assert load("two") is one
    (tmp_path / "two" / "inner" / "value.h").write_text("#define VALUE 2\n")
    assert (load("one").answer(), load("two").answer()) == (1, 2)


def test_equal_sources_give_equal_files(folder):
    first = build.build(build.LibrarySource(ANSWER % 1, "answer", "generic")).read_bytes()
    with options.override(cache_dir=str(folder) + "2"):
        assert (
            build.build(build.LibrarySource(ANSWER % 1, "answer", "generic")).read_bytes() == first
        )


# Errors -------------------------------------------------------------------------------------------


def test_source_that_does_not_compile(folder):
    text = 'extern "C" int answer() {\n  return missing;\n}\n' + "".join(
        f"int f{i}() {{ return nothing; }}\n" for i in range(20)
    )
    with pytest.raises(BuildError) as e:
        build.load(text, name="answer")
    said = str(e.value)
    lines = said.splitlines()
    assert lines[0] == f"{e.value.where}: answer does not compile (exit status 1)"
    assert re.match(r"  answer.cpp:2:10: error: .*missing", lines[1])
    assert len(lines) == 2 + build._SHOWN_ERRORS
    assert lines[-2].endswith("; to see it all:")
    kept = Path(e.value.where)
    assert kept.read_text() == text
    again = subprocess.run(
        lines[-1], shell=True, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}
    )
    assert again.stderr.count(" error: ") == 21
    assert sorted(p.suffix for p in folder.iterdir()) == [".cpp", ".lock", ".lock"]
    assert kept.stat().st_mode & 0o777 == 0o600


def test_a_library_that_does_not_load():
    with pytest.raises(BuildError, match="does not load: .*undefined symbol: nowhere"):
        build.load(
            'extern "C" int nowhere();\nextern "C" int answer() { return nowhere(); }\n',
            name="answer",
        )


def test_a_compiler_that_hangs(tmp_path, monkeypatch):
    """It is ended, and what it has started with it, though that is not our child."""
    script, started = tmp_path / "hanging-g++", tmp_path / "started"
    script.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exec echo 1.0\nsleep 100 & echo $$ $! '
        f"> {started}\nwait\n"
    )
    script.chmod(0o700)
    monkeypatch.setenv("CXX", str(script))
    start = time.monotonic()
    with options.override(compile_seconds=2), pytest.raises(BuildError) as e:
        answer()
    assert 2 <= time.monotonic() - start < 60
    first, *others, last = str(e.value).splitlines()
    assert first == (
        f"{e.value.where}: compiling answer took more than 2 s; the compiler was killed; "
        "raise FUSION_MOE_COMPILE_SECONDS, or set CXX to another compiler; to see what it does:"
    )
    assert not others
    assert shlex.split(last)[0] == str(script)
    assert Path(e.value.where).read_text() == ANSWER % 42
    for process in started.read_text().split():
        assert not runs(process)


def test_a_wrapper_that_leaves_a_process_behind(tmp_path, monkeypatch):
    """As caches of compilers do: it has the wrapper's output open for as long as it runs."""
    script, started = tmp_path / "caching-g++", tmp_path / "started"
    script.write_text(
        f"#!/bin/sh\nsleep 100 & echo $! >> {started}\nexec "
        f'{build.find_compiler().command[0]} "$@"\n'
    )
    script.chmod(0o700)
    monkeypatch.setenv("CXX", str(script))
    try:
        start = time.monotonic()
        assert answer() == 42
        assert time.monotonic() - start < 60
    finally:
        for process in started.read_text().split():
            os.kill(int(process), signal.SIGKILL)


def test_a_compiler_that_does_not_say_its_version(tmp_path, monkeypatch):
    script = tmp_path / "silent-g++"
    script.write_text("#!/bin/sh\nsleep 100\n")
    script.chmod(0o700)
    monkeypatch.setenv("CXX", str(script))
    with (
        options.override(compile_seconds=1),
        pytest.raises(BuildError, match=re.escape(f"CXX='{script}' does not run")),
    ):
        answer()


def runs(process):
    """Whether it does, and is not merely waiting to be buried by whoever inherited it."""
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_tier_of_another_cpu_is_compiled_but_not_loaded(monkeypatch):
    monkeypatch.setattr(isa, "available", lambda: ("generic",))
    assert build.build(build.LibrarySource(ANSWER % 1, "answer", "avx2")).exists()
    with pytest.raises(OptionError, match="cpu_isa = 'avx2' is not supported by this CPU"):
        answer(isa_level="avx2")


def test_the_users_compiler_and_those_on_path(tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    for name in "clang++", "c++":
        (tmp_path / name).write_text(f"#!/bin/sh\necho {name} 1.0\n")
        (tmp_path / name).chmod(0o700)
    (tmp_path / "g++").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "g++").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.find_compiler() == build.Compiler((str(tmp_path / "clang++"),), "clang++ 1.0\n")
    monkeypatch.setenv("CXX", "c++ -g")
    assert build.find_compiler() == build.Compiler((str(tmp_path / "c++"), "-g"), "c++ 1.0\n")
    for cxx in "icpx", "g++ 'x":
        monkeypatch.setenv("CXX", cxx)
        assert build.find_compiler() is None
        assert build.why_no_compiler() == (
            f"no C++ compiler: CXX={cxx!r} does not run; install g++, or set CXX"
        )


def test_a_machine_without_a_compiler(tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.find_compiler() is None
    with pytest.raises(BuildError) as e:
        answer()
    assert str(e.value) == (
        "answer: no C++ compiler: none of g++, clang++, c++ is on PATH; install g++, or set CXX"
    )


# What is compiled ---------------------------------------------------------------------------------


TIER_MACROS = {
    "amx": "__AMX_BF16__",
    "avx512": "__AVX512VBMI__",
    "avx2": "__AVX2__",
    "generic": "__cplusplus",
}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the tiers but generic are of x86-64")
@pytest.mark.parametrize("tier", isa.LEVELS)
def test_every_tier_compiles_everywhere(tier):
    text = (
        f"#ifndef {TIER_MACROS[tier]}\n#error not told\n#endif\n#if "
        f"{int(tier != 'generic')}\n#include <immintrin.h>\n#endif\n"
    )
    assert build.build(build.LibrarySource(text + ANSWER % 1, "answer", tier)).exists()


def test_no_tier_contracts_or_flushes():
    """a * b + c is rounded twice, and denormals stay, in the library and in the process that loaded
    it.
    """
    text = 'extern "C" float f(float a, float b, float c) { return a * b + c; }\n'
    a, b, c = 1 + 2.0**-12, 1 + 2.0**-12, -(1 + 2.0**-11)
    for tier in isa.available():
        f = build.load(text, name="contract", isa_level=tier).f
        f.argtypes, f.restype = [ctypes.c_float] * 3, ctypes.c_float
        assert f(a, b, c) == 0.0, "in one rounding it is 2^-24"
        assert f(2.0**-126, 0.5, 0.0) == 2.0**-127
    assert (torch.full((64,), 2.0**-126) * 0.5).ne(0).all()


THREADS = """
#include <omp.h>
extern "C" int running(int threads) {
  int found = 0;
#pragma omp parallel num_threads(threads) reduction(+ : found)
  found += 1;
  return found;
}
extern "C" int threads() { return omp_get_max_threads(); }
"""


def test_one_pool_of_threads_torchs(folder):
    """In a process of its own: how many threads there are, before and after ours ran, and what
    `set_num_threads` does to both.
    """
    code = f"""
import os, threading
import torch
from fusion_moe.runtime import build
library = build.load({THREADS!r}, name="threads")
torch.set_num_threads(5)
x = torch.ones(1 << 20) + 1
before = len(os.listdir("/proc/self/task"))
assert library.threads() == 5 and library.running(5) == 5
assert len(os.listdir("/proc/self/task")) == before, "threads beside those of torch"
torch.set_num_threads(3)
assert library.threads() == 3
def elsewhere():
    assert library.running(torch.get_num_threads()) == 3, "the number is to be given as an argument"
    found.append(True)
found = []
other = threading.Thread(target=elsewhere)
other.start(), other.join()
assert found
runtimes = "libgomp", "libiomp", "libomp"
maps = open("/proc/self/maps")
loaded = {{line.split()[-1] for line in maps if any(name in line for name in runtimes)}}
assert len(loaded) == 1 and loaded.pop().startswith(os.path.dirname(torch.__file__)), loaded
"""
    root = Path(__file__).parents[2]
    env = {
        **os.environ,
        "FUSION_MOE_CACHE_DIR": str(folder),
        "PYTHONPATH": f"{root}{os.pathsep}{root / 'translators'}",
    }
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
