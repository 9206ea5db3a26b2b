"""Protects what the backward of a thunder trace reads from writes in between.

thunder saves a tensor under its name. If `v /= v.sum()` then writes into it, the backward reads the
written values. This pass copies whatever the backward reads of that memory before the write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from thunder.core import prims
from thunder.core.prims import OpTags
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.symbol import BoundSymbol, BoundSymbolTag, Symbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, tracectx
from thunder.extend import Executor


class SaveCopies:
    """The pass, and its operation (x, *tensors) -> (x, *copies): a write takes x from it, so that
    it stays after the copies.
    """

    def __init__(self, executor: Executor):
        self._save: Symbol = executor.register_operator(
            "fusion_moe_save", meta=_save_meta, fn=_save, tags=(OpTags.IN_PLACE,)
        )

    def __call__(self, trace: TraceCtx) -> TraceCtx:
        """A trace whose backward reads what the forward read; the trace itself if nothing that the
        backward reads is overwritten.
        """
        read = {
            p.name
            for bsym in trace.bound_symbols
            if _reads_values(bsym)
            for p in bsym.flat_proxy_args
        }
        memory: dict[str, set[str]] = {}  # each name -> all names of the same memory
        # tensors that the backward reads, if made and not yet overwritten
        alive: dict[str, TensorProxy] = {}
        copies: dict[object, TensorProxy] = {}
        result = from_trace(trace)
        for bsym in trace.bound_symbols:
            if not _is_backward(bsym):
                alive.update(
                    (p.name, p)
                    for p in bsym.flat_proxy_args
                    if p.name in read and variableify(p) not in copies
                )
                lost = [
                    alive.pop(name)
                    for target in _written(bsym)
                    for name in memory.get(target, {target})
                    if name in alive
                ]
                if lost:
                    with tracectx(result):
                        saved, bsym = self._saved_before(bsym, lost)
                    result.bound_symbols.append(saved)
                    copies.update(
                        (variableify(p), copy)
                        for p, copy in zip(lost, saved.output[1:], strict=True)
                    )
                alive.update((p.name, p) for p in bsym.flat_proxy_outs if p.name in read)
                _join(memory, bsym)
            result.bound_symbols.append(bsym)
        if not copies:
            return trace
        result.bound_symbols = [
            b.from_bsym_swap_proxies(copies) if _reads_values(b) else b
            for b in result.bound_symbols
        ]
        result.set_provenance(TraceProvenance("What the backward reads is saved by fusion_moe"))
        return result

    def _saved_before(
        self, write: BoundSymbol, lost: Sequence[TensorProxy]
    ) -> tuple[BoundSymbol, BoundSymbol]:
        """The copies, and the write that waits for them."""
        x = next(p for p in write.flat_proxy_args if isinstance(p, TensorProxy))
        outputs = _save_meta(x, *lost)
        saved = self._save.bind(x, *lost, output=outputs)
        return saved, write.from_bsym_swap_proxies({variableify(x): outputs[0]}, skip_output=True)


def _save(x: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (x, *(t.clone() for t in tensors))


def _save_meta(x: TensorProxy, *tensors: TensorProxy) -> tuple[TensorProxy, ...]:
    return tuple(TensorProxy(like=t, requires_grad=False) for t in (x, *tensors))


def _is_backward(bsym: BoundSymbol) -> bool:
    """Whether a bound symbol belongs to the backward. Fusions of other executors are tagged
    inside.
    """
    return BoundSymbolTag.BACKWARD in bsym.tags or any(map(_is_backward, bsym.subsymbols))


def _reads_values(bsym: BoundSymbol) -> bool:
    """Whether it belongs to the backward and reads the values that it names: get_grad(y) is the
    gradient of y and does not read y.
    """
    return _is_backward(bsym) and bsym.sym.id is not prims.PrimIDs.GET_GRAD


def _written(bsym: BoundSymbol) -> Iterator[str]:
    """The names of the tensors that it writes into: all in-place operations of thunder end in
    copy_(from, to).
    """
    if bsym.sym.name == "copy_":
        yield bsym.args[1].name
        return
    for part in bsym.subsymbols:
        yield from _written(part)


def _join(memory: dict[str, set[str]], bsym: BoundSymbol) -> None:
    """Records shared memory as thunder expresses it: before a write it renames all names of a
    memory; the write itself renames one.
    """
    if bsym.sym.name == "update_aliases":
        names: Iterable[str] = {p.name for p in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs)}
    elif bsym.sym.name == "copy_":
        names = {bsym.args[1].name, *(p.name for p in bsym.flat_proxy_outs)}
    else:
        for part in bsym.subsymbols:
            _join(memory, part)
        return
    joined = set(names).union(*(memory.get(name, ()) for name in names))
    memory.update(dict.fromkeys(joined, joined))
