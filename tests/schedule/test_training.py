"""The kernels of a forward that saves values: where it is divided, and that each piece still has a
kernel.
"""

from __future__ import annotations

import pytest
from fusions import assert_same_bits, fusion_of_call
from moe_models import H, I, routing, tokens as random_tokens, weight
from test_split import prepared, run_segments, shown

from fusion_moe import options
from fusion_moe.backends import TARGETS
from fusion_moe.compile import compile_fusion
from fusion_moe.ir.core import Fusion
from fusion_moe.ir.derivative import differentiate

TENSORS = [random_tokens(5).bfloat16(), *routing(5), *weight(2 * I, H), *weight(H, I)]


def forward(*wrt: int) -> Fusion:
    """expert_mlp as it runs where inputs `wrt` want a gradient: 0 is x, 2 the weights of slots."""
    fusion = fusion_of_call("expert_mlp", *TENSORS)
    return differentiate(fusion, wrt).forward if wrt else fusion


def test_where_a_forward_is_divided(golden):
    """A kernel stores tiles of one width: FC1's result is saved, so what halves it runs after it.
    FC2's is stored for the sum anyway.
    """
    golden(
        "\n\n".join(
            f"# {wrt}\n{shown(prepared(forward(*wrt)))}" for wrt in ((), (0,), (2,), (0, 2))
        )
    )


@pytest.mark.compiler
@pytest.mark.parametrize("wrt", [(0,), (2,), (0, 2)])
def test_no_piece_of_a_forward_runs_in_plain_torch(wrt):
    for target in ("cpu", "cuda"):
        program = compile_fusion(forward(*wrt), TARGETS[target], options.current())
        assert [kernel.backend for kernel in program.kernels] == [target] * len(program.kernels)
        assert program.joined is not None
        assert program.graph_safe == (target == "cuda")


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize("wrt", [(0,), (2,), (0, 2)])
def test_the_pieces_do_what_the_forward_does(wrt, target):
    fusion = prepared(forward(*wrt), TARGETS[target])
    assert_same_bits(run_segments(fusion, TARGETS[target], *TENSORS), fusion.evaluate(*TENSORS))
