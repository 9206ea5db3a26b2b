"""Makes a case that shows a fault smaller, as long as it shows the same fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .case import Case
from .journal import kind
from .regions import noted


def shrunk(
    case: Case, wrong: str, judge: Callable[[Case], str], tries: int = 300
) -> tuple[Case, str]:
    """The smallest case found that is wrong in the same way, and what is wrong with it."""
    again = True
    while again and tries > 0:
        again = False
        for smaller in _smaller(case):
            tries -= 1
            if tries <= 0:
                break
            found = judge(smaller)
            if found and kind(found) == kind(wrong):
                case, wrong, again = smaller, found, True
                break
    return case, wrong


def _smaller(case: Case) -> Iterator[Case]:
    """Cases with less in them: without an output, with a value made an input, with a value in place
    of another, with plainer numbers.
    """
    count = len(case.outputs)
    for i in range(count if count > 1 else 0):
        yield _changed(
            case,
            lambda graph, nodes, i=i: _keep_outputs(graph, [j for j in range(count) if j != i]),
        )
    calls = [
        i
        for i, n in enumerate(case.graph.nodes)
        if n.op == "call_function" and isinstance(n.meta["val"], Tensor)
    ]
    with_values = noted(case)
    for i in reversed(calls):
        if isinstance(with_values.get(i), Tensor) and any(
            n.op != "output" for n in list(case.graph.nodes)[i].users
        ):
            yield _as_input(case, i, with_values[i])
    for i in calls:
        yield from _bypassed(case, i)
    for i, t in enumerate(case.inputs):
        for plain in _plainer(t):
            yield replace(case, inputs=(*case.inputs[:i], plain, *case.inputs[i + 1 :]))


def _copy(case: Case) -> tuple[Graph, list[Node]]:
    graph, map_ = Graph(), dict[Node, Node]()
    output = graph.graph_copy(case.graph, val_map=map_, return_output_node=True)
    assert output is not None
    graph.output(output[0])
    return graph, [map_.get(n, n) for n in case.graph.nodes]


def _changed(
    case: Case, change: Callable[[Graph, list[Node]], None], extra: Tensor | None = None
) -> Case:
    """The case with its graph changed, and what is then not needed left out. extra: the value of a
    new last input.
    """
    graph, nodes = _copy(case)
    values = dict(zip((n for n in graph.nodes if n.op == "placeholder"), case.inputs, strict=True))
    change(graph, nodes)
    for n in graph.nodes:
        if n.op == "placeholder" and n not in values:
            assert extra is not None
            values[n] = extra
    graph.eliminate_dead_code()
    for n in [n for n in graph.nodes if n.op == "placeholder" and not n.users]:
        graph.erase_node(n)
    graph.lint()
    return replace(
        case, graph=graph, inputs=tuple(values[n] for n in graph.nodes if n.op == "placeholder")
    )


def _keep_outputs(graph: Graph, kept: list[int]) -> None:
    (output,) = (n for n in graph.nodes if n.op == "output")
    output.args = (tuple(output.args[0][i] for i in kept),)  # type: ignore[index,union-attr]


def _as_input(case: Case, i: int, value: Tensor) -> Case:
    def change(graph: Graph, nodes: list[Node]) -> None:
        with graph.inserting_before(next(iter(graph.nodes))):
            n = graph.placeholder(f"y{sum(m.op == 'placeholder' for m in nodes)}")
        n.meta.update(nodes[i].meta)
        nodes[i].replace_all_uses_with(n)
        outputs = next(m for m in graph.nodes if m.op == "output")
        left = tuple(o for o in outputs.args[0] if o is not n)  # type: ignore[union-attr]
        outputs.args = (left or outputs.args[0],)

    return _changed(case, change, value)


def _bypassed(case: Case, i: int) -> Iterator[Case]:
    """With a value that the call reads in its place, where that is of one type."""
    n = list(case.graph.nodes)[i]
    for j, m in enumerate(n.all_input_nodes):
        if isinstance(m.meta["val"], Tensor) and _type(m) == _type(n):
            yield _changed(
                case,
                lambda graph, nodes, j=j: nodes[i].replace_all_uses_with(
                    nodes[i].all_input_nodes[j]
                ),
            )  # type: ignore[misc]


def _type(n: Node) -> tuple[str, torch.dtype]:
    return str(n.meta["val"].shape), n.meta["val"].dtype


def _plainer(t: Tensor) -> Iterator[Tensor]:
    bytes_ = t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t
    for plain in (
        torch.zeros_like(bytes_),
        torch.ones_like(bytes_) * (56 if bytes_ is not t else 1),
    ):
        if not torch.equal(plain, bytes_):
            yield plain.view(t.dtype)
        else:
            return
