"""The option `dump`: all that a program is made of, in a folder, whole, whatever was in the
caches.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fusions import fusion_of_call
from moe_models import H, I, routing, tokens, weight

from fusion_moe import options
from fusion_moe.backends import TARGETS
from fusion_moe.compile import compile_fusion
from fusion_moe.errors import BuildError
from fusion_moe.ir.text import parse
from fusion_moe.options import Options
from fusion_moe.runtime import dump, nvrtc
from fusion_moe.runtime.program import Program

STAGES = [
    f"{i}-{name}.txt"
    for i, name in enumerate(
        (
            "translated",
            "canonicalize",
            "assign_layouts",
            "sink_quantize",
            "lower_operands",
            "simplify",
            "gather_for_each",
        )
    )
]
FIRST, SECOND = "segment0-grouped_gemm", "segment1-grouped_gemm"


def arguments() -> list[torch.Tensor]:
    """What expert_mlp is called with."""
    return [tokens(5).bfloat16(), *routing(5), *weight(2 * I, H), *weight(H, I)]


def program(folder: Path | str, target: str = "cpu") -> Program:
    """A program of this test alone: none that another one has compiled."""
    return compile_fusion(
        fusion_of_call("expert_mlp", *arguments()),
        TARGETS[target],
        Options().replace(dump=str(folder)),
    )


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_stages_and_segments(tmp_path):
    made = program(tmp_path / "new" / "folder", "reference")
    (folder,) = (tmp_path / "new" / "folder").iterdir()
    assert made.dumped == folder
    assert folder.name.startswith("reference-")
    found = content(folder)
    assert sorted(name for name in found if not name.startswith("segment")) == STAGES
    for name, (_, fusion) in zip(STAGES, made.stages, strict=True):
        assert str(parse(found[name].decode())) == str(fusion)
    for i, segment in enumerate(made.segments):
        said = found[f"segment{i}-{segment.kind}.txt"].decode()
        assert str(segment.fusion) in said
        assert segment.boundary in said


@pytest.mark.compiler
def test_sources_and_binaries_are_there_on_a_hit_of_the_cache_too(tmp_path):
    seen = []
    for name in ("first", "again"):
        made = program(tmp_path / name)
        made(arguments())
        seen.append(content(made.dumped))
    assert seen[0] == seen[1]
    names = set(seen[0])
    assert {
        *STAGES,
        f"{FIRST}.cpp",
        f"{FIRST}.txt",
        f"{FIRST}-contracted.txt",
        f"{SECOND}.cpp",
        f"{SECOND}.txt",
    } <= names
    libraries = {name for name in names if name.endswith(".so")}
    assert {name.split("-")[0] for name in libraries} == {"fprop_nvfp4", "segments"}
    for name in libraries:
        assert seen[0][name].startswith(b"\x7fELF")
        assert name.replace(".so", ".cpp") in names


def test_nothing_is_written_unless_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert program("", "reference").dumped is None
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        BuildError,
        match="what is compiled could not be written: .*; set FUSION_MOE_DUMP to another folder",
    ):
        program(tmp_path / "file", "reference")


@pytest.mark.skipif(bool(nvrtc.why_missing()), reason=nvrtc.why_missing())
def test_cubins(tmp_path):
    kernel = 'extern "C" __global__ void dumped(float* x) { *x = 1.f; }'
    for name in ("first", "again"):
        with dump.into(tmp_path / name):
            path = nvrtc.build(kernel, name="dumped", arch="sm_90a", headers=nvrtc.Headers())
        source, cubin = sorted((tmp_path / name).iterdir())
        assert (source.suffix, cubin.suffix) == (".cu", ".cubin")
        assert source.stem == cubin.stem == path.stem[: len(cubin.stem)]
        assert (source.read_text(), cubin.read_bytes()) == (kernel, path.read_bytes())


@pytest.mark.skipif(bool(nvrtc.why_missing()), reason=nvrtc.why_missing())
def test_lines_registers_and_sass_of_a_cubin(tmp_path, capfd):
    pytest.importorskip("nvidia.cu13", reason="nvidia-cuda-nvdisasm is not installed")
    kernel = 'extern "C" __global__ void seen(float* x) { *x = 1.f; }'

    def built(**given: str) -> bytes:
        with options.override(cache_dir=str(tmp_path / "cache"), **given), dump.into(tmp_path):
            path = nvrtc.build(kernel, name="seen", arch="sm_90a", headers=nvrtc.Headers())
            return path.read_bytes()

    plain = built()
    assert capfd.readouterr().err == ""
    found = built(cuda_debug="lineinfo,ptxas,sass", log="compile")
    assert b".debug_line" in found
    assert b".debug_line" not in plain
    said = capfd.readouterr().err
    assert "fusion_moe compile: seen --gpu-architecture=sm_90a: " in said
    assert "0 bytes spill stores" in said
    (sass,) = tmp_path.glob("*.sass")
    assert "STG.E" in sass.read_text()
    assert "seen.cu" in sass.read_text()
