"""fusion_moe::run on inputs in parts: which are joined without a copy, and what gradients of parts
are.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from bad_calls import messages
from fusions import assert_same_bits
from torch import Tensor

from fusion_moe import FusionDefinition
from fusion_moe.definitions.tensor_lists import joined
from fusion_moe.ir.text import one_line

RUN = torch.ops.fusion_moe.run
BUFFER = torch.arange(4 * 12, dtype=torch.float32)

LAYOUTS = {  # parts of [3, 4], and whether they are one tensor already
    "neighbours": (lambda: list(BUFFER.view(4, 3, 4).unbind()), True),
    "behind an offset": (lambda: list(BUFFER.view(4, 3, 4)[1:].unbind()), True),
    "one": (lambda: [BUFFER.view(4, 3, 4)[2]], True),
    "a gap": (lambda: list(BUFFER.view(4, 3, 4)[::2].unbind()), False),
    "strides": (lambda: list(BUFFER.view(4, 4, 3).mT.unbind()), False),
    "out of order": (lambda: list(BUFFER.view(4, 3, 4).unbind())[::-1], False),
    "storages apart": (lambda: [t.clone() for t in BUFFER.view(4, 3, 4)], False),
    "a storage for each, side by side": (
        lambda: [torch.from_numpy(a).view(3, 4) for a in BUFFER.numpy().reshape(4, 12)],
        False,
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_joined(layout):
    parts, shared = LAYOUTS[layout][0](), LAYOUTS[layout][1]
    whole = joined(parts)
    assert whole.equal(torch.stack(parts))
    assert (whole.data_ptr() == parts[0].data_ptr()) == shared


def program() -> str:
    """x [s0, 4], w [2, 4], v [3, 4] -> (x * w[0] + w[1]), x summed with v"""
    fd = FusionDefinition()
    x, w, v = (fd.define_tensor(shape=[n, 4], dtype="f32") for n in (-1, 2, 3))
    first, second = (
        fd.ops.slice(w, start_indices=(i, 0), end_indices=(i + 1, 4)) for i in range(2)
    )
    fd.add_output(fd.ops.add(fd.ops.mul(x, first), second))
    fd.add_output(
        fd.ops.mul(fd.ops.sum(x, dims=(0,), keepdim=True), fd.ops.sum(v, dims=(0,), keepdim=True))
    )
    return one_line(fd.fusion())


def tensors() -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=g) for shape in ((5, 4), (4,), (4,), (3, 4))]


@pytest.mark.parametrize("wanted", [(0, 1, 2, 3), (1,), (2, 3), (0,)])
def test_parts_get_their_gradients(wanted):
    text, leaves = program(), [t.requires_grad_(i in wanted) for i, t in enumerate(tensors())]
    y, z = RUN(text, leaves, [5], None, [0, 2, 0])
    (y.square().sum() + z.sum()).backward()
    other = [t.requires_grad_() for t in tensors()]
    x, first, second, v = other
    ((x * first + second).square().sum() + (x.sum(0) * v.sum(0)).sum()).backward()
    for i, (t, want) in enumerate(zip(leaves, other, strict=True)):
        assert (t.grad is not None) == (i in wanted)
        if i in wanted:
            torch.testing.assert_close(t.grad, want.grad)


def test_a_program_is_differentiated_as_its_operations_are():
    text, leaves = program(), [t.requires_grad_() for t in tensors()]
    whole = [leaves[0], torch.stack(leaves[1:3]), leaves[3]]
    assert_same_bits(RUN(text, leaves, [5], None, [0, 2, 0]), RUN(text, whole, [5]))
    torch.library.opcheck(RUN.default, (text, [t.detach().requires_grad_() for t in whole], [5]))
    torch.library.opcheck(
        RUN.default, (text, [t.detach().requires_grad_() for t in leaves], [5], None, [0, 2, 0])
    )


def test_bad_parts(golden):
    x, first, second, v = tensors()
    cases = {
        "one too few": [x, first, v],
        "another shape": [x, first, second[1:], v],
        "another dtype": [x, first, second.half(), v],
    }
    run = partial(RUN, program(), sizes=[5], options=None, parts=[0, 2, 0])
    golden(messages({name: partial(run, given) for name, given in cases.items()}))
