"""Calls on tensors of up to 2^40 rows or columns without elements, which return at once. The tests
that run this have a time limit.

python tests/backends/empty_but_endless.py cpu
"""

from __future__ import annotations

import sys

import torch

import fusion_moe
from fusion_moe import FusionDefinition

LONG = 2**40
ops = torch.ops.fusion_moe
torch.set_default_device(sys.argv[1])


def beside_others() -> list[torch.Tensor]:
    """A program that has results with elements too."""
    fd = FusionDefinition()
    x, y = fd.define_tensor(shape=[-1, -1], dtype="f32"), fd.define_tensor(shape=[-1], dtype="f32")
    none = fd.define_tensor(shape=[-1, 0], dtype="f32")
    made = [fd.ops.exp(x), fd.ops.exp(none), fd.ops.neg(y)]
    made += [
        fd.ops.sum(fd.ops.neg(v), dims=dims, keepdim=False)
        for v in (x, none)
        for dims in ([0], [0, 1])
    ]
    for v in made:
        fd.add_output(v)
    return fusion_moe.run(
        fd.fusion(), [torch.empty(LONG, 0), torch.ones(3), torch.empty(LONG - 1, 0)]
    )


def shapes(found: torch.Tensor | list[torch.Tensor]) -> list[tuple[int, ...]]:
    """Of one result or several."""
    return [tuple(t.shape) for t in ([found] if isinstance(found, torch.Tensor) else found)]


assert shapes(ops.nvfp4_quantize(torch.empty(LONG, 0))) == [(LONG, 0), (LONG, 0), ()]
assert shapes(ops.nvfp4_quantize(torch.empty(0, LONG))) == [(0, LONG // 2), (0, LONG // 16), ()]
assert shapes(ops.scaled_swiglu(torch.empty(LONG, 0))) == [(LONG, 0)]
assert shapes(ops.route(torch.empty(LONG, 0, dtype=torch.int64), 3)) == [(3,), (0,), (LONG, 0)]
assert shapes(
    ops.combine(torch.empty(0, 0), torch.empty(LONG, 0, dtype=torch.int32), torch.empty(LONG, 0))
) == [(LONG, 0)]
assert shapes(
    ops.group_add(torch.empty(2**31 - 1, 0), torch.empty(3, 0), torch.zeros(3, dtype=torch.int32))
) == [(2**31 - 1, 0)]
WEIGHT = (
    torch.empty(0, LONG, 16, dtype=torch.uint8),
    torch.empty(0, LONG, 2, dtype=torch.float8_e4m3fn),
    torch.empty(0),
)
assert shapes(
    ops.nvfp4_grouped_mm(torch.empty(0, 32), *WEIGHT, torch.empty(0, dtype=torch.int32))
) == [(0, LONG)]
found = beside_others()
assert shapes(found) == [(LONG, 0), (LONG - 1, 0), (3,), (0,), (), (0,), ()]
assert found[2].tolist() == [-1.0] * 3
assert found[4] == found[6] == 0
