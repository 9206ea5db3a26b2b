"""CUDA C++ to cubins with NVRTC, NVIDIA's compiler as a library, kept in the store by content. No
nvcc, no GPU needed.

    path = build(text, name="small_m", arch="sm_90a", headers=headers(folder))

Sources that differ in comments and names of values have one cubin. Those of common layers may have
come with the package (shipped_cubins.py).

For arch="compute_80,sm_90" NVRTC makes PTX, and the driver makes the cubin of that, for the GPU at
hand: the store has one for each version of the driver.

`text` includes headers by the names that `headers` has; there are none of the system's.
`why_missing()` is a sentence where NVRTC is not installed (the extra `cuda`), and `build` raises
BuildError then, as it does for source that does not compile.

NVRTC runs in this process, so nothing can end it: the option compile_seconds does not hold for it.
"""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .. import options
from ..errors import BuildError
from ..messages import install
from . import driver, dump, recording, shipped_cubins, store
from .build import first_errors, keep_failed

# No contraction of a * b + c into one rounding: results are those of `Fusion.evaluate`, operation
# by operation.
FLAGS = ("--std=c++17", "--fmad=false", "--extra-device-vectorization")
MARKS = 2**16  # of tiles, that a kernel keeps
_DEBUG = {  # cuda_debug's
    "lineinfo": "--generate-line-info",
    "ptxas": "--ptxas-options=--verbose",
    "timeline": f"--define-macro=TIMELINE={MARKS}",
}
_INSTALL = install("cuda")
_COMMENT = re.compile(r"[ \t]*//.*")
# a member of a segment's struct that is called like a value, as no header calls it; and each name
_MEMBER = re.compile(r"^    (?:const )?\w+\* ([it]\d+_?);", re.MULTILINE)
_VALUE = re.compile(r"\b[it]\d+_?\b")


class Headers(dict[str, str]):
    """Headers: the path by which each is included, and its content. They are not changed once they
    are used.
    """

    @cached_property
    def key(self) -> str:
        """Their part of the keys of what includes them, made once: they are much longer than a
        kernel.
        """
        return store.key_of(*(part for header in self.items() for part in header))


def headers(*folders: Path) -> Headers:
    """Each header of folders and those in them, by its path there."""
    return Headers(
        {
            path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
            for folder in folders
            for path in sorted(folder.rglob("*.cuh"))
        }
    )


@cache
def why_missing() -> str:
    """Why nothing can be compiled for CUDA; empty if it can."""
    try:
        result = find_spec("cuda.bindings.nvrtc") is not None
    except ModuleNotFoundError:
        result = False
    if not result:
        return f"cuda-bindings is not installed; {_INSTALL}"
    try:
        version()
    # of the loader of libraries, which has a class for each thing that can go wrong
    except Exception as error:
        return f"NVRTC does not load ({str(error).splitlines()[0]}); {_INSTALL}"
    return ""


@cache
def version() -> str:
    """The version of NVRTC, as "13.0"."""
    return ".".join(map(str, _checked(_nvrtc().nvrtcVersion())))


def code_for(capability: tuple[int, int]) -> str:
    """`Arch.code` of a GPU: PTX of the highest compute capability that NVRTC knows, for one that it
    does not know; "" for others, and without NVRTC.
    """
    number = 10 * capability[0] + capability[1]
    if why_missing() or number in (known := _known()):
        return ""
    return f"compute_{max(n for n in known if n < number)},sm_{number}"


def _known() -> Sequence[int]:
    """The compute capabilities that NVRTC compiles for, times ten."""
    return _checked(_nvrtc().nvrtcGetSupportedArchs())


def build(text: str, *, name: str, arch: str, headers: Headers, flags: Sequence[str] = ()) -> Path:
    """The cubin of a source for an architecture ("sm_90a", "compute_80,sm_90"), from the store or
    compiled now. BuildError if it cannot be had.
    """
    if why := why_missing():
        raise BuildError(why, where=name)
    file, came = _find(text, name, arch, headers, flags)

    def make(path: Path) -> None:
        if came:
            options.log("compile", "%s came with the package", name)
            path.write_bytes(came)
        else:
            _compile(text, name, headers, _all_flags(arch, flags), path)

    with store.as_build_error(name):
        path = store.get_or_make(file, make)
    dump.binary(path, text, ".cu")
    return path


def is_built(
    text: str, *, name: str, arch: str, headers: Headers, flags: Sequence[str] = ()
) -> bool:
    """Whether `build` of the same arguments would find its result, on disk or in the package,
    instead of compiling.
    """
    file, came = _find(text, name, arch, headers, flags)
    return bool(came) or store.has(file)


def _all_flags(arch: str, flags: Sequence[str]) -> tuple[str, ...]:
    debug = (_DEBUG[word] for word in options.words("cuda_debug") if word in _DEBUG)
    target, _, linked_for = arch.partition(",")
    if linked_for:  # PTX has no machine code to report on
        debug = (flag for flag in debug if flag != _DEBUG["ptxas"])
    return (f"--gpu-architecture={target}", *FLAGS, *debug, *flags)


def _find(
    text: str, name: str, arch: str, headers: Headers, flags: Sequence[str]
) -> tuple[str, bytes]:
    """The name of a cubin in the store; and the cubin, if it came with the package and is not there
    yet.
    """
    came = shipped_cubins.archive(shipped_cubins.ARCHIVE)
    if not came.why_not:
        file = file_of(text, name, arch, headers, flags, came.nvrtc)
        layer = came.layer_of(file)
        if layer and store.has(file):
            return file, b""
        if data := layer and shipped_cubins.cubins_of(shipped_cubins.ARCHIVE, layer).get(file):
            return file, data
    return file_of(text, name, arch, headers, flags), b""


def file_of(
    text: str, name: str, arch: str, headers: Headers, flags: Sequence[str] = (), by: str = ""
) -> str:
    """The name in the store of the cubin that a version of NVRTC makes of a source. by: default:
    the one that is installed.
    """
    linked_by = [driver.version()] if "," in arch else []
    parts = (_meaning(text), headers.key, by or version(), *linked_by, *_all_flags(arch, flags))
    return f"{name}-{arch}-{store.key_of(*parts)}.cubin"


def _meaning(text: str) -> str:
    """A source without what changes no machine code: comments, the names of values, and the types
    of those that it does not read. A layer has them from the program around it.
    """
    code = _COMMENT.sub("", text)
    uses, members = Counter(_VALUE.findall(code)), _MEMBER.findall(code)
    code = _MEMBER.sub(lambda m: m[0] if uses[m[1]] > 1 else "    void* $;", code)
    names = {name: f"${i}" for i, name in enumerate(members)}
    return _VALUE.sub(lambda m: names.get(m[0], m[0]), code)


def _nvrtc() -> Any:
    from cuda.bindings import nvrtc  # at first use: an extra

    return nvrtc


def _checked(result: tuple[Any, ...]) -> Any:
    """What a call returned; BuildError with NVRTC's word for what went wrong."""
    status, *values = result
    if int(status):
        raise BuildError(f"NVRTC: {_nvrtc().nvrtcGetErrorString(status)[1].decode()}")
    return values[0] if len(values) == 1 else tuple(values)


def _compile(
    text: str, name: str, headers: Mapping[str, str], flags: Sequence[str], path: Path
) -> None:
    nvrtc = _nvrtc()
    contents, names = (
        [part.encode() for part in parts] for parts in (headers.values(), headers.keys())
    )
    program = _checked(
        nvrtc.nvrtcCreateProgram(text.encode(), f"{name}.cu".encode(), len(names), contents, names)
    )
    start = time.monotonic()
    try:
        status, *_ = nvrtc.nvrtcCompileProgram(
            program, len(flags), [flag.encode() for flag in flags]
        )
        log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        message = log.decode().strip("\0\n ")
        if int(status):
            how = f"NVRTC {version()} {' '.join(flags)}"
            raise BuildError(
                f"{name} does not compile with {how}\n{first_errors(message)}",
                todo="the source is kept at that path",
                where=str(keep_failed(path, text, ".cu")),
            )
        recording.compiled(name, flags[0], time.monotonic() - start)
        if "ptxas" in options.words("cuda_debug"):
            print(message, file=sys.stderr)
        if flags[0].partition("=")[2].startswith("compute_"):
            ptx = _read(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
            path.write_bytes(driver.link(ptx, name))
        else:
            path.write_bytes(_read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program))
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _read(size: Any, get: Any, program: Any) -> bytes:
    """What NVRTC writes into memory that it is given: one byte more than it needs, since Python
    shares bytes objects of length 1.
    """
    count = _checked(size(program))
    memory = bytes(count + 1)
    _checked(get(program, memory))
    return memory[:count]
