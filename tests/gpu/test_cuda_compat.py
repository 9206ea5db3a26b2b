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


def both(sizes, spare):
    """Rows, then the other arguments of the product with linear scales and ends, and of OP."""
    g, groups = torch.Generator().manual_seed(0), len(sizes)
    w = torch.randn(groups, N, K, generator=g, dtype=torch.bfloat16)
    codes, scale, decode = (t.cuda() for t in fusion_moe.ops.nvfp4_quantize(w))
    m = torch.tensor(sizes, dtype=torch.int32)
    starts, padded = (of.cumsum(0) - of for of in (m, (m + 127) // 128 * 128))
    problem = torch.tensor([[size, N, K] for size in sizes])
    fp4 = codes.view(torch.float4_e2m1fn_x2).transpose(1, 2)
    x = torch.randn(sum(sizes) + spare, K, generator=g).bfloat16().cuda()
    ints = (t.int().cuda() for t in (starts, padded, problem))
    linear = codes, scale, decode, m.cumsum(0).int().cuda()
    return x, linear, [fp4, SF128X4.forward(scale), decode, *ints]


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
    "sizes", [(5,), (0, 0, 0), (1,) * 33, (0, 7, 300, 0, 1, 129, 64), (2,) * 300]
)
@pytest.mark.parametrize("spare", [0, 2])
def test_the_bits_are_those_of_linear_scales(sizes, spare):
    """For groups of any sizes, with rows of none after them."""
    x, linear, given = both(sizes, spare)
    with torch.inference_mode():
        assert OP(x, *given).equal(torch.ops.fusion_moe.nvfp4_grouped_mm(x, *linear))
        fusion_moe.synchronize()


@pytest.mark.parametrize("groups", [1, 33, 300])
def test_any_wrong_number_is_reported(groups):
    """Of starts, padded starts, sizes, N or K, of the first group and the last."""
    x, _, given = both((2,) * groups, 1)
    starts, padded, problem = range(3, 6)
    for argument, at in (
        *((starts, g) for g in (0, groups - 1)),
        *((padded, g) for g in (0, groups - 1)),
        *((problem, (g, column)) for g in (0, groups - 1) for column in range(3)),
    ):
        for value in (-1, 5 * groups, 2**31 - 1):
            wrong = [t.clone() for t in given]
            wrong[argument][at] = value
            with torch.inference_mode():
                OP(x, *wrong)
                with pytest.raises(GroupsError, match="does not fit offsets, problem_sizes and"):
                    fusion_moe.synchronize()


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
