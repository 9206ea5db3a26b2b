"""C++ kernels: compiled with the user's compiler, cached by content, loaded with ctypes.

    library = load(text, name="grouped_mm", include=[folder])          # -> ctypes.CDLL
    library.grouped_mm(ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(rows),
        ctypes.c_int(torch.get_num_threads()))

`text` is C++17 with `extern "C"` entry points and everything else in an anonymous namespace. Files
that it includes in quotes are looked up in the folders of `include` and are part of the key.
`isa_level` is one of `isa.LEVELS` (default: `isa.selected()`); its -m flags are added, so that the
compiler's macros (`__AVX512BF16__`, `__AMX_TILE__`) say what the CPU has. `flags=["-DROWS=4"]` come
last.

`find_compiler()` is None if there is no compiler, and `why_no_compiler()` is then a sentence about
it; `load` raises BuildError then, and also for source that does not compile and for a compiler that
takes longer than the option compile_seconds. That compiler is ended, with all processes that it
started. `build` does the same without loading, also for ISA levels of other machines.

Threads: OpenMP. The library asks for libgomp.so.1, like torch, which has already loaded its own:
both share one thread pool. Its number of threads is a setting of each thread, so a kernel takes
torch.get_num_threads() as an argument of its calls and says `num_threads(threads)`: a thread in
which torch has not computed yet, such as one of autograd's, would ignore `torch.set_num_threads`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from .. import options
from ..errors import BuildError
from ..messages import warn_once
from . import dump, isa, recording, store

# No -ffast-math, nor anything else that changes results. -ffast-math also makes g++ link code that
# flushes denormals in the whole process that loads the library. Contraction of a * b + c into one
# rounding would give each ISA level different results.
BASE_FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-semantic-interposition",
    "-fopenmp",
    "-fPIC",
    "-shared",
)
# of libraries that are shipped: without symbols, and with as few pages as they need
_SMALL = ("-s", "-Wl,-z,noseparate-code")
_SHOWN_ERRORS = 5


@dataclass(frozen=True)
class Compiler:
    """command: the program's path and the arguments in $CXX; version: what the compiler reports."""

    command: tuple[str, ...]
    version: str


@dataclass(frozen=True)
class LibrarySource:
    """A C++ source, its name, the ISA level that it is for, the folders of its headers, and extra
    flags, which come last.

    shipped: a folder of libraries that came with the package, which are used if they were built
    from this source. libraries: files that it is linked with.
    """

    text: str
    name: str
    isa_level: str
    include: tuple[Path, ...] = ()
    flags: tuple[str, ...] = ()
    shipped: Path | None = None
    libraries: tuple[Path, ...] = ()

    def all_flags(self, having: Collection[str] | None = None) -> tuple[str, ...]:
        """The flags of a compilation, for a CPU with these features (default: this one's)."""
        return (*BASE_FLAGS, *isa.compiler_flags(self.isa_level, having), *self.flags)

    def came_with(self, having: Collection[str] | None = None) -> Path | None:
        """The file of the shipped library, if there is one, for a CPU with these features (default:
        this one's).
        """
        return (
            self.shipped
            and self.shipped
            / f"{self.name}-{self.isa_level}-{self._key(*self.all_flags(having))}.so"
        )

    def prebuilt(self) -> Path | None:
        """The shipped library for this CPU; None if it did not come with the package."""
        path = self.came_with()
        return path if path is not None and path.is_file() else None

    def command(self, compiler: Compiler, having: Collection[str] | None = None) -> list[str]:
        """The compiler's command line, without source and output."""
        return [
            *compiler.command,
            *self.all_flags(having),
            *(f"-I{folder.absolute()}" for folder in self.include),
        ]

    def file(self, compiler: Compiler) -> str:
        """The name of the library in the cache."""
        key = self._key(compiler.version, *compiler.command, *self.all_flags())
        return f"{self.name}-{self.isa_level}-{key}.so"

    def _key(self, *how: str) -> str:
        headers = store.key_of(
            *(part for header in _headers(self.text, self.include) for part in header)
        )
        return store.key_of(self.text, headers, self.isa_level, os.uname().machine, *how)


def load(
    text: str,
    *,
    name: str,
    isa_level: str | None = None,
    include: Sequence[Path] = (),
    flags: Sequence[str] = (),
) -> ctypes.CDLL:
    """The library of a C++ source, as described at the head of this file. BuildError if it fails,
    OptionError for another CPU's ISA level.
    """
    isa_level = isa.selected() if isa_level is None else isa_level
    return library(LibrarySource(text, name, isa_level, tuple(include), tuple(flags)))


def is_built(source: LibrarySource) -> bool:
    """Whether `build` would find the library in the package or the cache; of the cache none is
    found without a compiler.
    """
    if source.prebuilt():
        return True
    compiler = find_compiler()
    return compiler is not None and store.has(source.file(compiler))


def library(source: LibrarySource) -> ctypes.CDLL:
    """The library of a source: shipped with the package, from the cache, or compiled now. Raises
    like `load`.
    """
    isa.require(source.isa_level)
    return _open(build(source))


def build(source: LibrarySource) -> Path:
    """The file of the library of a source, for this CPU or another one. BuildError if it fails."""
    path = source.prebuilt()
    if path is None:
        compiler = find_compiler()
        if compiler is None:
            raise BuildError(why_no_compiler(), where=source.name)
        command = source.command(compiler)
        with store.as_build_error(source.name):
            path = store.get_or_make(
                source.file(compiler), lambda path: _compile(command, source, path)
            )
    dump.binary(path, source.text, ".cpp")
    return path


def ship(source: LibrarySource, having: Collection[str]) -> Path:
    """Compiles a source into its folder of shipped libraries, for a CPU with these features; the
    file appears whole or not at all.
    """
    compiler, path = find_compiler(), source.came_with(having)
    if compiler is None or path is None:
        raise BuildError(why_no_compiler(), where=source.name)
    path.parent.mkdir(exist_ok=True)
    with store.as_build_error(source.name), store.whole(path) as result:
        _compile([*source.command(compiler, having), *_SMALL], source, result)
    return path


@cache
def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as e:
        todo = (
            "remove that file to have it compiled again; if the folder's file system forbids "
            "programs (noexec), set FUSION_MOE_CACHE_DIR to another folder"
        )
        raise BuildError(
            f"the compiled kernel does not load: {e}", todo=todo, where=str(path)
        ) from e


# The compiler -------------------------------------------------------------------------------------


def find_compiler() -> Compiler | None:
    """$CXX if it is set, else the first of g++, clang++, c++ on PATH that runs; None if there is
    none.
    """
    return _first_that_runs(os.environ.get("CXX", ""), os.environ.get("PATH", ""))


def why_no_compiler() -> str:
    """A sentence about why `find_compiler` found none."""
    cxx = os.environ.get("CXX", "")
    text = f"CXX={cxx!r} does not run" if cxx.strip() else "none of g++, clang++, c++ is on PATH"
    return f"no C++ compiler: {text}; install g++, or set CXX"


def warn_of_no_compiler() -> None:
    """Warns once about the consequences."""
    warn_once(
        f"{why_no_compiler()}; plain torch computes everything but products that came with the "
        "package, more slowly",
        about="no compiler",
    )


@cache
def _first_that_runs(cxx: str, path: str) -> Compiler | None:
    """Cached for each environment: `path` is where shutil.which looks."""
    if os.name != "posix":
        return None
    try:
        candidates = [shlex.split(cxx)] if cxx.strip() else [["g++"], ["clang++"], ["c++"]]
    except ValueError:  # an open quotation mark
        return None
    for program, *arguments in candidates:
        if which := shutil.which(program, path=path):
            command = (which, *arguments)
            if version := _version(command):
                return Compiler(command, version)
    return None


def _version(command: Sequence[str]) -> str:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = _run([*command, "--version"])
        return done.stdout if done.returncode == 0 else ""
    return ""


def _run(
    command: Sequence[str], cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """A compiler's output. TimeoutExpired after compile_seconds; then, or on an interruption, all
    processes that it started are ended.

    The output goes to a file: a pipe would be open for as long as any process that a wrapper left
    running, such as its cache's server.
    """
    with (
        tempfile.TemporaryFile("w+", errors="replace") as text,
        subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=text,
            stderr=subprocess.STDOUT,
        ) as running,
    ):
        try:
            running.wait(options.current().compile_seconds)
        except BaseException:
            # otherwise its process id may belong to another process by now
            if running.returncode is None:
                os.killpg(running.pid, signal.SIGKILL)
            raise
        text.seek(0)
        return subprocess.CompletedProcess(command, running.returncode, text.read())


def _compile(command: Sequence[str], source: LibrarySource, path: Path) -> None:
    """Compiles in the folder of `path`, with relative names, so that equal sources give equal files
    wherever they are built.

    A source that does not compile is kept in the store.
    """
    file = f"{source.name}.cpp"
    (path.parent / file).write_text(source.text, encoding="utf-8")
    # a killed compiler's files are removed with the folder
    environment = {**os.environ, "LC_ALL": "C", "TMPDIR": str(path.parent)}
    start = time.monotonic()
    try:
        linked = [str(library.absolute()) for library in source.libraries]
        done = _run([*command, file, *linked, "-o", path.name], cwd=path.parent, env=environment)
    except subprocess.TimeoutExpired as e:
        actual = f"compiling {source.name} took more than {e.timeout:g} s; the compiler was killed"
        todo = (
            "raise FUSION_MOE_COMPILE_SECONDS, or set CXX to another compiler; to see what it does"
        )
    else:
        if done.returncode == 0 and path.exists():
            seconds = time.monotonic() - start
            recording.compiled(f"C++ of {source.name}", source.isa_level, seconds)
            return
        actual = (
            f"{source.name} does not compile (exit status "
            f"{done.returncode})\n{first_errors(done.stdout)}"
        )
        todo = "to see it all"
    kept = keep_failed(path, source.text, ".cpp")
    again = shlex.join([*command, str(kept), *map(str, source.libraries), "-o", os.devnull])
    raise BuildError(actual, todo=f"{todo}:\n  {again}", where=str(kept))


def keep_failed(path: Path, text: str, suffix: str) -> Path:
    """Keeps the source of a file of the store that could not be made of it."""
    return store.get_or_make(
        f"{path.stem}.failed{suffix}", lambda kept: kept.write_text(text, encoding="utf-8")
    )


def first_errors(log: str) -> str:
    """Lines of what a compiler said, indented: the first errors; without any, the first lines."""
    lines = log.splitlines()
    errors = [line for line in lines if re.search(r"\berror\b|undefined reference", line)] or lines
    return "\n".join(f"  {line}" for line in errors[:_SHOWN_ERRORS])


# What a source includes ---------------------------------------------------------------------------

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)
# kernels share headers: the names that a file's content includes
_included = lru_cache(256)(lambda content: _INCLUDE.findall(content.decode(errors="replace")))


def _headers(text: str, folders: Sequence[Path]) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file that a source includes in quotes, directly or indirectly, found
    as the compiler finds them.

    Files in branches that the preprocessor drops are listed too, which does no harm.
    """
    seen: set[Path] = set()
    waiting = [(name, list(folders)) for name in _included(text.encode())]
    for name, places in waiting:  # which grows
        path = next(
            ((place / name).resolve() for place in places if (place / name).is_file()), None
        )
        if path is None or path in seen:
            continue  # the compiler will report it; or it is a system header
        seen.add(path)
        content = path.read_bytes()
        yield name, content
        waiting += [(inner, [path.parent, *folders]) for inner in _included(content)]
