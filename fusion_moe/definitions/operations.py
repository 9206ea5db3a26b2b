"""The operations in `torch.ops.fusion_moe`: their schemas, and a fake and a flop formula for each,
derived from its Fusion.

What an operation computes is defined once, by its translator
(translators/fusion_moe_translators/moe.py): a call is the Fusion that the translator builds. The
fake allocates outputs of the types in that Fusion, the body (bodies/eager.py) runs it, and its
derivative (bodies/autograd.py) runs through `fusion_moe::run`. Letters: M rows, K in-features, N
out-features, G groups, T tokens, k slots a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..errors import DeviceError, DtypeError, Error, ShapeError, Untranslatable
from ..ir import DTYPES, FLOATS, Fusion, FusionDefinition, TensorType, dtype_name, symbol
from . import run, translate
from .run import NAMESPACE, empty_outputs, flops
from .traced import Sizes, equal, tensor_type


@dataclass(frozen=True)
class Spec:
    """One public operation, whose signature is that of its function in ops.py.

    rows: arguments whose leading dimensions are rows, and how many trailing dimensions are not (a
    [..., K]: 1). The number of rows may change from call to call without a new program; arguments
    named in `equal` must have equally many. flatten: the argument whose leading dimensions the
    output gets; without it, rows have one leading dimension. k_major: arguments [G, K, N] whose
    elements must be stored with K contiguous. autocast: the float arguments that torch.autocast
    casts; weights: those that it casts only if `weight_format` names a float format.
    """

    name: str
    rows: Mapping[str, int] = field(default_factory=dict)
    equal: tuple[str, ...] = ()
    flatten: str = ""
    k_major: tuple[str, ...] = ()
    differentiable: bool = True
    autocast: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()

    @property
    def schema(self) -> str:
        """Types and defaults of arguments, and types of results."""
        inferred = torch.library.infer_schema(getattr(ops, self.name), mutates_args=())
        return inferred.replace("SymInt", "int")  # numbers of experts are constants of a program

    def fixes(self, name: str, i: int, rank: int) -> bool:
        """Whether size i of an argument is a constant of the program: all sizes but rows; only the
        last one if no argument has rows.
        """
        return (i > 0 or name not in self.rows) if self.rows else i == rank - 1


SPECS = {
    spec.name: spec
    for spec in (
        Spec("nvfp4_quantize", differentiable=False),
        Spec("nvfp4_grouped_mm", rows={"a": 1}, flatten="a", autocast=("a",)),
        Spec("grouped_mm", rows={"a": 1}, flatten="a", autocast=("a",), weights=("weight",)),
        Spec("grouped_swizzle_block_scale", rows={"block_scale": 1}, differentiable=False),
        Spec("scaled_swiglu", rows={"x": 1, "scale": 0}, equal=("x", "scale"), flatten="x"),
        Spec("route", rows={"ids": 1}, differentiable=False),
        Spec("topk_router", rows={"logits": 1}),
        Spec("fused_compute_score_for_moe_aux_loss", rows={"logits": 1}),
        Spec("fused_moe_aux_loss", rows={"probs": 1}),
        Spec("moe_z_loss", rows={"logits": 1}),
        Spec("combine", rows={"y": 1, "slot_of": 1, "w": 1}, equal=("slot_of", "w")),
        Spec("group_add", rows={"y": 1}, autocast=("y", "bias")),
        Spec(
            "expert_mlp",
            rows={"x": 1, "ids": 1, "w": 1},
            equal=("x", "ids", "w"),
            flatten="x",
            autocast=("x", "gate_up_bias", "down_bias"),
        ),
        Spec(
            "fused_experts",
            rows={"x": 1, "ids": 1, "w": 1, "lora_of": 0},
            equal=("x", "ids", "w", "lora_of"),
            flatten="x",
            autocast=("x", "gate_up_bias", "down_bias"),
            weights=("gate_up", "down"),
        ),
        Spec(
            "f16a_nvfp4weight_scaled_grouped_mm",
            rows={"activation": 1},
            flatten="activation",
            k_major=("fp4_weight",),
            autocast=("activation",),
        ),
    )
}
Forms = tuple[tuple[str, Sequence[Any], torch.dtype], ...]  # names, shapes and dtypes of tensors
Types = tuple[tuple[str, TensorType], ...]


@dataclass(frozen=True)
class Call:
    """One call of an operation: its tensors with rows flattened, its other arguments by name, the
    leading shape of the output.

    The tensors of a list have a name each: those of `weight` are weight[0], weight[1], ...
    """

    spec: Spec
    tensors: Mapping[str, Tensor]
    others: tuple[tuple[str, Any], ...]
    lead: Sequence[int] | None

    @property
    def forms(self) -> Forms:
        """Name, shape and dtype of each tensor, from which its type is made."""
        return tuple([(name, t.shape, t.dtype) for name, t in self.tensors.items()])


def restored(output: Tensor, lead: Sequence[int] | None) -> Tensor:
    """The output of a program, with the operation's leading dimensions; None: those that it has.

    It is no view: writing in place over a view drops the hooks on it, such as FSDP2's, which
    gathers parameters before the backward.
    """
    if lead is None or output.dim() == len(lead) + 1:
        return output
    return torch.ops.aten._unsafe_view.default(output, (*lead, output.shape[-1]))


def _types(name: str, forms: Forms, sizes: Callable[[str, int, Any], Any]) -> Types:
    """The type of each tensor; sizes(argument, dimension, n) turns a size into the IR's."""
    return tuple(
        (arg, _type(name, arg, dtype, [sizes(arg, i, n) for i, n in enumerate(shape)]))
        for arg, shape, dtype in forms
    )


_INTEGERS = {
    "ids": (torch.int64, torch.int32),
    "slot_of": (torch.int64, torch.int32),
    "offs": (torch.int32,),
    "total_num_tokens": (torch.int64, torch.int32),
    "lora_of": (torch.int64, torch.int32),
    "gate_up_lora_of": (torch.int64, torch.int32),
    "down_lora_of": (torch.int64, torch.int32),
    "expert_map": (torch.int32,),
}


def _type(name: str, arg: str, dtype: torch.dtype, shape: Sequence[Any]) -> TensorType:
    try:
        return tensor_type(dtype, shape)
    except Untranslatable as error:
        known = _INTEGERS.get(arg, ())
        expected, todo = (
            (" or ".join(map(str, known)), f"pass {arg}.to({known[0]})")
            if known
            else (error.expected, "")
        )
        raise DtypeError(f"{arg} is {dtype}", expected=expected, todo=todo, where=name) from None


def bind(spec: Spec, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """The arguments of a call by name, defaults filled in. DeviceError unless all tensors are on
    one device.
    """
    bound = named_arguments(spec.name, args, kwargs)
    tensors = dict(each_tensor(bound))
    if len({t.device for t in tensors.values()}) != 1:
        raise _no_one_device(spec, tensors)
    for name in spec.k_major:
        _need_k_major(name, tensors[name], spec.name)
    _need_leading(spec, tensors)
    flattened = tensors.get(spec.flatten)
    lead = _lead(spec, flattened) if flattened is not None and flattened.dim() != 2 else None
    rows = {n: flat(t, spec.rows[n]) if n in spec.rows else t for n, t in tensors.items()}
    others = tuple(
        (n, _plain(n, v, spec.name))
        for n, v in bound.items()
        if n not in tensors and not _is_list_of_tensors(v)
    )
    return Call(spec, rows, others, lead)


def each_tensor(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors among the arguments, by name; those of a list are name[0], name[1], ..."""
    for name, v in arguments.items():
        if isinstance(v, Tensor):
            yield name, v
        elif _is_list_of_tensors(v):
            yield from ((f"{name}[{i}]", t) for i, t in enumerate(v))


def _is_list_of_tensors(v: Any) -> bool:
    return isinstance(v, (list, tuple)) and len(v) > 0 and isinstance(v[0], Tensor)


def _plain(name: str, v: Any, where: str) -> Any:
    """An argument that is not a tensor, in the form in which it is part of a program's key."""
    if not isinstance(v, torch.dtype):
        return tuple(v) if isinstance(v, list) else v
    try:
        return dtype_name(v)
    except DtypeError:
        raise DtypeError(
            f"{name} = {v}",
            expected=f"one of {', '.join(str(DTYPES[f]) for f in FLOATS)}",
            where=where,
        ) from None


def _no_one_device(spec: Spec, tensors: Mapping[str, Tensor]) -> Error:
    """The error for tensors on several devices, or for no tensors at all."""
    places: dict[str, list[str]] = {}
    for name, t in tensors.items():
        names = places.setdefault(str(t.device), [])
        names += [name.partition("[")[0]] if name.partition("[")[0] not in names else []
    if not places:
        return DtypeError("no tensor among the arguments", expected="tensors", where=spec.name)
    text = "; ".join(f"{', '.join(names)} on {device}" for device, names in places.items())
    return DeviceError(
        text,
        expected="one device",
        todo="what is on meta has no values: load them"
        if "meta" in places
        else "move tensors, or the module that has them, with .to(device)",
        where=spec.name,
    )


def _lead(spec: Spec, t: Tensor) -> Sequence[int]:
    """The leading dimensions of the argument that gives the output its leading dimensions."""
    if t.dim() == 0:
        raise ShapeError(
            f"{spec.flatten} has no dimensions",
            expected="[..., K], a row of features or more",
            where=spec.name,
        )
    return t.shape[:-1]


def _need_leading(spec: Spec, tensors: Mapping[str, Tensor]) -> None:
    """ShapeError for several leading dimensions where rows have one, and for different ones of the
    arguments in `spec.equal`.
    """
    lead = {
        n: t.shape[: max(t.dim() - keep, 0)]
        for n, keep in spec.rows.items()
        if (t := tensors.get(n)) is not None
    }
    for name, dims in lead.items():
        if not spec.flatten and len(dims) != 1:
            raise ShapeError(
                f"{name} has shape {list(tensors[name].shape)}",
                expected=f"{spec.rows[name] + 1} dimensions",
                todo=f"pass {name}.flatten(0, -2)" if dims else "",
                where=spec.name,
            )
    several = [name for name in spec.equal if len(lead.get(name, ())) > 1]
    for name in several[1:]:
        one, other = lead[several[0]], lead[name]
        if len(one) != len(other) or any(a != b for a, b in zip(one, other, strict=True)):
            raise ShapeError(
                f"the leading dimensions of {several[0]} are {list(one)}, of {name} {list(other)}",
                expected="the same, or a single one",
                where=spec.name,
            )


def _need_k_major(name: str, t: Tensor, where: str) -> None:
    """ShapeError unless t [G, K, N] is the transposed view of a contiguous [G, N, K]."""
    if t.dim() != 3:
        raise ShapeError(
            f"{name} has shape {list(t.shape)}",
            expected="[G, K/2, N], two codes a byte along K",
            where=where,
        )
    if not t.mT.is_contiguous():
        _, k, n = t.shape
        raise ShapeError(
            f"{name} has shape {list(t.shape)} and strides {list(t.stride())}",
            expected=f"strides {[n * k, 1, k]}, K running fastest",
            todo="pack two codes a byte along K into a contiguous [G, N, K/2] tensor, and pass "
            "its .transpose(1, 2)",
            where=where,
        )


def fp4_as_bytes(t: Tensor) -> Tensor:
    """fp4 tensors as the bytes that they are stored in, which is what programs take; any other
    tensor unchanged.
    """
    return t.view(torch.uint8) if t.dtype == torch.float4_e2m1fn_x2 else t


def flat(t: Tensor, keep: int) -> Tensor:
    """t with its last `keep` dimensions unchanged and all earlier ones flattened into one."""
    several = t.dim() - keep
    if several == 1:
        return t
    return t.flatten(0, several - 1) if several > 1 else t[None]


def named_arguments(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of an operation by name, defaults filled in."""
    return {
        n: args[i] if i < len(args) else kwargs.get(n, default)
        for i, (n, default) in enumerate(signature(name))
    }


@cache
def signature(name: str) -> tuple[tuple[str, Any], ...]:
    """The arguments of an operation, and their defaults or None."""
    schema = getattr(torch.ops.fusion_moe, name).default._schema
    return tuple(
        (a.name, a.default_value if a.has_default_value() else None) for a in schema.arguments
    )


@lru_cache(maxsize=1024)
def fusion_of(name: str, types: Types, others: tuple[tuple[str, Any], ...]) -> Fusion:
    """The Fusion that a call of an operation stands for: what its translator builds from inputs of
    these types.
    """
    fd = FusionDefinition(places=False)
    tensors = {n: fd.define_like(t) for n, t in types}
    arguments = {**dict(others), **tensors}
    _need_given(name, arguments)
    translator = translate.find(f"{NAMESPACE}::{name}")
    assert translator is not None
    try:
        result = translator.function(fd, **{n: _argument(n, arguments) for n, _ in signature(name)})
    except Error as error:
        raise error.at(name) from None
    for output in result if isinstance(result, tuple) else (result,):
        fd.add_output(output)
    return fd.fusion()


def _need_given(name: str, arguments: Mapping[str, Any]) -> None:
    """DtypeError for None in place of a required tensor, which torch lets pass."""
    for a in getattr(torch.ops.fusion_moe, name).default._schema.arguments:
        if str(a.type) == "Tensor" and arguments[a.name] is None:
            raise DtypeError(f"{a.name} is None", expected="a tensor", where=name)


def _argument(name: str, arguments: Mapping[str, Any]) -> Any:
    """An argument by name; for a list of tensors, those named name[0], name[1], ..."""
    if name in arguments:
        return arguments[name]
    return tuple(v for n, v in arguments.items() if n.partition("[")[0] == name)


def eager_types(call: Call) -> Types:
    """The types of a call on real tensors. Row counts become symbols, one for each distinct number,
    so that programs are shared.
    """
    return _eager_types(call.spec.name, call.forms)


@lru_cache(maxsize=1024)
def _eager_types(name: str, forms: Forms) -> Types:
    spec, symbols = SPECS[name], dict[int, Any]()
    _need_equal_rows(spec, {arg: shape for arg, shape, _ in forms})

    def size(arg: str, i: int, n: int) -> Any:
        return (
            symbols.setdefault(n, symbol(f"s{len(symbols)}")) if i == 0 and arg in spec.rows else n
        )

    return _types(name, forms, size)


def _need_equal_rows(spec: Spec, shapes: Mapping[str, Sequence[Any]]) -> None:
    """ShapeError unless the arguments in `spec.equal` have equally many rows."""
    (first, rows), *others = [(name, shapes[name][0]) for name in spec.equal if name in shapes] or [
        ("", 0)
    ]
    for name, n in others:
        if not equal(n, rows):
            raise ShapeError(
                f"{first} has {rows} rows, {name} {n}",
                expected=f"a row of {name} for each row of {first}",
                where=spec.name,
            )


def traced_types(call: Call) -> tuple[Types, Sizes]:
    """The types of a call on fake tensors. Rows are the tracer's symbols; other sizes become
    constants, which the tracer guards.
    """
    sizes = Sizes()
    for name, t in call.tensors.items():
        for i, n in enumerate(t.shape):
            if call.spec.fixes(name, i, t.dim()):
                # all guards first: a symbol that one of them fixes may be in the sizes of others
                int(n)
    shapes, equal_rows = {name: t.shape for name, t in call.tensors.items()}, call.spec.equal
    _need_equal_rows(call.spec, shapes)
    # the tracer now has one symbol for both of two, but still two products if their factors differ:
    # the types have the first one

    def size(name: str, i: int, n: Any) -> Any:
        return sizes.size(shapes[equal_rows[0]][0] if i == 0 and name in equal_rows else n)

    return _types(call.spec.name, call.forms, size), sizes


def _fake(spec: Spec, *args: Any, **kwargs: Any) -> Any:
    call = bind(spec, args, kwargs)
    types, sizes = traced_types(call)
    outputs = empty_outputs(
        fusion_of(spec.name, types, call.others),
        sizes.values(),
        next(iter(call.tensors.values())).device,
    )
    return restored(outputs[0], call.lead) if len(outputs) == 1 else tuple(outputs)


# ----------------------------------------------------------------------------------------- register


def _call_flops(spec: Spec, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    call = bind(spec, args, kwargs)
    types, sizes = traced_types(call)
    return flops(fusion_of(spec.name, types, call.others), sizes.values())


def _register() -> torch.library.Library:
    lib = torch.library.Library(NAMESPACE, "DEF")
    for spec in SPECS.values():
        # the reference reads group ends on the host
        unsafe = (torch.Tag.cudagraph_unsafe,)
        fake, count = partial(_fake, spec), partial(_call_flops, spec)
        run.define(lib, spec.name, spec.schema, unsafe, fake, count)
    run.register(lib)
    return lib


LIBRARY = _register()
