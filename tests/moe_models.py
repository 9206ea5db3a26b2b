"""Small mixture-of-experts modules, written as one operation and in small ones, and graphs of them
as Inductor's pass sees them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.nn import functional as F

from fusion_moe import options
from fusion_moe.frontends.inductor.compile_graph import compile_calls
from fusion_moe.frontends.inductor.fusion_pass import FusionPass
from fusion_moe.frontends.regions import Found, find_regions

O = torch.ops.fusion_moe
G, H, I, K = 4, 32, 16, 2  # experts, hidden and intermediate size, experts of a token


def weight(n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """NVFP4 weights of G experts, [n, k] each."""
    return O.nvfp4_quantize(
        torch.randn(G, n, k, generator=torch.Generator().manual_seed(seed)) * 0.2
    )


class Experts(nn.Module):
    """A router and its experts. small: written in small operations."""

    def __init__(self, small: bool = False, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.small, self.router = small, nn.Linear(H, G)
        for name, (n, k) in {"up": (2 * I, H), "down": (H, I)}.items():
            for part, t in zip(
                ("codes", "block_scale", "decode_scale"), weight(n, k, seed), strict=True
            ):
                self.register_buffer(f"{name}_{part}", t)

    def parts(self, name: str) -> list[Tensor]:
        return [
            getattr(self, f"{name}_{part}") for part in ("codes", "block_scale", "decode_scale")
        ]

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.router(x).softmax(-1).topk(K)
        if self.small:
            return small_ops(x, ids, w, self.parts("up"), self.parts("down"))
        return O.expert_mlp(x, ids, w, *self.parts("up"), *self.parts("down"))


def small_ops(x: Tensor, ids: Tensor, w: Tensor, up: list[Tensor], down: list[Tensor]) -> Tensor:
    """What expert_mlp does, in small operations."""
    ends, row_of, slot_of = O.route(ids, G)
    gate_up = O.nvfp4_grouped_mm(x[row_of], *up, ends)
    gate, up_ = gate_up.chunk(2, -1)
    y = O.nvfp4_grouped_mm(F.silu(gate) * up_, *down, ends)
    return O.combine(y, slot_of, w)


class Block(nn.Module):
    """Experts between a norm and a residual sum."""

    def __init__(self, small: bool = False, seed: int = 0):
        super().__init__()
        self.experts = Experts(small, seed)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(F.rms_norm(x, (H,)))


class Mlp(Experts):
    """The experts of five tokens without a router: nothing but a fusion, so that Inductor compiles
    no C++.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ids, self.w = routing(5)

    def forward(self, x: Tensor) -> Tensor:
        return O.expert_mlp(x, self.ids, self.w, *self.parts("up"), *self.parts("down"))


def tokens(*lead: int, seed: int = 1) -> Tensor:
    """Random activations [..., H]."""
    return torch.randn(*lead, H, generator=torch.Generator().manual_seed(seed))


def routing(t: int, seed: int = 2) -> tuple[Tensor, Tensor]:
    """ids i64[t, K] and weights [t, K]."""
    scores = torch.randn(t, G, generator=torch.Generator().manual_seed(seed))
    w, ids = scores.softmax(-1).topk(K)
    return ids, w


# ------------------------------------------------------------------------------------------- graphs


def traced(f: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> Graph:
    """The graph of a function as the pass gets it: functional, decomposed, with fake values.
    Tensors that f closes over are inputs.
    """
    graphs: list[Graph] = []
    _called(lambda graph, is_inference: graphs.append(copied(graph)), f, inputs, dynamic)
    return graphs[0]


def copied(graph: Graph) -> Graph:
    """A graph that the pass may change."""
    other = Graph()
    output = other.graph_copy(graph, val_map={}, return_output_node=True)
    assert output is not None
    other.output(output[0])
    return other


def _called(fusion_pass: Any, f: Callable[..., Any], inputs: Any, dynamic: bool) -> Any:
    torch._dynamo.reset()
    with torch.no_grad():
        return torch.compile(
            f,
            backend=lambda gm, fakes: compile_calls(fusion_pass, gm, fakes),
            fullgraph=True,
            dynamic=dynamic,
        )(*inputs)


def found(graph: Graph) -> Found:
    """The regions of a graph, for the target of each device."""
    return find_regions(graph, options.Options())


def passed(graph: Graph) -> Found:
    """Runs the pass on a graph in place."""
    results: list[Found] = []
    FusionPass(options.current(), found=results.append)(graph)
    return results[0]


def check(f: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> Found:
    """What the pass finds in the graph of a function. With the fusions in place it computes what
    the function does.
    """
    results: list[Found] = []
    got = _called(FusionPass(options.current(), found=results.append), f, inputs, dynamic)
    with torch.no_grad():
        torch.testing.assert_close(got, f(*inputs), rtol=0, atol=1e-6)
    return results[0]


def writes_between() -> Any:
    """A function of tokens [5, H] that writes into its input between two layers."""
    up, down = weight(2 * I, H), weight(H, I)
    ids, w = routing(5)

    def f(x):
        y = O.expert_mlp(x, ids, w, *up, *down)
        x.mul_(2)
        return O.expert_mlp(y + x, ids, w, *up, *down) + x

    return f


def runs(graph: Graph) -> list[Node]:
    """The calls of fusions."""
    return [n for n in graph.nodes if n.target is torch.ops.fusion_moe.run.default]


def calls(nodes: Any) -> list[str]:
    """The names of the operations called."""
    return [
        str(n.target)
        for n in nodes
        if n.op == "call_function" and not str(n.target).startswith("<built-in")
    ]


def left(result: Found, op: str) -> str:
    """Why an operation was left out."""
    (why,) = {x.why for x in result.not_fused if x.op == op}
    return why
