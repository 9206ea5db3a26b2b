"""Programs: what they return, and the option that checks every stage of them."""

import pytest
import torch

import fusion_moe
from fusion_moe import compile as pipeline
from fusion_moe import options, target
from fusion_moe.errors import FusionError, ShapeError
from fusion_moe.passes import PASSES
from fusion_moe.passes.rewrite import rewrite


def silu_of_pieces():
    """x f32[s0, 4] -> x / (exp(-x) + 1), which canonicalize makes a silu"""
    fd = fusion_moe.FusionDefinition()
    x = fd.define_tensor(shape=[-1, 4], dtype="f32")
    fd.add_output(fd.ops.div(x, fd.ops.add(fd.ops.exp(fd.ops.neg(x)), 1.0)))
    return fd.fusion()


def halved(fusion, to):
    """A pass that is wrong: it halves what silu gives."""
    return rewrite(fusion, lambda fd, op, inputs: (fd.ops.mul(fd.ops.silu(*inputs), 0.5),) if op.kind.name == "silu" else None)


def compiled(fusion, **switches):
    return pipeline.compile_fusion(fusion, target.TARGETS["cpu"], options.current().replace(**switches))


def test_checked_programs_give_the_same():
    x = torch.randn(3, 4)
    assert torch.equal(compiled(silu_of_pieces(), check=True)([x])[0], compiled(silu_of_pieces())([x])[0])


def test_checked_layers_give_the_same():
    experts = fusion_moe.NVFP4Experts.from_float(torch.randn(4, 64, 64), torch.randn(4, 64, 32))
    call = torch.randn(5, 64).bfloat16(), torch.randint(0, 4, (5, 2)), torch.rand(5, 2)
    with options.override(check=True):
        checked = experts(*call)
    assert torch.equal(checked, experts(*call))


def test_a_pass_that_changes_a_bit_is_found_and_named(monkeypatch):
    monkeypatch.setattr(pipeline, "PASSES", (*PASSES, halved))
    program = compiled(silu_of_pieces(), check=True)
    with pytest.raises(FusionError, match="halved: output 0 after halved differs; expected the same bits as before it"):
        program([torch.randn(3, 4)])
    assert compiled(silu_of_pieces())([torch.randn(3, 4)])[0].shape == (3, 4)  # unchecked it goes unseen


def test_outputs_share_no_memory_with_inputs_or_each_other():
    fd = fusion_moe.FusionDefinition()
    x = fd.define_tensor(shape=[4, 6], dtype="f32")
    turned = fd.ops.permute(x, dims=(1, 0))
    for v in (x, turned, fd.ops.reshape(turned, new_shape=(24,))):
        fd.add_output(v)
    x = torch.randn(4, 6)
    outputs = fusion_moe.run(fd.fusion(), [x])
    assert len({t.untyped_storage().data_ptr() for t in (x, *outputs)}) == 4
    assert all(t.is_contiguous() for t in outputs)
    assert torch.equal(outputs[2], x.T.reshape(24))


def test_inputs_are_checked_before_anything_runs():
    with pytest.raises(ShapeError, match=r"i0 has shape \[3, 5\]; expected \[3, 4\]"):
        fusion_moe.run(silu_of_pieces(), [torch.randn(3, 5)])


def test_what_run_does_not_take():
    x = torch.randn(3, 4)
    for fusion, tensors, said in (
        ("def fusion(fd):", [x], "run: a str; expected a Fusion"),
        (fusion_moe.FusionDefinition().fusion(), [], "run: a Fusion without outputs; expected at least one"),
        (silu_of_pieces(), x, "run: a tensor in place of the inputs; expected a list"),
    ):
        with pytest.raises(FusionError, match=said):
            fusion_moe.run(fusion, tensors)


def freed(t, nbytes=0):
    """t, whose storage was made smaller after that, as FSDP frees parameters."""
    t.untyped_storage().resize_(nbytes)
    return t


@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_memory_that_was_freed(target):
    """The whole of a tensor, the end of a view, and that of a transposed one; what no element needs is not missed."""
    program = pipeline.compile_fusion(silu_of_pieces(), fusion_moe.target.TARGETS[target], options.current())
    for t, nbytes in (
        (torch.randn(3, 4), 0), (torch.randn(6, 4)[3:], 92), (torch.randn(4, 3).T, 44), (torch.randn(20).as_strided((3, 4), (5, 1), 2), 60)
    ):  # fmt: skip
        with pytest.raises(ShapeError, match=r"input 0, torch.float32 \[3, 4\], needs \d+ bytes of a storage that has \d+ for it"):
            program([freed(t, nbytes)])
    for t, nbytes in (torch.randn(6, 4)[2:5], 80), (torch.randn(1).expand(3, 4), 4), (torch.randn(3, 4)[:0], 0):
        assert program([freed(t, nbytes)])[0].shape == t.shape


def test_parts_that_were_freed():
    for some in [torch.randn(2, 4) for _ in range(3)], list(torch.randn(3, 2, 4)):
        freed(some[1])
        with pytest.raises(ShapeError, match="needs 32 bytes|needs 64 bytes|needs 96 bytes"):
            fusion_moe.parts.joined(some)
