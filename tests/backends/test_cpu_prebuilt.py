"""Without a compiler: products by the library that came with the package, plain torch around them;
the reference where none came.
"""

from __future__ import annotations

import pytest
import torch
from experts import experts
from torch import Tensor

import fusion_moe
from fusion_moe import options
from fusion_moe.backends.cpu import readers
from fusion_moe.encodings import NVFP4, quantize
from fusion_moe.errors import GroupsError
from fusion_moe.messages import warn
from fusion_moe.runtime import build, isa

pytestmark = pytest.mark.compiler  # to build what comes with the package
OPS = torch.ops.fusion_moe
TIER = isa.available()[0]


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """A folder with the library of this machine's best tier."""
    folder = tmp_path_factory.mktemp("shipped")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "SHIPPED", folder)
        build.ship(readers.library_source(TIER, "nvfp4"), isa.features())
    return folder


@pytest.fixture
def without_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert build.find_compiler() is None


@pytest.fixture
def product(shipped, without_compiler, monkeypatch):
    """The library is there, a compiler is not."""
    monkeypatch.setattr(readers, "SHIPPED", shipped)
    with options.override(cpu_isa=TIER, cache_dir=str(shipped / "none")):
        yield
    assert not (shipped / "none").exists()


def layer(seed: int) -> tuple[fusion_moe.NVFP4Experts, tuple[Tensor, Tensor, Tensor]]:
    """A module and what it is called with."""
    g = torch.Generator().manual_seed(seed)
    weights, ids = torch.rand(23, 4, generator=g).topk(2)
    return experts(4, 48, 32, seed), (torch.randn(23, 48, generator=g), ids, weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_product(product, dtype):
    g = torch.Generator().manual_seed(3)
    weight = quantize(torch.randn(3, 37, 80, generator=g), NVFP4)
    a, ends = (
        torch.randn(50, 80, generator=g).to(dtype),
        torch.tensor([1, 1, 45], dtype=torch.int32),
    )
    found = OPS.nvfp4_grouped_mm(a, *weight, ends)
    with options.override(target="reference"):
        want = OPS.nvfp4_grouped_mm(a, *weight, ends)
    step = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
    torch.testing.assert_close(found, want, rtol=step, atol=step)
    assert not found[45:].any()
    with pytest.raises(GroupsError, match=r"offs\[2\] = 51"):
        OPS.nvfp4_grouped_mm(a, *weight, torch.tensor([1, 1, 51], dtype=torch.int32))


def test_a_layer_and_what_explain_says_of_it(product):
    module, args = layer(0)
    with torch.no_grad():
        found, report = module(*args), fusion_moe.explain(module, *args, load=True).details()
        with options.override(target="reference"):
            torch.testing.assert_close(found, module(*args), rtol=1e-4, atol=1e-4)
    assert f"the product that came with the package for {TIER}" in " ".join(report.split())


def test_later_calls_look_for_no_library(product, monkeypatch):
    """Which would read and hash all of its sources, for longer than a layer computes."""
    module, args = layer(2)
    with torch.no_grad():
        want = module(*args)
        monkeypatch.setattr(build, "_headers", lambda *_: pytest.fail("looked for a library"))
        assert module(*args).equal(want)
        assert module(*[t[:7] for t in args]).isfinite().all()  # other sizes, the same program


def test_a_report_that_calls_nothing_is_the_same_without_a_compiler(monkeypatch):
    module, args = layer(1)
    with options.override(bisect_limit=1000):  # a program of its own
        want = fusion_moe.explain(module, *args).details()
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with options.override(bisect_limit=1001):
        assert fusion_moe.explain(module, *args).details() == want
    assert build.find_compiler() is None
    assert "grouped_mm" in want


def test_that_is_said_once(without_compiler, caplog, monkeypatch):
    monkeypatch.setattr(warn, "_said", set())
    for seed in 0, 1:
        module, args = layer(seed)
        with torch.no_grad(), options.override(router_gradient=bool(seed)):  # programs of their own
            module(*args)
    assert [r.message.partition(":")[0] for r in caplog.records].count("no C++ compiler") == 1


def test_without_either_the_reference_runs_and_says_why(
    without_compiler, caplog, monkeypatch, tmp_path
):
    monkeypatch.setattr(readers, "SHIPPED", tmp_path)
    monkeypatch.setattr(warn, "_said", set())
    module, args = layer(1)
    # a program of its own
    with torch.no_grad(), options.override(cpu_isa="generic", contract_rounding=False):
        found, report = module(*args), fusion_moe.explain(module, *args, load=True).details()
        with options.override(target="reference"):
            assert found.equal(module(*args))
    assert "no C++ compiler" in report
    assert "this installation has no prebuilt kernels of nvfp4 for generic" in " ".join(
        report.split()
    )
    slow = [
        r.message
        for r in caplog.records
        if r.message.startswith("grouped products run slowly in plain torch: ")
    ]
    assert len(slow) == 1
    assert "no prebuilt kernels of nvfp4 for generic" in slow[0]
