"""Kernels for any size, which calls launch while their own are compiled: the same sources at all
sizes, and not compiled twice.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from cover import few
from fusions import fusion_of_call
from test_cuda_source import MODELS, encoded, sources, tokens_of

from fusion_moe import options
from fusion_moe.arch import A100, H200, Arch
from fusion_moe.backends import TARGETS
from fusion_moe.backends.cuda import launch
from fusion_moe.backends.cuda.choose import Choice, choose
from fusion_moe.backends.cuda.dataflow import one_part
from fusion_moe.backends.cuda.launch import _missing
from fusion_moe.backends.cuda.source import Source
from fusion_moe.compile import lower
from fusion_moe.options import Options
from fusion_moe.runtime import nvrtc, store
from fusion_moe.runtime.precompile import run_builds

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
    texts = {
        tuple(
            kernel.text for choice in choices(model, n, arch, layout) for kernel in choice.kernels
        )
        for n in ROWS
    }
    assert len(texts) == 1


def test_grids_follow_sizes():
    few, many = (choices("qwen3", n, H200)[0].kernels[-1] for n in (1, 5000))
    assert few.text == many.text
    assert few.blocks < many.blocks


def test_other_sizes_look_for_no_kernel_again(monkeypatch):
    """A call of a new size hashes no headers, and reads and compiles nothing, if its kernels were
    had before.
    """
    (part, _), built = [one_part(source) for source in sources("qwen3", "w16x64")], list[str]()
    monkeypatch.setattr(launch, "_had", {})
    monkeypatch.setattr(nvrtc, "build", lambda text, **_: built.append(text) or Path("made.cubin"))
    for tokens, new in (200, True), (201, False), (257, False), (3, True), (2, False):
        choice, before = choose(part, dict.fromkeys(part.symbols, tokens), H200), len(built)
        monkeypatch.setattr(store, "key_of", None if built else store.key_of)
        assert set(launch._cubins(choice)) == {
            (H200.nvrtc, kernel.text) for kernel in choice.kernels
        }
        assert (len(built) > before) == new
    assert len(built) == len(set(built))
    with options.override(cache_dir="/elsewhere"):
        launch._cubins(choice)
    assert len(built) > len(set(built))


def test_other_sizes_write_no_kernel_again(monkeypatch):
    """The texts of kernels are written once: a call of a new size only counts its blocks."""
    parts, written, write = [one_part(s) for s in sources("qwen3", "w16x64")], [], Source.calling
    monkeypatch.setattr(Source, "calling", lambda *a, **b: written.append(a[2]) or write(*a, **b))

    def choose_all(counts):
        for p, n in product(parts, counts):
            choose(p, dict.fromkeys(p.symbols, n), H200)

    choose_all([*range(1, 64), *range(64, 2000, 3)])
    assert written
    written.clear()
    choose_all(range(65, 2000, 3))
    assert not written


@pytest.mark.once
@pytest.mark.parametrize("arch", few([H200, A100]), ids=lambda arch: arch.name)
def test_what_is_compiled_is_not_missing(tmp_path, arch):
    with options.override(cache_dir=str(tmp_path)):
        for choice in choices("qwen3", 3, arch):
            assert len(_missing(choice)) == len(choice.kernels)
            run_builds(_missing(choice))
            assert not _missing(choice)


@pytest.mark.parametrize(
    "how", [{"weight_format": "bf16"}, {"weight_format": "fp8", "activation_format": "fp8"}]
)
def test_row_order_has_the_kernels_of_all_sizes(how):
    """Bits of rows then do not depend on what is compiled."""
    weights = (encoded(how["weight_format"], 8, *shape) for shape in ((512, 256), (256, 256)))
    fusion = fusion_of_call("fused_experts", *tokens_of(64, 2, 256), *weights, **how)
    lowered = lower(fusion, TARGETS["cuda"], Options(order="row"))
    for part in [one_part(segment.plan.work) for segment in lowered.segments]:
        names = {
            tuple(
                k.name
                for k in choose(part, dict.fromkeys(part.symbols, n), H200, any_size=of_any).kernels
            )
            for n, of_any in ((16, False), (4096, False), (64, True))
        }
        assert len(names) == 1
