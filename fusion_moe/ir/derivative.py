"""The derivative of a Fusion, as a pair of Fusions: reverse mode over the `grad` rules of the
kinds.

The forward is the Fusion with more outputs, the saved values, and with operations that make 8-bit
copies to save. The backward takes these, the inputs that it reads and the gradients of the float
outputs, and returns the gradients of the requested inputs. saved.py decides which values are saved
and which are recomputed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..errors import UnsupportedError
from .builder import FusionDefinition
from .core import Fusion, Op, Value
from .flow import dependent, made_again, needed, part
from .gradients import Gradients
from .kinds.eight_bits import is_trained
from .router_gradient import of_combine
from .saved import saved
from .types import FLOATS, plain


@dataclass(frozen=True)
class Derivative:
    """forward: (inputs...) -> the outputs of the Fusion, then the saved values. backward: (read...,
    seeds...) -> the gradients.

    reads: the first inputs of the backward, as positions among the forward's inputs followed by its
    outputs. seeds: the float outputs, whose gradients are the next inputs: each has the shape of
    its output, with plain rows. rewritten: the operations of the Fusion whose derivative is
    `router_gradient`.
    """

    forward: Fusion
    backward: Fusion
    reads: tuple[int, ...]
    seeds: tuple[int, ...]
    rewritten: tuple[Op, ...] = ()

    def read(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """The first inputs of the backward, from the inputs and outputs of the forward."""
        there = [*inputs, *outputs]
        return [there[i] for i in self.reads]


def differentiate(
    fusion: Fusion,
    wrt: Sequence[int],
    router_gradient: bool = True,
    names: Sequence[str] = (),
    by_columns: bool = False,
) -> Derivative:
    """The forward, and the backward that computes the gradients of inputs `wrt`, each in its
    input's dtype.

    The forward saves only what some of these gradients need. router_gradient: whether the router's
    weights get their gradient from that of the preceding product (router_gradient.py). names: what
    error messages call the inputs. by_columns: whether copies along rows are saved by columns.
    UnsupportedError if no derivative reaches an input: packed weights are frozen.
    """
    names = names or [f"input {i}" for i in range(len(fusion.inputs))]
    whole = _whole(FusionDefinition(by_columns=by_columns), fusion, wrt, router_gradient, names)
    kept = _in_pieces(whole, _kept(whole)) if whole.apart else _kept(whole)
    there = tuple(
        dict.fromkeys((*fusion.inputs, *fusion.outputs, *(whole.original[v] for v in kept)))
    )
    forward = replace(
        fusion, ops=_with_copies(fusion, whole, kept), outputs=there[len(fusion.inputs) :]
    )
    if whole.apart:
        forward = _stored_apart(forward, len(fusion.outputs))
    reads = tuple(there.index(whole.original[v]) for v in kept)
    ops = (*made_again(whole.forward.ops, whole.needed, kept), *whole.later)
    backward = part(whole.fusion, ops, (*kept, *whole.seeds), whole.fusion.outputs)
    return Derivative(forward, backward, reads, _seeded(fusion), whole.rewritten)


def _kept(whole: _Whole) -> tuple[Value, ...]:
    """What the backward reads: what `saved` says or, for a weight with a master whose forward is to
    be that of the weight alone, inputs.
    """
    if not whole.exact:
        return saved(whole.forward, whole.needed)
    read = needed(whole.forward.ops, whole.needed)
    return tuple(v for v in whole.forward.inputs if v in read)


# A saved value is rounded as it is stored. Where the forward reads it too, that would round what a
# kernel computes in float32 if nothing is saved.


def _in_pieces(whole: _Whole, kept: Sequence[Value]) -> tuple[Value, ...]:
    """In place of values that are read in slices alone, these: as wide as what is computed from
    them, so that one kernel stores both.
    """
    readers = whole.forward.readers
    results = list[Value]()
    for v in kept:
        slices = [op for op in readers.get(v, ()) if op.kind.name == "slice"]
        whole_too = v in whole.needed or len(slices) < len(readers.get(v, ()))
        results += [v] if whole_too or not slices else [op.outputs[0] for op in slices]
    return tuple(results)


def _stored_apart(forward: Fusion, results: int) -> Fusion:
    """The forward whose saved values, the outputs after the first `results`, are rounded by casts
    that nothing else reads.
    """
    fd = FusionDefinition()
    outputs: dict[Any, Any] = {v: fd.define_like(v.type, forward.role(v)) for v in forward.inputs}
    for op in forward.ops:
        fd.copy(op, outputs)
    for i, v in enumerate(forward.outputs):
        fd.add_output(outputs[v] if i < results else _rounded_apart(fd, outputs[v]))
    return fd.fusion()


def _rounded_apart(fd: FusionDefinition, v: Value) -> Value:
    piece = fd.producer(v, "slice")
    cast = fd.producer(piece.values[0] if piece else v, "cast")
    if cast is None or cast.values[0].type.dtype != "f32":
        return v
    (x,) = cast.values
    everything = {"start_indices": [0] * len(x.type.shape), "end_indices": list(x.type.shape)}
    return fd.ops.cast(
        fd.ops.slice(x, **(piece.attrs if piece else everything)), dtype=v.type.dtype
    )


# ---------------------------------------------------------------------- forward and backward in one


@dataclass(frozen=True)
class _Whole:
    """(inputs..., seeds...) -> gradients, in one Fusion. forward: its first operations, which
    compute the outputs. copies: operations that make copies, which may be saved. later: those of
    the other operations that the gradients need. original: the value in the Fusion that is
    differentiated, for each value of `forward`. rewritten: see Derivative. exact: whether the
    forward must return nothing else than the Fusion. apart: whether what it saves must not round
    what it computes, as with frozen weights; recipes round the same with masters and without. No
    operation is `straight_through`.
    """

    fusion: Fusion
    forward: Fusion
    copies: tuple[Op, ...]
    later: tuple[Op, ...]
    original: Mapping[Value, Value]
    rewritten: tuple[Op, ...]
    exact: bool
    apart: bool

    @property
    def seeds(self) -> tuple[Value, ...]:
        """The inputs that are the gradients of the outputs."""
        return self.fusion.inputs[len(self.forward.inputs) :]

    @cached_property
    def needed(self) -> tuple[Value, ...]:
        """The values of the forward that the backward reads, and the ends of the partitions in
        their types.
        """
        read = [v for op in self.later for v in op.values if v in self.original]
        ends = [self.forward.ends.get(g) for v in read for g in v.type.partitions()]
        return tuple(dict.fromkeys((*read, *filter(None, ends))))


def _seeded(fusion: Fusion) -> tuple[int, ...]:
    """The outputs that have a gradient: the float outputs."""
    return tuple(i for i, v in enumerate(fusion.outputs) if v.type.dtype in FLOATS)


def _whole(
    fd: FusionDefinition,
    fusion: Fusion,
    wrt: Sequence[int],
    router_gradient: bool,
    names: Sequence[str],
) -> _Whole:
    results: dict[Any, Any] = {v: fd.define_like(v.type, fusion.role(v)) for v in fusion.inputs}
    outputs = [fusion.outputs[i] for i in _seeded(fusion)]
    seeds = [
        (v, fd.define_like(v.type.with_(shape=tuple(map(plain, v.type.shape))))) for v in outputs
    ]
    ops = [
        replace(
            op, inputs=tuple(results.get(v, v) for v in op.inputs), outputs=fd.copy(op, results)
        )
        for op in fusion.ops
    ]
    leads = dependent(ops, {results[fusion.inputs[i]] for i in wrt})
    grads, rewritten = Gradients(fd, leads), []
    for value, seed in seeds:
        grads.add(results[value], seed)
    for op, copy in zip(reversed(fusion.ops), reversed(ops), strict=True):
        if any(v in grads for v in copy.outputs):
            with fd.at(op.source):
                if _differentiate(fd, copy, grads, router_gradient):
                    rewritten.append(op)
    for i in wrt:
        value = results[fusion.inputs[i]]
        if value not in grads:
            raise _no_derivative(fusion, fusion.inputs[i], names[i])
        fd.add_output(
            fd.ops.reshape(grads.of(value), new_shape=tuple(map(plain, value.type.shape)))
        )
    straight = [op for op in ops if op.kind.name == "straight_through"]
    first = len(ops) - len(straight)
    whole, inputs = _of_weights(fd.fusion()), tuple(results[v] for v in fusion.inputs)
    later = made_again(whole.ops[first:], whole.outputs)
    copies = _copies(later, [seed for _, seed in seeds])
    forward = replace(
        whole,
        inputs=inputs,
        ops=(*whole.ops[:first], *copies),
        outputs=tuple(results[v] for v in fusion.outputs),
    )
    original = {new: v for v, new in reversed(results.items())} | {
        v: v for op in copies for v in op.outputs
    }
    return _Whole(
        whole,
        forward,
        copies,
        tuple(op for op in later if op not in copies),
        original,
        tuple(reversed(rewritten)),
        any(op.attrs["how"] != "saved" for op in straight),
        # packed: of frozen weights
        any(fd.producer(op.values[0], "pack") for op in straight) and not any(map(is_trained, ops)),
    )


def _of_weights(fusion: Fusion) -> Fusion:
    """The Fusion with encoded weights themselves in place of `straight_through`, which would read
    their masters.
    """
    weights: dict[Any, Any] = {}
    ops = []
    for op in fusion.ops:
        op = op.with_inputs([weights.get(v, v) for v in op.inputs])
        if op.kind.name == "straight_through":
            weights[op.outputs[0]] = op.inputs[0]
        else:
            ops.append(op)
    return replace(fusion, ops=tuple(ops))


def _no_derivative(fusion: Fusion, value: Value, name: str) -> UnsupportedError:
    """The error for an input that no gradient reaches."""
    if any(op.kind.name == "pack" and value in op.values for op in fusion.ops):
        todo = "adapters train beside them: fusion_moe.nn.add_lora_(model)"
        return UnsupportedError(
            f"{name} is part of a packed weight",
            expected="requires_grad_(False): those are frozen",
            todo=todo,
        )
    return UnsupportedError(
        f"{name} has no derivative",
        expected="operations with derivatives from it to an output",
        todo="detach it",
    )


def _copies(later: Sequence[Op], seeds: Collection[Value]) -> tuple[Op, ...]:
    """The operations, among those for gradients, that unpack quantized values of the forward (to
    save the parts, those of transposed matrices, or codes by columns) or make these values.
    """
    by_seeds = dependent(later, seeds)
    results = [
        op for op in later if op.kind.name in ("unpack", "transpose_blocks", "transpose_row_blocks")
    ]
    parts = [v for op in results for v in op.outputs if v not in by_seeds]
    return made_again(later, parts)


def _with_copies(fusion: Fusion, whole: _Whole, kept: Sequence[Value]) -> tuple[Op, ...]:
    """The operations of the Fusion, and those that make the copies which are saved."""
    copies = made_again(whole.copies, kept)
    return (
        *fusion.ops,
        *(
            op.with_inputs([whole.original[v] if isinstance(v, Value) else v for v in op.inputs])
            for op in copies
        ),
    )


def _differentiate(fd: FusionDefinition, op: Op, grads: Gradients, by_router: bool) -> bool:
    """Gives the operands of an operation their gradients; returns whether `router_gradient` did
    so.
    """
    if op.kind.grad is None:
        if (
            any(v.type.dtype in FLOATS and v in grads.leads for v in op.values)
            and op.kind.role != "view"
        ):
            raise UnsupportedError(
                f"{op.kind.name} has no derivative",
                todo="compute it under torch.no_grad()",
                where=op.source,
            )
        return False
    got = [grads.of(v) if v in grads else None for v in op.outputs]
    rewritten = (
        of_combine(fd, op, got[0], grads.leads)
        if by_router and op.kind.name == "combine" and got[0]
        else None
    )
    try:
        pairs: Iterable[tuple[Any, Value | None]] = rewritten or zip(
            op.inputs, op.kind.grad(fd, op, *got), strict=True
        )
        for v, grad in pairs:
            if isinstance(v, Value) and grad is not None:
                grads.add(v, grad)
    except NotImplementedError as error:
        raise UnsupportedError(
            f"not supported: {error}", todo="compute it under torch.no_grad()", where=op.source
        ) from None
    return rewritten is not None
