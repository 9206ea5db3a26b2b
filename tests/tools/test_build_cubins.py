"""CUDA kernels of common layers, as a wheel of a release brings them: which those are, that they
are what NVRTC makes here, and that nothing else is taken for them. Needs no GPU.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import build_cubins as tool
import pytest
import torch
from cubins import sections
from experts import experts_of_ones
from torch.utils._python_dispatch import TorchDispatchMode

from fusion_moe import env, options
from fusion_moe.arch import H200
from fusion_moe.backends import TARGETS
from fusion_moe.backends.cuda.launch import KERNELS, Call, build
from fusion_moe.backends.cuda.source import KernelSource
from fusion_moe.compile import compile_fusion
from fusion_moe.definitions.operations import SPECS, bind, eager_types, fusion_of
from fusion_moe.runtime import cuda, nvrtc, shipped_cubins
from fusion_moe.runtime.precompile import Noted, _of_all_sizes

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(bool(nvrtc.why_missing()), reason=nvrtc.why_missing()),
]
SMALL = tool.Layer(8, 2, 128, 64)
NEW = 99_000  # the CUDA of a driver


@pytest.fixture
def headers() -> nvrtc.Headers:
    return nvrtc.headers(KERNELS)


@pytest.fixture
def came(monkeypatch, tmp_path) -> Callable[[bytes], Path]:
    """Has an archive come with the package, on a machine with a driver and an empty cache."""

    def install(data: bytes) -> Path:
        path = tmp_path / "cubins.xz"
        path.write_bytes(data)
        for read in (shipped_cubins.archive, shipped_cubins._read):
            read.cache_clear()
        return path

    monkeypatch.setattr(shipped_cubins, "ARCHIVE", tmp_path / "cubins.xz")
    monkeypatch.setattr(shipped_cubins.driver, "version_number", lambda: NEW)
    with options.override(cache_dir=str(tmp_path / "cache")):
        yield install
    for read in (shipped_cubins.archive, shipped_cubins._read):
        read.cache_clear()


@pytest.fixture
def no_compiler(monkeypatch):
    def fail(text, *args):
        raise AssertionError(f"compiled: {text}")

    monkeypatch.setattr(nvrtc, "_compile", fail)


@pytest.fixture(scope="module")
def stand_ins() -> bytes:
    """An archive with names in place of the cubins of a layer."""
    files = {file: file.encode() for file in tool.files_of(SMALL, nvrtc.headers(KERNELS))}
    return tool.archive({"Small": files}, nvrtc.version())


@cache
def sum_of_slots(ids: torch.dtype = torch.int64) -> KernelSource:
    """A kernel that compiles quickly, of a layer whose ids have a dtype, which it does not read."""
    kernels = tool.kernels_of(tool.call_of(SMALL, ids, torch.float32), H200)
    return next(kernel for kernel in kernels if kernel.name == "combine")


class Seen(TorchDispatchMode):
    """The call of `fused_experts` of a module."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() == "fusion_moe::fused_experts":
            self.call = bind(SPECS["fused_experts"], args, kwargs)
        return func(*args, **(kwargs or {}))


def call_of_module(weights: torch.dtype) -> Call:
    """What a module calls on a GPU."""
    with torch.device("meta"):
        module, seen = experts_of_ones(SMALL.experts, SMALL.hidden, SMALL.intermediate), Seen()
        assert not module.put_in(module.layout_on(TARGETS["cuda"]))
        x = torch.empty(7, SMALL.hidden, dtype=torch.bfloat16)
        ids = torch.empty(7, SMALL.slots, dtype=torch.int64)
        with seen:
            module(x, ids, torch.empty(ids.shape, dtype=weights))
    fusion = fusion_of("fused_experts", eager_types(seen.call), seen.call.others)
    return compile_fusion(fusion, TARGETS["cuda"], options.current()).joined


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_all_that_preparing_compiles_for_a_layer_is_there(
    came, stand_ins, headers, no_compiler, monkeypatch, weights
):
    came(stand_ins)
    monkeypatch.setattr(cuda, "arch", lambda index: H200)
    device, call = torch.device("cuda", 0), call_of_module(weights)
    (tokens,) = call.parts.symbols
    noted = _of_all_sizes([Noted((call,), device, ((tokens, 7),))])
    kernels = {k.text: k for c in noted for k in call.choose(dict(c.sizes), H200).kernels}
    assert len(kernels) > 10
    for kernel in kernels.values():
        asked = {"name": kernel.name, "arch": H200.nvrtc, "headers": headers}
        assert nvrtc.is_built(kernel.text, **asked)
        assert nvrtc.build(kernel.text, **asked).read_bytes() == build(kernel, H200).name.encode()


def test_they_are_what_is_compiled_here(came, headers, tmp_path, monkeypatch, caplog):
    """Byte for byte; one whose source has changed, or that has other flags, is compiled."""
    kernel, compiled = sum_of_slots(), []
    with options.override(cache_dir=str(tmp_path / "release")):
        path = build(kernel, H200)
    came(tool.archive({"Small": {path.name: path.read_bytes()}}, nvrtc.version()))
    monkeypatch.setattr(
        nvrtc, "_compile", lambda text, name, h, flags, path: compiled.append(text) or path.touch()
    )
    with options.override(log="compile"), caplog.at_level(logging.DEBUG):
        assert build(kernel, H200).read_bytes() == path.read_bytes()
        assert build(kernel, H200).parent == tmp_path / "cache"
    assert not compiled
    changed = replace(kernel, text=kernel.text.replace("total", "total +", 1))
    build(changed, H200)
    with options.override(cuda_debug="lineinfo"):
        build(kernel, H200)
    other = nvrtc.Headers({**headers, "routing.cuh": headers["routing.cuh"] + "\n"})
    nvrtc.build(kernel.text, name=kernel.name, arch=H200.nvrtc, headers=other)
    nvrtc.build(kernel.text, name=kernel.name, arch="sm_80", headers=headers)
    assert compiled == [changed.text, *[kernel.text] * 3]


@pytest.mark.parametrize("version", [0, 12_090, None])
def test_an_older_driver_or_none_uses_none(came, stand_ins, headers, monkeypatch, version):
    def driver() -> int:
        if version is None:
            raise RuntimeError("no libcuda")
        return version

    came(stand_ins)
    monkeypatch.setattr(shipped_cubins.driver, "version_number", driver)
    kernel = sum_of_slots()
    assert not nvrtc.is_built(kernel.text, name=kernel.name, arch=H200.nvrtc, headers=headers)
    check = env._cubins()
    assert not check.there
    assert check.found.startswith("no CUDA driver loads" if version is None else "they need")


@pytest.mark.parametrize("damage", ["cut", "changed", "not xz"])
def test_a_damaged_archive_is_as_good_as_none(came, stand_ins, headers, monkeypatch, damage):
    """Wherever the damage is, a warning says so once."""
    kernel, said, middle = sum_of_slots(), list[str](), len(stand_ins) // 2
    came(
        {
            "cut": stand_ins[:middle],
            "changed": stand_ins[:middle]
            + bytes([stand_ins[middle] ^ 255])
            + stand_ins[middle + 1 :],
            "not xz": b"PK" + stand_ins,
        }[damage]
    )
    monkeypatch.setattr(shipped_cubins, "warn_once", said.append)
    for _ in range(2):
        assert not nvrtc.is_built(kernel.text, name=kernel.name, arch=H200.nvrtc, headers=headers)
    assert len(set(said)) == 1
    assert "cubins.xz cannot be read (" in said[0]


def test_the_environment_names_them(came, stand_ins):
    came(stand_ins)
    check = env._cubins()
    assert check.there
    assert check.found == f"by NVRTC {nvrtc.version()}, for Hopper and layers of Small"
    came(b"").unlink()
    assert env._cubins().found.startswith("no cubins came with this installation")


# One cubin for sources that mean the same ---------------------------------------------------------


def test_what_a_kernel_does_not_read_is_not_in_its_key(headers, tmp_path):
    """Its machine code is the same, too. No header calls a member of a struct by a value's name."""
    one, other = sum_of_slots(torch.int64), sum_of_slots(torch.int32)
    other = replace(other, text=re.sub(r"\bt(\d+)\b", r"t1\1", other.text).replace("// f32", "// "))
    assert one.text != other.text
    files = [nvrtc.file_of(k.text, k.name, H200.nvrtc, headers) for k in (one, other)]
    assert files[0] == files[1]
    codes = []
    for i, kernel in enumerate((one, other)):
        with options.override(cache_dir=str(tmp_path / str(i))):
            of = dict(sections(build(kernel, H200).read_bytes()))
        # others name functions after a digest of the source
        codes.append({n: s for n, s in of.items() if n.startswith((".text.", ".nv.constant"))})
    assert codes[0] == codes[1]
    assert ".text.combine" in codes[0]
    for name, text in headers.items():
        assert not {*nvrtc._VALUE.findall(text)} - {"i8", "i16", "i32", "i64"}, name


STRUCT = """
    const float* i0;  // f32[s0]
    const {read}* i1;
    const {unread}* i2;
    float* t3;
    run(i0, {argument});
"""


def test_what_it_reads_is():
    keys = {
        nvrtc._meaning(STRUCT.format(read=read, unread=unread, argument=argument))
        for read in ("i32", "i64")
        for unread in ("i32", "i64")
        for argument in ("i1, t3", "t3, i1")
    }
    assert len(keys) == 4
    assert "i32* $1;" in min(keys)
    renamed = STRUCT.replace("i1", "i7").replace("t3", "t5")
    text = renamed.format(read="i32", unread="i8", argument="i7, t5")
    assert nvrtc._meaning(text) in keys
