"""ScaledSwiGLU and ScaledClampedQGeGLU against float64, and the order of columns that they say they
read.
"""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from bad_calls import messages
from layers import NEAR, assert_near, glu, layer, uniform, wide
from torch import nn
from ways import compiled

from fusion_moe import options
from fusion_moe.errors import OptionError
from fusion_moe.nn import ScaledClampedQGeGLU, ScaledSwiGLU, Sequential, deinterleave, interleave

SHAPES = [(5, 7, 128), (13, 200), (0, 64)]
NUMBERS = {"limit": 2.0, "alpha": 1.5, "offset": 0.5}
KINDS = {
    "swiglu": (ScaledSwiGLU, {}),
    "clamped": (partial(ScaledClampedQGeGLU, **NUMBERS), NUMBERS),
}


@pytest.mark.parametrize(("kind", "shape", "dtype"), list(product(KINDS, SHAPES, NEAR)))
def test_against_float64(kind, shape, dtype):
    """For every set of tensors that want a gradient, columns in either order."""
    with options.override(target="reference"):
        compare(
            kind,
            shape,
            dtype,
            [(size, *wanted) for size in (None, 4) for wanted in product((False, True), repeat=2)],
        )


def test_kernels_against_float64():
    compare("clamped", (71, 192), torch.bfloat16, [(32, True, True)])
    compare("swiglu", (13, 200), torch.float32, [(None, True, True)])


def compare(kind, shape, dtype, cases):
    make, meant = KINDS[kind]
    for size, of_x, of_scales in cases:
        module = make(size)
        x, scales = (
            uniform(*shape, dtype=dtype, low=-4, high=4),
            uniform(*shape[:-1], seed=1, low=0.0),
        )
        dy = uniform(*shape[:-1], shape[-1] // 2, dtype=dtype, seed=2)
        other, factor = wide(x), wide(scales)
        want = glu(other, factor, size or 0, **meant)
        want.backward(dy.double())
        y = module(x.requires_grad_(of_x), scales.requires_grad_(of_scales))
        assert (y.dtype, y.requires_grad) == (dtype, of_x or of_scales)
        assert_near(y, want, dtype, 4)
        if y.requires_grad:
            y.backward(dy)
        assert_near(x.grad, other.grad if of_x else None, dtype, 4)
        assert_near(scales.grad, factor.grad if of_scales else None, torch.float32, 40)


def test_nothing_where_it_is_clamped():
    module, x = ScaledClampedQGeGLU(), torch.tensor([[8.0, 1.0, -9.0, 0.5]]).requires_grad_()
    module(x, torch.ones(1)).sum().backward()
    assert x.grad[0].ne(0).tolist() == [False, True, False, True]


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_interleaved_rows(dim):
    """Where the first gate and linear rows of each block come from; and back."""
    weight = torch.arange(96).view(16, 6) if dim == 0 else torch.arange(96).view(6, 16)
    found = interleave(weight, 4, dim)
    order = [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15]
    assert found.equal(weight.index_select(dim, torch.tensor(order)))
    assert deinterleave(found, 4, dim).equal(weight)


def test_state_dicts_say_the_order():
    made = {size: nn.ModuleDict({"act": ScaledSwiGLU(size)}) for size in (None, 8)}
    for size, model in made.items():
        for other, into in made.items():
            if other == size:
                into.load_state_dict(model.state_dict())
                continue
            says = f"act: a state dict with glu_interleave_size = {size}; expected {other}; "
            with pytest.raises(OptionError, match=says):
                into.load_state_dict(model.state_dict())
    made[8].load_state_dict({})  # another library's, which says nothing


@pytest.mark.parametrize(
    "saved", [torch.zeros(24), torch.tensor(8), "none", None, torch.tensor(0.5)]
)
def test_a_state_dict_of_another_order(saved):
    with pytest.raises(OptionError, match="a state dict with glu_interleave_size = "):
        ScaledSwiGLU().load_state_dict({"glu_interleave_size": saved})


def test_compiled():
    module = ScaledClampedQGeGLU(4)
    for f in (module, compiled(module)):
        x, scales = uniform(6, 32).requires_grad_(), uniform(6).requires_grad_()
        f(x, scales).sum().backward()
        want = torch.autograd.grad(
            glu(a := wide(x), b := wide(scales), 4, 7.0, 1.702, 1.0).sum(), (a, b)
        )
        assert_near(x.grad, want[0], torch.float32)
        assert_near(scales.grad, want[1], torch.float32, 4)


def test_bad_calls(golden):
    x, scales = uniform(6, 24), uniform(6)
    cases = {
        "an odd number of columns": lambda: ScaledSwiGLU()(x[:, 1:], scales),
        "blocks that do not divide": lambda: ScaledSwiGLU(8)(x, scales),
        "no blocks": lambda: ScaledSwiGLU(0),
        "too few scales": lambda: ScaledSwiGLU()(x, scales[1:]),
        "scales of integers": lambda: ScaledSwiGLU()(x, scales.long()),
        "scales elsewhere": lambda: ScaledSwiGLU()(x, scales.to("meta")),
        "rows of integers": lambda: ScaledSwiGLU()(x.long(), scales),
        "rows of a weight that blocks do not divide": lambda: interleave(x, 4),
        "a layer before it that does not fit": lambda: Sequential(
            layer(2, 24, 20), ScaledSwiGLU(8)
        )(x, torch.tensor([3, 3]), scales),
    }
    golden(messages(cases))
