"""Kernels for any size, which calls launch while their own are compiled: the same sources at all sizes, and not compiled twice."""

from __future__ import annotations

import pytest
from test_cuda_source import MODELS, sources

from fusion_moe import options
from fusion_moe.arch import A100, H200, Arch
from fusion_moe.emit.cuda.choose import Choice, choose
from fusion_moe.emit.cuda.launch import _missing
from fusion_moe.emit.cuda.parts import one_part
from fusion_moe.runtime import nvrtc
from fusion_moe.runtime.preparing import run_builds

pytestmark = pytest.mark.skipif(bool(nvrtc.why_missing()), reason=nvrtc.why_missing())
ROWS = (1, 4, 9, 32, 33, 200, 1025, 5000, 100_000)


def choices(model: str, tokens: int, arch: Arch, layout: str = "w16x64") -> list[Choice]:
    """For any size, of both products of a layer."""
    parts = [one_part(source) for source in sources(model, layout)]
    return [choose(p, dict.fromkeys(p.symbols, tokens), arch, any_size=True) for p in parts]


@pytest.mark.parametrize("arch", [H200, A100], ids=lambda arch: arch.name)
@pytest.mark.parametrize("layout", ["w16x64", "linear"])
@pytest.mark.parametrize("model", MODELS)
def test_no_size_changes_what_is_compiled(model, layout, arch):
    texts = {tuple(kernel.text for choice in choices(model, n, arch, layout) for kernel in choice.kernels) for n in ROWS}
    assert len(texts) == 1


def test_grids_follow_sizes():
    few, many = (choices("qwen3", n, H200)[0].kernels[-1] for n in (1, 5000))
    assert few.text == many.text
    assert few.blocks < many.blocks


@pytest.mark.once
@pytest.mark.parametrize("arch", [H200, A100], ids=lambda arch: arch.name)
def test_what_is_compiled_is_not_missing(tmp_path, arch):
    with options.override(cache_dir=str(tmp_path)):
        for choice in choices("qwen3", 3, arch):
            assert len(_missing(choice)) == len(choice.kernels)
            run_builds(_missing(choice))
            assert not _missing(choice)
