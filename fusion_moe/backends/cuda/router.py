"""The kernels of routers: a warp for each token. With few tokens, one block also sorts their rows
in the same kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...ir import Op, Value, elements, plain, value
from ..cxx import below, inner, known, router, size, stored
from ..inexpressible import Inexpressible
from .source import KernelSource, Sizes, Source

# logits of a token in registers of a warp, slots and groups in its lanes
_EXPERTS, _SLOTS, _GROUPS = 512, 32, 32
# of the block that sorts the rows of up to this many tokens: for more, two kernels are faster
_WARPS = {4: 4, 8: 8, 16: 16}
HEADERS = ("router.cuh",)


def kernel_and_operations(
    source: Source, op: Op, sizes: Sizes, any_size: bool
) -> tuple[KernelSource, list[Op]]:
    """The kernel of `topk_ids` or `topk_weights`, and the operations that it computes: with a
    choice the weights of its experts, and with few tokens, unless the kernel is for any number of
    them, the rows.
    """
    _need_small(op)
    tokens = value(plain(op.values[0].type.shape[0]), sizes)
    few = () if any_size else (w for most, w in _WARPS.items() if tokens <= most)
    return source.once(_kernel_and_operations, source, op, next(iter(few), 0))


def _kernel_and_operations(source: Source, op: Op, warps: int) -> tuple[KernelSource, list[Op]]:
    """warps: of the block that sorts the rows too; 0: none does."""
    if op.kind.name == "topk_weights":
        body = _weights(source, [op], _given_expert(source, op, source.made_later))
        return _of_tokens(source, "topk_weights", op, body), [op]
    weights = [
        o
        for o in source.fusion.ops
        if o.kind.name == "topk_weights" and o.values == (op.values[0], op.outputs[0])
    ]
    routed = next(
        (o for o in source.fusion.ops if o.kind.name == "route" and _sorted_here(o, op)), None
    )
    logits, ids, bias = op.values[0], op.outputs[0], router.bias(op)
    tokens, experts = (size(d) for d in logits.type.shape)
    k, hidden = op.attrs["k"], source.made_later
    biases = source.array(bias, hidden) if bias else "nullptr"
    chosen = (
        f"TopK<{router.of_choice(op)}>::run({source.array(logits, hidden)} + i * {experts}, "
        f"{biases})"
    )
    body = [
        f"const i32 expert = {chosen};",
        f"if (threadIdx.x % 32 < {k}) {source.names[ids]}[i * {k} + threadIdx.x % 32] = expert;",
    ]
    if routed is None or not warps:
        return _of_tokens(source, "topk_ids", op, _weights(source, weights, body)), [op, *weights]
    count, groups = size(elements(ids.type.shape)), routed.attrs["groups"].count
    group, first = "expert", routed.attrs.get("first_expert")
    if first is not None:
        group = f"expert >= {first} && expert < {first + groups} ? expert - {first} : {groups}"
    body.append(
        f"if (threadIdx.x % 32 < {k}) sorted.group[i * {k} + threadIdx.x % 32] = u16({group});"
    )
    lines = [
        f"__shared__ SortSlots<{warps}, {groups}, {max(_WARPS) * k}> sorted;",
        *source.WAIT,
        f"for_all_warps({tokens}, [&](i64 i) {{",
        *inner(_weights(source, weights, body)),
        "});",
        f"sorted.run(i32({count}), {k}, {', '.join(source.names[v] for v in routed.outputs)});",
    ]
    return source.kernel("topk_route", lines, 1, headers=HEADERS, threads=32 * warps), [
        op,
        *weights,
        routed,
    ]


def backward(source: Source, op: Op, left: Sequence[Value]) -> KernelSource:
    """The kernel of the derivative of weights. left: values that are not in memory yet."""
    _need_small(op)
    logits, _, dw = op.values
    (dlogits,) = op.outputs
    k = _slots(op)
    experts = size(op.values[0].type.shape[1])
    body = [
        *_given_expert(source, op, left),
        f"const float dw = threadIdx.x % 32 < {k} ? {source.array(dw, left)}[i * {k} + "
        "threadIdx.x % 32] : 0.f;",
        f"Weights<{experts}, {k}, {router.of_weights(op)}>::backward({source.array(logits, left)} "
        f"+ i * {experts}, expert, dw, "
        f"{router.factor(op)}, {source.names[dlogits]} + i * {experts});",
    ]
    return _of_tokens(source, "topk_weights_backward", op, body)


def _of_tokens(source: Source, name: str, op: Op, body: Sequence[str]) -> KernelSource:
    """A kernel that runs `body` for each token i, with a warp."""
    return source.for_all_warps(name, plain(op.values[0].type.shape[0]), body, headers=HEADERS)


def _need_small(op: Op) -> None:
    experts, k = known(op.values[0].type.shape[1]), _slots(op)
    if experts > _EXPERTS or k > _SLOTS or op.attrs.get("n_group", 1) > _GROUPS:
        raise Inexpressible(
            op,
            f"{op.kind.name} of {k} of {experts} experts has no kernel here",
            expected=f"up to {_EXPERTS} experts, {_SLOTS} a token, {_GROUPS} groups of experts",
        )


def _slots(op: Op) -> int:
    return op.attrs["k"] if op.kind.name == "topk_ids" else known(op.values[1].type.shape[1])


def _sorted_here(route: Op, choice: Op) -> bool:
    """Whether one block can sort the rows of a choice: it has a counter for each group, and there
    are no wrong ids.
    """
    groups = route.attrs["groups"].count
    local = route.attrs.get("first_expert") is not None
    return (
        route.values[0] is choice.outputs[0]
        and groups <= _EXPERTS
        and (local or groups >= choice.values[0].type.shape[1])
    )


def _given_expert(source: Source, op: Op, left: Sequence[Value]) -> list[str]:
    """The expert of a lane's slot, from memory; invalid ids are made safe."""
    (logits, ids, *_), k = op.values, _slots(op)
    there = f"{source.array(ids, left)}[i * {k} + threadIdx.x % 32]"
    if below(source.fusion, ids) != logits.type.shape[1]:
        there = f"clamp_index({there}, {size(logits.type.shape[1])}, error)"
    return [f"const i32 expert = threadIdx.x % 32 < {k} ? i32({there}) : 0;"]


def _weights(source: Source, weights: Sequence[Op], body: Sequence[str]) -> list[str]:
    """The code after a lane has its expert: it stores the expert's weights."""
    lines = list(body)
    for op in weights:
        k, experts = _slots(op), size(op.values[0].type.shape[1])
        logits = f"{source.array(op.values[0], source.made_later)} + i * {experts}"
        outputs = (
            f"Weights<{experts}, {k}, {router.of_weights(op)}>::run({logits}, expert, "
            f"{router.factor(op)})"
        )
        kept = f"stored<{stored(op.outputs[0])}>(w)"
        place = f"{source.names[op.outputs[0]]}[i * {k} + threadIdx.x % 32]"
        lines.append(
            f"{{ const float w = {outputs}; if (threadIdx.x % 32 < {k}) {place} = {kept}; }}"
        )
    return lines
