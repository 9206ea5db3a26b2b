"""Fusing an operation of your own: its kernel and fake as usual in torch, and a translator of a few
lines.

    python examples/register_translator.py

Prints what was fused, once for a call that the translator accepts and once for one that it refuses,
and compares the results with eager.
"""

import argparse

import torch
from torch import Tensor

import fusion_moe
from fusion_moe import Untranslatable


@torch.library.custom_op("mylib::squared_relu", mutates_args=())  # the operation, for eager
def squared_relu(x: Tensor, power: int = 2) -> Tensor:
    return x.relu() ** power


@squared_relu.register_fake  # its fake, for tracing
def _(x: Tensor, power: int = 2) -> Tensor:
    return torch.empty_like(x)


@fusion_moe.translator("mylib::squared_relu")  # its translator, for fusion
def _(fd, x, power=2):
    if power != 2:
        raise Untranslatable(f"power = {power}", expected="2")
    y = fd.ops.relu(x)
    return y * y


class Experts(torch.nn.Module):
    """Experts with squared-ReLU activations: NVFP4 weights, rows of group g times matrix g."""

    def __init__(self, experts: int = 8, hidden: int = 64, intermediate: int = 128):
        super().__init__()
        self.up = torch.ops.fusion_moe.nvfp4_quantize(
            torch.randn(experts, intermediate, hidden) / 8
        )
        self.down = torch.ops.fusion_moe.nvfp4_quantize(
            torch.randn(experts, hidden, intermediate) / 8
        )

    def forward(self, x: Tensor, ends: Tensor, power: int = 2) -> Tensor:
        y = squared_relu(torch.ops.fusion_moe.nvfp4_grouped_mm(x, *self.up, ends), power)
        return torch.ops.fusion_moe.nvfp4_grouped_mm(y, *self.down, ends)


if __name__ == "__main__":
    # --help alone
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    torch.manual_seed(0)
    experts, x = Experts(), torch.randn(40, 64, dtype=torch.bfloat16)
    # where the rows of each expert end
    ends = torch.tensor([5, 5, 12, 20, 21, 30, 39, 40], dtype=torch.int32)
    with torch.no_grad():
        print("== squared_relu(y, 2) is fused with the product before it\n")
        print(fusion_moe.explain(experts, x, ends).details())
        print("\n== squared_relu(y, 3) is refused by its translator, and stays a call\n")
        print(fusion_moe.explain(experts, x, ends, power=3).details())
        for power in (2, 3):
            compiled = torch.compile(experts, backend="fusion_moe", fullgraph=True)
            torch.testing.assert_close(
                compiled(x, ends, power), experts(x, ends, power), rtol=2e-2, atol=2e-2
            )
    print("\ncompiled and eager agree")
