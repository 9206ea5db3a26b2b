"""Our operations, and users' operations with translators, inside the regions of thunder's own
nvFuser executor.

nvFuser has no 8-bit integers. So an operation that it can take is written as two: packed codes
become int32 words or e2m1 numbers, which is a view that torch makes, and the operation on these,
which nvFuser fuses with the pointwise operations around it. The operation's translator defines it
for nvFuser: the call's Fusion goes through the same passes as everywhere, and is written into
thunder's definition.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

import torch
from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.pytree import tree_map
from thunder.core.symbol import BoundSymbol, BoundSymbolTag, Symbol
from thunder.core.trace import TraceCtx, TraceProvenance, detached_trace, from_trace, tracectx
from thunder.extend import FusionExecutor
from torch._library.utils import is_builtin
from torch._ops import OpOverload

from ...definitions.walk import Walk
from ...errors import Error, UnsupportedError, Untranslatable
from ...ir import Fusion, Value
from ...messages import log, warn_once
from ...passes import PASSES
from ...schedule.product import products
from ..nvfuser import scheduler
from ..nvfuser.definition import inline
from ..nvfuser.headers import check_headers
from ..nvfuser.library import nvfuser
from ..nvfuser.targets import BLACKWELL, HOPPER
from ..nvfuser.values import (
    E2M1,
    WORDS,
    Codes,
    form_of,
)
from .graph import in_order
from .ops import (
    Symbols,
    meta_of,
    proxy_of,
    recorded,
    tensors_in,
)
from .quirks import thunders_nvfuser

_FORMS = "forms"


@dataclass(frozen=True)
class Lowered:
    """A call in the form that nvFuser takes. inputs: the positions of the call's tensors that the
    Fusion reads; forms: how it takes codes, as (tensor, WORDS or E2M1, whether they are passed
    transposed).
    """

    fusion: Fusion
    inputs: tuple[int, ...]
    forms: tuple[tuple[int, str, bool], ...]


class ForNvFuser(FusionExecutor):
    """The executor "fusion_moe_nvfuser", to be listed before nvFuser's: fuses nothing, but writes
    our operations in nvFuser's form.

    Refused calls stay unchanged: nvFuser cannot give back what it has taken, so everything is
    checked here.
    """

    def __init__(self, symbols: Symbols):
        super().__init__("fusion_moe_nvfuser")
        self.symbols = symbols
        self.impl = _executor_module()
        self._inner: dict[str, Symbol] = {}
        self._form = self.register_operator("fusion_moe_codes", meta=_form_meta, fn=form_of)

    def can_fuse(self, bsym: BoundSymbol) -> bool:
        """False: it claims nothing."""
        return False

    def fusion_pass(self, trace: TraceCtx) -> TraceCtx:
        """The trace with two symbols for each operation that nvFuser takes. Codes come first:
        nvFuser fuses adjacent symbols.
        """
        # must come before nvFuser hides a write in a region
        trace = self.symbols.executor.keep(trace)
        result = from_trace(trace)
        ops = {symbol.name: op for op, symbol in self.symbols.items() if not is_builtin(op)}
        codes: dict[tuple[str, str, bool], tuple[int, BoundSymbol]] = {}
        items: list[tuple[int, BoundSymbol]] = []
        # the positions of the first symbols of the forward and the backward
        begin: dict[bool, int] = {}
        for place, bsym in enumerate(trace.bound_symbols):
            backward = BoundSymbolTag.BACKWARD in bsym.tags
            if bsym.sym.python_impl is None:
                begin.setdefault(backward, place)
            op = ops.get(bsym.sym.name) if bsym.sym.executor is self.symbols.executor else None
            lowered = self._lowered(op, bsym) if op is not None else None
            if op is None or lowered is None:
                items.append((place, bsym))
                continue
            tensors = tensors_in((bsym.args, bsym.kwargs))
            for i, form, transposed in lowered.forms:
                key = (tensors[i].name, form, transposed)
                if key not in codes:
                    codes[key] = (
                        begin[backward],
                        self._codes(result, bsym, tensors[i], form, transposed),
                    )
                tensors[i] = codes[key][1].output
            items.append((place, self._on_codes(op, bsym, tensors, lowered)))
        result.bound_symbols = in_order([*codes.values(), *items])
        result.set_provenance(TraceProvenance("Operations of fusion_moe for nvFuser"))
        return result

    def _lowered(self, op: OpOverload, bsym: BoundSymbol) -> Lowered | None:
        try:
            return lower(op, bsym.args, bsym.kwargs)
        except Error as error:
            if not isinstance(error, (Untranslatable, UnsupportedError)):
                warn_once(f"{op} is not fused by nvFuser: {error}")
            log.debug("%s is not fused by nvFuser: %s", op, error)
            return None

    def _codes(
        self, trace: TraceCtx, bsym: BoundSymbol, codes: TensorProxy, form: str, transposed: bool
    ) -> BoundSymbol:
        with tracectx(trace):
            result = self._form.bind(
                codes, form, transposed, output=_form_meta(codes, form, transposed)
            )
        return result.from_bsym(
            tags=set(bsym.tags),
            source_filename=bsym.source_filename,
            source_positions=bsym.source_positions,
        )

    def _on_codes(
        self, op: OpOverload, bsym: BoundSymbol, tensors: Sequence[TensorProxy], lowered: Lowered
    ) -> BoundSymbol:
        args, kwargs = _with_tensors((bsym.args, bsym.kwargs), tensors)
        return bsym.from_bsym(
            sym=self._inside(op),
            args=args,
            kwargs={**kwargs, _FORMS: lowered.forms},
            _call_ctx=None,
        )

    def _inside(self, op: OpOverload) -> Symbol:
        """The symbol of an operation on codes in nvFuser's form."""
        name = f"nv_{self.symbols.of(op).name}"
        if name not in self._inner:
            inner = self.register_operator(
                name, meta=_inner_meta(op), fn=_inner_body(op), tags=[prims.OpTags.MATMUL_OP]
            )
            self.impl.register_supported(
                inner, functools.partial(_write, op), lambda *args, **kwargs: True
            )
            self._inner[name] = inner
        return self._inner[name]


def _write(
    op: OpOverload, *args: Any, fd: Any, lc_to_nv_map: Any, forms: Any, **kwargs: Any
) -> Any:
    """The translator for thunder: writes the Fusion of a call into thunder's definition."""
    inputs = [lc_to_nv_map[p] for p in tensors_in((args, kwargs))]
    for i, form, _ in forms:
        inputs[i] = _only(form, inputs[i])
    with detached_trace():
        lowered = lower(op, *_with_codes(args, kwargs, forms))
    outputs = inline(fd, lowered.fusion, [inputs[i] for i in lowered.inputs])
    return outputs if len(outputs) > 1 else outputs[0]


def lower(op: OpOverload, args: Any, kwargs: Any) -> Lowered:
    """A call with proxies as a Fusion that nvFuser takes. Raises the Error with which its
    translator or nvFuser refuses it.
    """
    with recorded(op, args, kwargs) as call:
        pass
    graph, results = call.recorder.graph, [call.recorder.node(r) for r in call.results]
    outputs = [n for n in graph.nodes if n.op == "call_function"]
    graph.output(tuple(results))
    walk = Walk(outputs)
    if walk.refused:
        raise next(iter(walk.refused.values()))
    if walk.outputs != results:
        raise UnsupportedError(
            f"{op} returns a tensor twice, or one of its inputs", expected="new tensors"
        )
    devices = {t.device for t in call.tensors}
    if any(t.numel() == 0 for t in call.tensors) or {d.type for d in devices} != {"cuda"}:
        raise UnsupportedError(
            f"tensors on {', '.join(map(str, devices))}", expected="non-empty CUDA tensors"
        )
    fusion, target = walk.fusion, _target(next(iter(devices)))
    for run in PASSES:
        fusion = run(fusion, target).verify()
    if why := scheduler.can_schedule(fusion, target):
        raise UnsupportedError(why)
    if scheduler.sorts(fusion):
        check_headers()
    places = {n: i for i, n in enumerate(call.inputs)}
    inputs = tuple(places[n] for n in walk.inputs)
    forms = tuple(
        (i, *_form(v, fusion))
        for i, v in zip(inputs, fusion.inputs, strict=True)
        if v.type.dtype == "u8"
    )
    return Lowered(fusion, inputs, forms)


def _target(device: torch.device) -> Any:
    """The target that decides what a definition may contain: 4-bit products only if the device has
    them. All else compiles everywhere.
    """
    four_bits = BLACKWELL
    return four_bits if torch.cuda.get_device_capability(device) == four_bits.capability else HOPPER


def _form(codes: Value, fusion: Fusion) -> tuple[str, bool]:
    """How packed codes are read, and whether they are passed as [..., K/2, N]."""
    packs = fusion.readers[codes]
    weights = {pack.outputs[0] for pack in packs}
    forms = {
        E2M1 if scheduler.lowering(p) == scheduler.PRODUCTS["nvfp4"] else WORDS
        for p in products(fusion)
        if p.weight in weights
    }
    if len(forms) != 1:
        raise UnsupportedError(
            f"codes read as {' and '.join(sorted(forms)) or 'nothing'}",
            expected="products of one kind",
        )
    return forms.pop(), any(pack.attrs.get("transposed", False) for pack in packs)


def _only(form: str, tensor: Any) -> Codes:
    def of(name: str) -> Any:
        assert name == form, f"codes were given as {form}"
        return tensor

    return Codes(of)


# ---------------------------------------------------------------------- codes as nvFuser takes them


def codes_of(formed: torch.Tensor, form: str, transposed: bool) -> torch.Tensor:
    """uint8 codes [..., N, K/2] (transposed: [..., K/2, N]) of the tensor that `form_of` made of
    them.
    """
    rows = (formed.mT if form == E2M1 else formed).view(torch.uint8)
    return rows.mT if transposed else rows


def _form_meta(codes: TensorProxy, form: str, transposed: bool) -> TensorProxy:
    *lead, n, packed_k = (
        (*codes.shape[:-2], codes.shape[-1], codes.shape[-2]) if transposed else codes.shape
    )
    shape, dtype = (
        ((*lead, packed_k, n), torch.float4_e2m1fn_x2)
        if form == E2M1
        else ((*lead, n, packed_k // 4), torch.int32)
    )
    return proxy_of(shape, codes.device, dtype)


def _codes_meta(formed: TensorProxy, form: str, transposed: bool) -> TensorProxy:
    *lead, n, width = (
        formed.shape if form == WORDS else (*formed.shape[:-2], formed.shape[-1], formed.shape[-2])
    )
    packed_k = width * 4 if form == WORDS else width
    return proxy_of(
        (*lead, packed_k, n) if transposed else (*lead, n, packed_k), formed.device, torch.uint8
    )


def _with_codes(args: Any, kwargs: Any, forms: Any) -> tuple[Any, Any]:
    """The arguments of a call, as proxies, with the codes in place of their converted forms."""
    tensors = tensors_in((args, kwargs))
    for i, form, transposed in forms:
        tensors[i] = _codes_meta(tensors[i], form, transposed)
    return _with_tensors((args, kwargs), tensors)


def _with_tensors(tree: Any, tensors: Sequence[Any], kind: type = TensorProxy) -> Any:
    left = iter(tensors)
    return tree_map(lambda a: next(left) if isinstance(a, kind) else a, tree)


def _inner_meta(op: OpOverload) -> Callable[..., Any]:
    outer = meta_of(op)

    def meta(*args: Any, forms: Any, **kwargs: Any) -> Any:
        args, kwargs = _with_codes(args, kwargs, forms)
        return outer(*args, **kwargs)

    signature = outer.__signature__  # type: ignore[attr-defined]
    meta.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), Parameter(_FORMS, Parameter.KEYWORD_ONLY)]
    )
    return meta


def _inner_body(op: OpOverload) -> Callable[..., Any]:
    """Runs in place of a fusion that thunder began but did not finish, as when its fuel ran out."""

    def body(*args: Any, forms: Any, **kwargs: Any) -> Any:
        tensors = tensors_in((args, kwargs), torch.Tensor)
        for i, form, transposed in forms:
            tensors[i] = codes_of(tensors[i], form, transposed)
        args, kwargs = _with_tensors((args, kwargs), tensors, torch.Tensor)
        return op(*args, **kwargs)

    return body


# -------------------------------------------------------------------------------- thunder's nvFuser


def _executor_module() -> Any:
    """The module of thunder's nvFuser executor. UnsupportedError if thunder has none: without a
    CUDA device, or without nvFuser.
    """
    library = nvfuser()
    from thunder.executors.nvfuserex import nvfuser_available

    if not nvfuser_available():
        raise UnsupportedError(
            "thunder does not use nvFuser here",
            expected="a CUDA device",
            todo="leave out nvfuser=True to use our own backends",
        )
    return thunders_nvfuser(library)
