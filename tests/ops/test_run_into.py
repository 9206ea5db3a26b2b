"""fusion_moe::run_into: programs that write into tensors of the caller, as PyTorch sees them."""

from __future__ import annotations

import pytest
import torch
from bad_calls import messages
from fusions import assert_same_bits
from test_ops import count_flops
from torch import Tensor
from torch._functorch.aot_autograd import aot_module_simplified
from torch._subclasses.fake_tensor import FakeTensorMode

from fusion_moe import FusionDefinition
from fusion_moe.errors import ShapeError
from fusion_moe.ir.text import one_line

OPS = torch.ops.fusion_moe
GROUPS, N, K = 3, 4, 8


def gradient() -> str:
    """dy bf16[t, N], x bf16[t, K], offs i32[G], grad f32[G, N, K] -> sum of dy's rows; grad and the
    weight's gradient.
    """
    fd = FusionDefinition()
    t = fd.define_size("t")
    dy, x = (fd.define_tensor(shape=[t, n], dtype="bf16") for n in (N, K))
    offs = fd.define_tensor(shape=[GROUPS], dtype="i32")
    grad = fd.define_tensor(shape=[GROUPS, N, K], dtype="f32", role="state")
    ends = fd.groups_of(offs, t)
    fd.add_output(fd.ops.sum(dy, dims=(0,), keepdim=False))
    made = fd.ops.grouped_outer(fd.ops.partition(dy, ends), fd.ops.partition(x, ends), ends)
    fd.add_output(fd.ops.add(grad, made))
    return one_line(fd.fusion())


PROGRAM = gradient()


def run_into(inputs: list[Tensor], written: list[Tensor], sizes: list[int]) -> None:
    """Runs the program, which reads the gradient that it writes."""
    OPS.run_into(PROGRAM, inputs, written, sizes, read=[1])


def given(rows: int = 6) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dy, x, offs, and what is written: the sum and the gradient."""
    g = torch.Generator().manual_seed(rows)
    dy, x = (torch.randint(-4, 5, (rows, n), generator=g).bfloat16() for n in (N, K))
    return (
        dy,
        x,
        torch.tensor([2, 2, rows], dtype=torch.int32),
        torch.empty(N, dtype=torch.bfloat16),
        torch.full((GROUPS, N, K), 0.5),
    )


def step(dy: Tensor, x: Tensor, offs: Tensor, total: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Reads what is written before and after."""
    before = grad.sum()
    run_into([dy, x, offs], [total, grad], [dy.shape[0]])
    return before, total * 2


def test_each_output_is_in_its_tensor():
    dy, x, offs, total, grad = given()
    assert step(dy, x, offs, total, grad)[0] == 0.5 * grad.numel()
    assert total.equal(dy.float().sum(0).bfloat16())
    for g, part in enumerate((slice(0, 2), slice(0, 0), slice(2, 6))):
        assert grad[g].equal(0.5 + dy[part].float().T @ x[part].float())


def test_strides_of_what_is_written_do_not_matter():
    dy, x, offs, total, grad = given()
    apart, wide = torch.zeros(N, 2, dtype=torch.bfloat16), torch.full((GROUPS, K, N), 0.5)
    step(dy, x, offs, total, grad)
    step(dy, x, offs, apart[:, 0], wide.mT)
    assert_same_bits([apart[:, 0].contiguous(), wide.mT.contiguous()], [total, grad])
    assert not apart[:, 1].any()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor", "fusion_moe"])
def test_compiled_it_is_one_graph_that_writes(backend):
    """In every order of reads and writes that eager has, for any number of rows, without a graph
    break.
    """
    torch._dynamo.reset()
    run = torch.compile(step, backend=backend, fullgraph=True, dynamic=True)
    for rows in (6, 9):
        ours, theirs = given(rows), given(rows)
        for _ in range(2):
            assert_same_bits(run(*ours), step(*theirs))
            assert_same_bits(ours, theirs)


def test_a_functional_graph_does_not_write():
    """AOTAutograd makes it a functional call; what it returns is copied into the inputs when the
    graph is done.
    """
    seen = []

    def compiler(graph, inputs):
        seen.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        return graph

    def backend(graph, inputs):
        return aot_module_simplified(graph, inputs, fw_compiler=compiler)

    torch._dynamo.reset()
    torch.compile(step, backend=backend, fullgraph=True)(*given())
    assert "auto_functionalized_v2" in seen
    assert not any("run_into" in name for name in seen)


@pytest.mark.parametrize("name", ["run_into", "run_into_graph_safe"])
def test_opcheck(name):
    dy, x, offs, total, grad = given()
    torch.library.opcheck(
        getattr(OPS, name).default, (PROGRAM, [dy, x, offs], [total, grad], [6]), {"read": [1]}
    )


@pytest.mark.parametrize("name", ["run", "run_into"])
def test_what_may_wait_for_the_device_says_so(name):
    """CUDA graphs leave out what has the tag; the schema says what is written."""
    safe, unsafe = getattr(OPS, f"{name}_graph_safe").default, getattr(OPS, name).default
    assert [torch.Tag.cudagraph_unsafe in op.tags for op in (safe, unsafe)] == [False, True]
    for op in (safe, unsafe):
        assert op._schema.is_mutable == (name == "run_into")
        assert [a.name for a in op._schema.arguments if a.alias_info and a.alias_info.is_write] == [
            "written"
        ] * (name == "run_into")


def test_flops():
    dy, x, offs, total, grad = given()
    assert count_flops(lambda: step(dy, x, offs, total, grad)) == 2 * 6 * N * K


def test_fakes_write_nothing_and_check_the_same():
    dy, x, offs, total, grad = given()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(t) for t in (dy, x, offs, total, grad)]
        step(*fakes)
        with pytest.raises(ShapeError, match=r"the tensor of output 0 has shape \[3, 4, 8\]"):
            run_into(fakes[:3], [fakes[4], fakes[4]], [6])
    assert (grad == 0.5).all()


def test_bad_calls(golden):
    """What was found and what is expected; nothing is written."""
    dy, x, offs, total, grad = given()
    late = offs + 1
    cases = {
        "one tensor too few to write": lambda: run_into([dy, x, offs], [total], [6]),
        "what is written among the inputs": lambda: run_into(
            [dy, x, offs, grad], [total, grad], [6]
        ),
        "an input too few": lambda: run_into([dy, x], [total, grad], [6]),
        "a size too many": lambda: run_into([dy, x, offs], [total, grad], [6, 6]),
        "another shape": lambda: run_into([dy, x, offs], [total[:3], grad], [6]),
        "another dtype": lambda: run_into([dy, x, offs], [total.float(), grad], [6]),
        "tensors that overlap": lambda: run_into(
            [dy, x, offs], [grad.view(-1)[:2].view(torch.bfloat16), grad], [6]
        ),
        "one element many times": lambda: run_into(
            [dy, x, offs], [total, grad[:1].expand(GROUPS, -1, -1)], [6]
        ),
        "ends beyond the rows": lambda: run_into([dy, x, late], [total, grad], [6]),
        "a gradient": lambda: run_into([dy.clone().requires_grad_(), x, offs], [total, grad], [6]),
    }
    total.fill_(0)
    golden(messages(cases))
    assert (grad == 0.5).all()
    assert not total.any()
