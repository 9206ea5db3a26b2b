"""Kernels compiled beforehand: what is noted, what is compiled once, and that nothing is compiled
afterwards.
"""

from __future__ import annotations

import pytest
import torch
from experts import experts

import fusion_moe
from fusion_moe import compile as pipeline, options
from fusion_moe.backends.cpu.launch import Function
from fusion_moe.errors import BuildError, OptionError, ShapeError, UnsupportedError
from fusion_moe.ir.text import text
from fusion_moe.runtime import build
from fusion_moe.runtime.precompile import (
    _one_for_each,
    _units,
    builds_of_other_sizes,
    compile_all,
)

E, H, I = 3, 64, 32


def pointwise(fill: float):
    fd = fusion_moe.FusionDefinition()
    fd.add_output(fd.ops.add(fd.define_tensor(shape=[-1, 8], dtype="f32"), fill))
    return fd.fusion()


@pytest.fixture
def cold(tmp_path):
    """A cache without anything in it."""
    with options.override(cache_dir=str(tmp_path)):
        yield tmp_path


def forbid(monkeypatch):
    def compiles(*args, **kwargs):
        raise AssertionError("something was compiled")

    monkeypatch.setattr(build, "_compile", compiles)


def libraries(folder) -> set[str]:
    return {path.name for path in folder.rglob("*.so")}


def test_inside_nothing_runs_and_afterwards_nothing_is_compiled(cold, monkeypatch):
    x, fusion = torch.ones(3, 8), pointwise(2.5)
    with fusion_moe.preparing():
        (noted,) = fusion_moe.run(fusion, [x])
        assert torch.equal(noted, torch.zeros(3, 8))
        assert not libraries(cold)
    assert len(libraries(cold)) == 1
    forbid(monkeypatch)
    assert torch.equal(fusion_moe.run(fusion, [x])[0], x + 2.5)


def test_equal_work_is_done_once(cold, monkeypatch):
    made, real = [], build._compile
    monkeypatch.setattr(
        build,
        "_compile",
        lambda command, source, path: (made.append(source.name), real(command, source, path)),
    )
    with fusion_moe.preparing():
        for rows in (1, 5, 5):
            fusion_moe.run(pointwise(3.5), [torch.ones(rows, 8)])
    assert made == ["segments"]


def test_a_program_prepares_named_sizes(cold, monkeypatch):
    program = pipeline.program_of(text(pointwise(4.5)), torch.device("cpu"))
    (symbol,) = program.fusion.symbols
    program.prepare("cpu", **{symbol: 7})
    forbid(monkeypatch)
    assert torch.equal(program([torch.ones(7, 8)])[0], torch.full((7, 8), 5.5))
    with pytest.raises(ShapeError, match=f"prepare: no sizes; expected {symbol}"):
        program.prepare("cpu")


def test_an_error_inside_compiles_nothing(cold):
    def fails():
        with fusion_moe.preparing():
            fusion_moe.run(pointwise(5.5), [torch.ones(3, 8)])
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert not libraries(cold)
    assert torch.equal(
        fusion_moe.run(pointwise(5.5), [torch.ones(1, 8)])[0], torch.full((1, 8), 6.5)
    )


def test_the_first_error_of_a_compiler_is_raised(cold, monkeypatch):
    def fails(*args):
        raise BuildError("no")

    monkeypatch.setattr(build, "_compile", fails)
    with pytest.raises(BuildError, match="no"), fusion_moe.preparing():
        fusion_moe.run(pointwise(6.5), [torch.ones(3, 8)])


def test_blocks_nest_and_options_hold_in_threads(cold):
    """The cache's folder is an option in force: threads that compile see it."""
    with fusion_moe.preparing():
        fusion_moe.run(pointwise(7.5), [torch.ones(3, 8)])
        with fusion_moe.preparing():
            fusion_moe.run(pointwise(8.5), [torch.ones(3, 8)])
        assert len(libraries(cold)) == 1
    assert len(libraries(cold)) == 2


def test_all_sizes_are_one_for_each_set_of_kernels():
    """None is missed that lasts as long as a step of the search, and none is found twice."""
    bounds = (1, 2, 3, 65, 77, 1000, 4097, 100_000)

    def needed(n: int) -> int:
        return sum(n >= bound for bound in bounds)

    assert [needed(n) for n in _one_for_each(needed)] == [1, 2, 3, 4, 5, 6, 7, 8]


class Bounded:
    """A launch that needs one of five kernels, by its rows."""

    def builds(self, device, sizes):
        kernel = sum(sizes["m"] > bound for bound in (8, 200, 5000, 6000))
        yield kernel, lambda: kernel


@pytest.mark.parametrize(
    ("tokens", "keys"), [(1, [1, 4, 3, 2]), (20, [0, 4, 3, 2]), (300, [0, 1, 4, 3])]
)
def test_builds_of_other_sizes_are_each_there_once(tokens, keys):
    """Those of few tokens, then the longest first; none that the call compiles itself."""
    device = torch.device("cpu")
    builds = builds_of_other_sizes(Bounded(), device, {"t": tokens, "m": 2 * tokens})
    assert [key for key, _ in builds] == [build() for _, build in builds] == keys


def test_no_tokens_have_no_other_sizes():
    device = torch.device("cpu")
    assert builds_of_other_sizes(Bounded(), device, {"t": 0, "m": 0}) == []


def test_other_sizes_are_in_proportion():
    assert _units((("s0", 6), ("s1", 48))) == (("s0", 1), ("s1", 8))
    assert _units((("s0", 0),)) == _units(()) == ()


def test_all_sizes_of_a_program(cold, monkeypatch):
    with fusion_moe.preparing("all") as noted:
        fusion_moe.run(pointwise(9.5), [torch.ones(3, 8)])
    assert [dict(call.sizes) for call in noted] == [dict.fromkeys(pointwise(9.5).symbols, 3)]
    forbid(monkeypatch)
    assert torch.equal(
        fusion_moe.run(pointwise(9.5), [torch.ones(1000, 8)])[0], torch.full((1000, 8), 10.5)
    )
    with (
        pytest.raises(OptionError, match="sizes = 'most'; expected one of called, all"),
        fusion_moe.preparing("most"),
    ):
        pass


def test_what_is_prepared_already_costs_nothing(cold, monkeypatch):
    """As a second layer of equal sizes."""
    for _ in range(2):
        with fusion_moe.preparing("all"):
            fusion_moe.run(pointwise(11.5), [torch.ones(3, 8)])
        monkeypatch.setattr(Function, "builds", None)  # not asked what it needs


def test_nothing_to_compile():
    with fusion_moe.preparing():
        pass
    compile_all([])


@pytest.mark.slow
@pytest.mark.once
def test_a_model_generates_without_compiling(cold, monkeypatch):
    pytest.importorskip("transformers")
    from tiny_qwen3 import qwen3_moe

    model = qwen3_moe().bfloat16()
    with pytest.raises(
        UnsupportedError,
        match="a Qwen3MoeForCausalLM that calls nothing of fusion_moe; expected experts of ours",
    ):
        fusion_moe.prepare_(model, tokens=[1])
    fusion_moe.quantize_(model)
    fusion_moe.prepare_(model, tokens=[1, 8])
    forbid(monkeypatch)
    with torch.no_grad():
        model.generate(torch.ones(1, 8, dtype=torch.long), max_new_tokens=3, do_sample=False)


def test_counts_and_models_that_cannot_be_prepared():
    for tokens in ([0], 8, "some"):
        with pytest.raises(
            OptionError,
            match=r"tokens = .*; expected a list of positive "
            r"integers, or 'all'",
        ):
            fusion_moe.prepare_(experts(E, H, I), tokens=tokens)
    with pytest.raises(
        UnsupportedError,
        match="tokens for a NVFP4Experts; expected a language model.*fusion_moe.preparing",
    ):
        fusion_moe.prepare_(experts(E, H, I), tokens=[1])
