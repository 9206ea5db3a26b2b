"""The operation with another library's signature on a CUDA device: what it computes, and that it
waits for nothing of its own.
"""

import pytest
import torch

import fusion_moe
from fusion_moe.errors import GroupsError
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


def test_replays_read_the_problem_of_now():
    """All of it is in the graph: group ends too."""
    x, *weight, starts, padded, sizes = arguments("cuda")
    with torch.inference_mode():
        OP(x, *weight, starts, padded, sizes)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = OP(x, *weight, starts, padded, sizes)
        for tensor, new in (
            (starts, [0, 0, 130, 131]),
            (padded, [0, 0, 256, 384]),
            (sizes, [[m, N, K] for m in (0, 130, 1, 2)]),
        ):
            tensor.copy_(torch.tensor(new))
        graph.replay()
        want = OP(*(t.cpu() for t in (x, *weight, starts, padded, sizes)))
        torch.testing.assert_close(found.cpu(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("argument", "place", "value"),
    [(4, 1, 4), (4, 3, -1), (5, 2, 3), (6, (2, 0), 2**30), (6, (1, 0), -5), (6, (3, 1), N + 1)],
)
def test_a_problem_that_does_not_fit_is_made_safe_and_reported(argument, place, value):
    given = list(arguments("cuda"))
    given[argument][place] = value
    with torch.inference_mode():
        assert OP(*given).shape == (sum(SIZES) + 2, N)
        with pytest.raises(GroupsError, match="does not fit offsets, problem_sizes and"):
            fusion_moe.synchronize()


def test_the_gradient_is_that_of_the_cpu():
    found = []
    for device in ("cpu", "cuda"):
        x, *others = arguments(device)
        x.requires_grad_()
        OP(x, *others).float().square().sum().backward()
        found.append(x.grad.cpu())
    torch.testing.assert_close(*found, rtol=4e-2, atol=4e-2)


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
