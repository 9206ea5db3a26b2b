"""Programs: what they return, and the option that checks every stage of them."""

import re
import runpy
from dataclasses import replace

import pytest
import torch
from fusions import fusion_of_call
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

import fusion_moe
from fusion_moe import backends, compile as pipeline, options
from fusion_moe.encodings import find, quantize
from fusion_moe.errors import FusionError, ShapeError, UnsupportedError
from fusion_moe.ir.types import dtype_name
from fusion_moe.passes import PASSES
from fusion_moe.passes.rewrite import rewrite
from fusion_moe.runtime import check, cuda


def silu_of_pieces():
    """x f32[s0, 4] -> x / (exp(-x) + 1), which canonicalize makes a silu"""
    fd = fusion_moe.FusionDefinition()
    x = fd.define_tensor(shape=[-1, 4], dtype="f32")
    fd.add_output(fd.ops.div(x, fd.ops.add(fd.ops.exp(fd.ops.neg(x)), 1.0)))
    return fd.fusion()


def halved(fusion, to):
    """A pass that is wrong: it halves what silu gives."""
    return rewrite(
        fusion,
        lambda fd, op, inputs: (
            (fd.ops.mul(fd.ops.silu(*inputs), 0.5),) if op.kind.name == "silu" else None
        ),
    )


def compiled(fusion, **switches):
    return pipeline.compile_fusion(
        fusion, backends.TARGETS["cpu"], options.current().replace(**switches)
    )


def test_checked_layers_give_the_same():
    experts = fusion_moe.NVFP4Experts.from_float(torch.randn(4, 64, 64), torch.randn(4, 64, 32))
    call = torch.randn(5, 64).bfloat16(), torch.randint(0, 4, (5, 2)), torch.rand(5, 2)
    with options.override(check=True):
        checked = experts(*call)
    assert torch.equal(checked, experts(*call))


def test_a_pass_that_changes_a_bit_is_found_and_named(monkeypatch):
    monkeypatch.setattr(pipeline, "PASSES", (*PASSES, halved))
    program = compiled(silu_of_pieces(), check=True)
    with pytest.raises(
        FusionError,
        match="halved: output 0 after halved differs; expected the same bits as before it",
    ):
        program([torch.randn(3, 4)])
    # unchecked it goes unseen
    assert compiled(silu_of_pieces())([torch.randn(3, 4)])[0].shape == (3, 4)


def off_by_one(kernel):
    """A kernel that is wrong in one element, and spoils its input."""

    def launch(*inputs, sizes):
        (y,) = kernel.launch(*inputs, sizes=sizes)
        y[1, 2] += 1
        inputs[0].fill_(9)
        return (y,)

    return replace(kernel, launch=launch)


def test_a_kernel_that_is_wrong_is_found_and_named(tmp_path):
    x = torch.arange(12.0).view(3, 4)
    with options.override(cache_dir=str(tmp_path)):
        program = compiled(silu_of_pieces(), check=True)
        wrong = replace(program, kernels=tuple(map(off_by_one, program.kernels)))
        with pytest.raises(FusionError) as caught:
            wrong([x.clone()])
        said = (
            r"check: segment 0, `silu`: its kernel \[pointwise, cpu\] gets 1 of 12 elements of "
            r"output 0 wrong, the worst at \[1, 2\], "
        )
        assert re.match(
            said + r"off by 1: 6\.98\d+ in place of 5\.98\d+; expected what the "
            r"segment means",
            str(caught.value),
        )
        (script,) = tmp_path.glob("check-*.py")
        assert f"python {script} raises this again" in str(caught.value)
        (inputs,) = torch.load(script.with_suffix(".pt"))
        assert inputs.equal(x)
        runpy.run_path(str(script), run_name="__main__")  # compiled by itself, the kernel is right
        assert not [path for path in tmp_path.glob("check-*") if path.stat().st_mode & 0o077]


def test_all_kernels_in_one_call_are_compared_too():
    program = compiled(silu_of_pieces(), check=True)
    inner = program.joined

    class Doubled:
        def plan(self, device, sizes):
            return self

        def run(self, tensors, also):
            plan = inner.plan(tensors[0].device, program.sizes(tensors, {}))
            return tuple(2 * t for t in plan.run(tensors, also))

    wrong = replace(program, joined=Doubled())
    with pytest.raises(
        FusionError,
        match="check: all kernels in one call: it gets 12 of 12 elements of output 0 wrong",
    ):
        wrong([torch.ones(3, 4)])


def test_no_graph_is_captured_of_checked_programs(monkeypatch):
    program = compiled(silu_of_pieces(), check=True)
    assert not program.graph_safe
    monkeypatch.setattr(cuda, "capturing", lambda: True)
    check.refuse_capture(torch.device("cpu"))
    with pytest.raises(
        UnsupportedError,
        match="the option check while a CUDA graph is captured; "
        "expected calls whose results can be read",
    ):
        check.refuse_capture(torch.device("cuda"))


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [(torch.float32, "cpu"), (torch.bfloat16, "cpu"), (torch.bfloat16, "cuda")],
)
def test_what_the_arithmetic_explains_is_no_difference(dtype, backend):
    """Another order of sums, a unit in the last place; not a lost column, nor one number that is
    not finite.
    """
    fusion = product_of_rows(dtype)
    g, ends = torch.Generator().manual_seed(0), torch.tensor([1000], dtype=torch.int32)
    a, b = (
        torch.randn(1000, 1024, generator=g).to(dtype),
        torch.randn(1, 64, 1024, generator=g).to(dtype),
    )
    (want,) = fusion.evaluate(a, b, ends)
    near, lost, bad = a.double() @ b[0].double().T, a.clone(), want.clone()
    if backend == "cuda":
        near *= 1 - 2**-12
    lost[:, 5] = 0
    bad[7, 7] = torch.inf
    for found, differs in (
        (near.to(dtype), False),
        (*fusion.evaluate(lost, b, ends), True),
        (bad, True),
    ):
        assert (
            bool(list(check.differences(fusion, [a, b, ends], [found], [want], backend))) == differs
        )


@pytest.mark.parametrize(
    ("weights", "dtype", "rounded"),
    [
        ("nvfp4", torch.bfloat16, False),
        ("mxfp4", torch.bfloat16, False),
        ("int4", torch.bfloat16, True),
        ("int4", torch.float16, False),  # which holds 4 bits times 8
    ],
)
def test_weights_that_the_activations_dtype_does_not_hold_may_be_rounded(weights, dtype, rounded):
    g, ends = torch.Generator().manual_seed(0), torch.tensor([8], dtype=torch.int32)
    b = list(quantize(torch.randn(1, 16, 64, generator=g), encoding=find(weights)))
    a = torch.randn(8, 64, generator=g).to(dtype)
    given = {"weight_format": weights, "out_dtype": torch.float32}
    fusion = fusion_of_call("grouped_mm", a, b, ends, **given)
    (want,) = fusion.evaluate(a, *b, ends)
    near = want + want.abs().max() * 2**-8
    for backend, tolerated in ("cpu", False), ("cuda", rounded):
        found = check.differences(fusion, [a, *b, ends], [near], [want], backend)
        assert bool(list(found)) != tolerated


def product_of_rows(dtype):
    return fusion_of_call(
        "grouped_mm",
        torch.zeros(4, 1024, dtype=dtype),
        [torch.zeros(1, 64, 1024, dtype=dtype)],
        torch.zeros(1).int(),
        weight_format=dtype_name(dtype),
    )


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
        (
            fusion_moe.FusionDefinition().fusion(),
            [],
            "run: a Fusion without outputs; expected at least one",
        ),
        (silu_of_pieces(), x, "run: a tensor in place of the inputs; expected a list"),
    ):
        with pytest.raises(FusionError, match=said):
            fusion_moe.run(fusion, tensors)


def test_what_torchs_dispatcher_knows_of_tensors():
    """Elements that are negated where they are read, tangents, shapes without elements, and batches
    of vmap.
    """
    fusion, x = silu_of_pieces(), torch.randn(2, 3, 4)

    def call(t):
        return fusion_moe.run(fusion, [t])[0]

    assert torch.equal(call(torch._neg_view(x[0])), call(-x[0]))
    assert torch.equal(torch.vmap(call)(x), torch.stack([call(t) for t in x]))
    with FakeTensorMode():
        assert call(torch.empty(3, 4)).shape == call(torch.empty(3, 4)).shape
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="with a tangent"):
        call(forward_ad.make_dual(x[0], x[1]))


def freed(t, nbytes=0):
    """t, whose storage was made smaller after that, as FSDP frees parameters."""
    t.untyped_storage().resize_(nbytes)
    return t


@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_memory_that_was_freed(target):
    """The whole of a tensor, the end of a view, and that of a transposed one; what no element needs
    is not missed.
    """
    program = pipeline.compile_fusion(
        silu_of_pieces(), fusion_moe.backends.TARGETS[target], options.current()
    )
    for t, nbytes in (
        (torch.randn(3, 4), 0),
        (torch.randn(6, 4)[3:], 92),
        (torch.randn(4, 3).T, 44),
        (torch.randn(20).as_strided((3, 4), (5, 1), 2), 60),
    ):
        with pytest.raises(
            ShapeError,
            match=r"input 0, torch.float32 \[3, 4\], needs \d+ bytes "
            r"of a storage that has \d+ for it",
        ):
            program([freed(t, nbytes)])
    for t, nbytes in (
        (torch.randn(6, 4)[2:5], 80),
        (torch.randn(1).expand(3, 4), 4),
        (torch.randn(3, 4)[:0], 0),
    ):
        assert program([freed(t, nbytes)])[0].shape == t.shape


def test_parts_that_were_freed():
    for some in [torch.randn(2, 4) for _ in range(3)], list(torch.randn(3, 2, 4)):
        freed(some[1])
        with pytest.raises(ShapeError, match="needs 32 bytes|needs 64 bytes|needs 96 bytes"):
            fusion_moe.definitions.tensor_lists.joined(some)
