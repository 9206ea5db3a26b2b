"""The operation with another library's signature on a CUDA device: what it computes, and that it
waits for nothing of its own.
"""

import pytest
import torch

from fusion_moe.frontends.inductor import backend
from fusion_moe.ir.kinds import KINDS
from fusion_moe.ir.types import Groups
from fusion_moe.layouts import SF128X4
from fusion_moe.layouts.groups import ends_from_problem

pytestmark = pytest.mark.gpu
OP = torch.ops.fusion_moe.f16a_nvfp4weight_scaled_grouped_mm
SIZES, N, K = (3, 0, 129, 1), 48, 64


def arguments(device):
    g = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (len(SIZES), N, K // 2), generator=g, dtype=torch.uint8)
    scale = torch.randint(
        0x20, 0x41, (len(SIZES), N, K // 16), generator=g, dtype=torch.uint8
    ).view(torch.float8_e4m3fn)
    ints = [
        torch.tensor(i, dtype=torch.int32)
        for i in ([0, 3, 3, 132], [0, 128, 128, 384], [[m, N, K] for m in SIZES])
    ]
    x, decode = (
        torch.randn(sum(SIZES) + 2, K, generator=g).bfloat16(),
        torch.rand(len(SIZES), generator=g),
    )
    fp4 = codes.to(device).view(torch.float4_e2m1fn_x2).transpose(1, 2)
    return (x.to(device), fp4, *(t.to(device) for t in (SF128X4.forward(scale), decode, *ints)))


def test_as_on_the_cpu():
    torch.testing.assert_close(
        OP(*arguments("cuda")).cpu(), OP(*arguments("cpu")), rtol=2e-2, atol=2e-2
    )


def test_compiled():
    torch._dynamo.reset()
    run = torch.compile(
        lambda *a: torch.nn.functional.gelu(OP(*a)),
        backend=backend,
        mode="reduce-overhead",
        fullgraph=True,
    )
    with torch.inference_mode():
        for _ in range(3):  # the third replays
            torch.testing.assert_close(
                run(*arguments("cuda")),
                torch.nn.functional.gelu(OP(*arguments("cuda"))),
                rtol=2e-2,
                atol=2e-2,
            )


def test_group_sizes_are_not_read():
    """Where they are wrong nothing is raised and nothing is waited for; a CUDA graph may capture
    it.
    """
    *_, starts, padded, sizes = arguments("cuda")
    wrong, graph = sizes.flip(0), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (ends,) = KINDS["problem_ends"].evaluate(
            starts, wrong, padded, rows=135, groups=Groups("g", len(SIZES)), n=N, k=K
        )
    graph.replay()
    assert ends.equal(ends_from_problem(starts, wrong))
