"""Outputs that are written over inputs: what is read before, what may be written over, in evaluate
and in compiled programs.
"""

from __future__ import annotations

import pytest
import torch
from fusions import assert_same_bits
from torch import Tensor
from torch.profiler import profile

import fusion_moe
from fusion_moe import FusionDefinition, options
from fusion_moe.backends import TARGETS
from fusion_moe.compile import lower
from fusion_moe.errors import FusionError, ShapeError, UnsupportedError
from fusion_moe.ir.core import Fusion
from fusion_moe.ir.derivative import differentiate
from fusion_moe.ir.text import parse, text


def evaluated(fusion: Fusion, tensors: list[Tensor]) -> list[Tensor]:
    return list(fusion.evaluate(*tensors))


def compiled(**switches):
    def run(fusion: Fusion, tensors: list[Tensor]) -> list[Tensor]:
        with options.override(**switches):
            return fusion_moe.run(fusion, tensors)

    return run


def profiled(fusion: Fusion, tensors: list[Tensor]) -> list[Tensor]:
    """Kernels one by one, as a profiler sees them."""
    with profile():
        return fusion_moe.run(fusion, tensors)


WAYS = {
    "evaluate": evaluated,
    "reference": compiled(target="reference"),
    "check": compiled(check=True),
    "cpu": compiled(),
    "one by one": profiled,
}


@pytest.fixture(params=WAYS)
def run(request):
    return WAYS[request.param]


def counter() -> Fusion:
    """x f32[t, 4], seen f32[1, 4] -> seen + sum(x), written over seen; x * seen; seen as a
    vector.
    """
    fd = FusionDefinition()
    x = fd.define_tensor(shape=[-1, 4], dtype="f32")
    seen = fd.define_tensor(shape=[1, 4], dtype="f32", role="state")
    fd.add_output(fd.ops.add(seen, fd.ops.sum(x, dims=(0,), keepdim=True)), alias_input=seen)
    fd.add_output(fd.ops.mul(x, seen))
    fd.add_output(fd.ops.reshape(seen, new_shape=(4,)))
    return fd.fusion()


def test_no_reader_sees_what_is_written(run):
    x, seen = torch.arange(12.0).view(3, 4), torch.full((1, 4), 2.0)
    for before in (2.0, 2.0 + x.sum(0, keepdim=True)):
        before = torch.as_tensor(before).expand(1, 4).clone()
        total, product, vector = run(counter(), [x, seen])
        assert total is seen
        assert_same_bits(
            [seen, product, vector], [before + x.sum(0, keepdim=True), x * before, before[0]]
        )
    assert x.equal(torch.arange(12.0).view(3, 4))


def test_two_inputs_change_places(run):
    fd = FusionDefinition()
    a, b = (fd.define_tensor(shape=[3], dtype="f32", role="state") for _ in range(2))
    fd.add_output(b, alias_input=a)
    fd.add_output(a, alias_input=b)
    tensors = [torch.arange(3.0), torch.ones(3)]
    made = run(fd.fusion(), tensors)
    assert [t is made[i] for i, t in enumerate(tensors)] == [True, True]
    assert_same_bits(tensors, [torch.ones(3), torch.arange(3.0)])


def test_one_value_over_two_inputs_and_in_new_memory(run):
    fd = FusionDefinition()
    x, a, b = (fd.define_tensor(shape=[3], dtype="f32") for _ in range(3))
    y = fd.ops.exp(x)
    for over in (a, None, b):
        fd.add_output(y, alias_input=over)
    tensors = [torch.arange(3.0) for _ in range(3)]
    want = torch.arange(3.0).exp()
    first, new, second = run(fd.fusion(), tensors)
    assert first is tensors[1]
    assert second is tensors[2]
    torch.testing.assert_close([first, new, second], [want] * 3)
    assert len({t.data_ptr() for t in (first, new, second, tensors[0])}) == 4


def test_a_weights_gradient_is_added_to_what_is_there(run):
    """Into part of a larger buffer, whose other elements stay; empty groups keep what they have."""
    fd = FusionDefinition()
    t = fd.define_size("t")
    dy, x = (fd.define_tensor(shape=[t, n], dtype="bf16") for n in (4, 8))
    offs, grad = (
        fd.define_tensor(shape=[3], dtype="i32"),
        fd.define_tensor(shape=[3, 4, 8], dtype="f32", role="state"),
    )
    ends = fd.groups_of(offs, t)
    made = fd.ops.grouped_outer(fd.ops.partition(dy, ends), fd.ops.partition(x, ends), ends)
    fd.add_output(fd.ops.add(grad, made), alias_input=grad)
    rows = torch.randint(-4, 5, (6, 12), generator=torch.Generator().manual_seed(0)).bfloat16()
    given = [
        rows[:, :4].contiguous(),
        rows[:, 4:].contiguous(),
        torch.tensor([2, 2, 5], dtype=torch.int32),
    ]
    buffer = torch.full((3, 4, 16), 0.5)
    run(fd.fusion(), [*given, buffer[..., 8:]])
    for g, part in enumerate((slice(0, 2), slice(0, 0), slice(2, 5))):
        assert buffer[g, :, 8:].equal(0.5 + given[0][part].float().T @ given[1][part].float())
    assert (buffer[..., :8] == 0.5).all()


def test_input_that_is_refused_leaves_the_memory_as_it_was(run):
    fd = FusionDefinition()
    x, at = fd.define_tensor(shape=[3, 4], dtype="f32"), fd.define_tensor(shape=[3], dtype="i32")
    fd.add_output(fd.ops.index_select(x, at, dim=0), alias_input=x)
    tensor = torch.arange(12.0).view(3, 4)
    with pytest.raises(IndexError):
        run(fd.fusion(), [tensor, torch.tensor([0, 3, 1], dtype=torch.int32)])
    assert tensor.equal(torch.arange(12.0).view(3, 4))


def pair() -> Fusion:
    fd = FusionDefinition()
    for state in [fd.define_tensor(shape=[2, 2], dtype="f32", role="state") for _ in range(2)]:
        fd.add_output(fd.ops.exp(state), alias_input=state)
    return fd.fusion()


def test_what_cannot_be_written_over(golden):
    """Elements that share memory, inputs that share memory, a tensor that autograd tracks. Nothing
    is written, whoever runs it.
    """
    buffer = torch.zeros(8)
    cases = {
        "one element many times": [torch.zeros(2, 1).expand(2, 2), torch.zeros(2, 2)],
        "two inputs that overlap": [buffer[:4].view(2, 2), buffer[3:7].view(2, 2)],
        "a leaf of autograd": [torch.zeros(2, 2), torch.zeros(2, 2, requires_grad=True)],
    }
    said: dict[str, None] = {}
    for what, tensors in cases.items():
        for run in WAYS.values():
            with pytest.raises((ShapeError, UnsupportedError)) as caught:
                run(pair(), tensors)
            said[f"{what}\n    {caught.value}"] = None
            assert not any(t.any() for t in tensors)
    golden("\n".join(said))


def test_what_can_be_written_over(run):
    """A leaf where nobody tracks it; neighbours in one buffer."""
    with torch.no_grad():
        run(pair(), tensors := [torch.zeros(2, 2), torch.zeros(2, 2, requires_grad=True)])
    assert all(t.equal(torch.ones(2, 2)) for t in tensors)
    buffer = torch.zeros(8)
    run(pair(), [buffer[:4].view(2, 2), buffer[4:].view(2, 2)])
    assert buffer.equal(torch.ones(8))


def test_the_text_keeps_effects_and_the_pure_program_has_none():
    fusion = counter()
    assert parse(text(fusion)).aliases == {0: parse(text(fusion)).inputs[1]}
    assert "alias_input" not in text(fusion.pure)
    x, seen = torch.ones(3, 4), torch.zeros(1, 4)
    assert_same_bits(fusion.pure.evaluate(x, seen)[:1], [torch.full((1, 4), 3.0)])
    assert not seen.any()


def test_segments_write_over_nothing():
    assert not any(
        s.fusion.aliases for s in lower(counter(), TARGETS["cpu"], options.current()).segments
    )


def test_what_has_no_meaning():
    with pytest.raises(
        UnsupportedError,
        match="a program that writes over its inputs; differentiate the one without alias_input",
    ):
        differentiate(counter(), (0,))
    fd = FusionDefinition()
    x = fd.define_tensor(shape=[3], dtype="f32")
    for _ in range(2):
        fd.add_output(fd.ops.exp(x), alias_input=x)
    with pytest.raises(FusionError, match="2 outputs over one input"):
        fd.fusion()
