"""What a single nvFuser definition can express, as data, so that nvFuser need not be installed.
The rest of this folder writes what is accepted here.

nvFuser divides and schedules a definition itself, so a segment is as large as its operations allow.
What it cannot express:

- 8-bit integers: packed codes are int32 words or e2m1 pairs for it, and so must come from outside
  of the definition;
- a cast to e4m3 that gives NaN where torch's does: nvFuser's saturates;
- tensors without elements, which trigger an assertion;
- sorts of more rows than one block holds, and so of an unknown number of rows: an assertion at
  launch;
- products whose results are not in the operands' 16-bit type, and sums that scatter;
- e2m1, and tensors of e8m0, below compute capability 10.0;
- blocks along rows of groups, whose starts only the device knows; block scales in a product of
  e4m3: its own are for rows and columns.

Source: nvFuser's python frontend (nvfuser_direct, 0.2.36) and csrc/ops; sizes of the 4-bit product:
its cutlass kernel's alignment.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from ...ir import NARROW, STORED, Fusion, Op, TensorType, Value, elements, plain
from ...ir.kinds.runs import in_runs
from ...schedule.product import GroupedProduct, products
from ...target import Target
from . import eight_bits

NAME = "nvfuser"
CONTRACTS_ROUNDING = False  # it stores the 16-bit results of its products

# the weight encodings that can be lowered, and their layouts
PACKED, LAYOUTS = ("nvfp4",), ("linear", "sf128x4")
# by the format of the activations
PRODUCTS = {"bf16": "dequantize + grouped_mm", "nvfp4": "cutlass_nvfp4_grouped_mm"}
# rows; it sorts within one block, which runs out of shared memory and registers between this and
# 8192
SORTED = 4096
_SORTS = ("route", "invert")
_K, _N = 64, 128  # the sizes of a 4-bit product are multiples of these
_E8M0 = (10, 0)  # the compute capability that e8m0 tensors require


@dataclass(frozen=True)
class NvFuser:
    """The lowering of each product in the definition, and all operations in order."""

    products: tuple[str, ...]
    ops: tuple[str, ...]


def can_schedule(fusion: Fusion, target: Target, kept: Collection[Value] = ()) -> str | None:
    """None if every operation can be written into one nvFuser definition for the target."""
    return next((why for op in fusion.ops if (why := _refusal(op, fusion, target))), None)


def describe(fusion: Fusion) -> NvFuser:
    """The lowerings, which depend on the format of a product's activations and on the target."""
    ops = tuple(op.kind.name for op in fusion.ops if not op.kind.view)
    return NvFuser(tuple(map(lowering, products(fusion))), ops)


def sorts(fusion: Fusion) -> bool:
    """Whether a definition sorts: only then nvFuser needs the headers of a CUDA toolkit."""
    return any(op.kind.name in _SORTS for op in fusion.ops)


def lowering(product: GroupedProduct) -> str:
    """What a grouped product is lowered to."""
    a, b = product.a.type, product.b.type
    return PRODUCTS["nvfp4"] if a.quantized else PRODUCTS["bf16"] if b.quantized else "grouped_mm"


def _refusal(op: Op, fusion: Fusion, target: Target) -> str | None:
    types = [v.type for v in (*op.values, *op.outputs)]
    if any(t.dtype == "u8" for t in types) and op.kind.name not in ("pack", "unpack"):
        return f"{op.kind.name} of u8: nvFuser has no 8-bit integers"
    if any(plain(d) == 0 for t in types for d in t.shape):
        return f"{op.kind.name} of an empty tensor: nvFuser asserts"
    rule = _RULES.get(op.kind.name)
    return rule(op, fusion, target) if rule else NEVER.get(op.kind.name)


def _cast(op: Op, fusion: Fusion, target: Target) -> str | None:
    return (
        f"cast to {to}: nvFuser saturates, where the program does not"
        if (to := op.attrs["dtype"]) in STORED
        else None
    )


def _pack(op: Op, fusion: Fusion, target: Target) -> str | None:
    if op.attrs["encoding"] in eight_bits.NAMES:
        inside = fusion.producer(op.values[1])
        return (
            _of_runs(op, op.outputs[0].type)
            or (None if inside else _stored_scale(op, target))
            or _inside(op, fusion)
        )
    if op.values[0] in fusion.producers:
        return (
            f"pack of codes made by {fusion.producers[op.values[0]].kind.name}: nvFuser has no "
            "8-bit integers"
        )
    if op.attrs["encoding"] not in PACKED:
        return f"pack of {op.attrs['encoding']}: {' and '.join(PACKED)} is lowered"
    if op.attrs["layout"] not in LAYOUTS:
        return (
            f"pack of weights in the layout {op.attrs['layout']}: nvFuser's products read the "
            "linear one"
        )
    packed = op.outputs[0]
    others = {
        r.kind.name
        for r in fusion.readers.get(packed, ())
        if r.kind.role != "grouped" or GroupedProduct.of(r).weight is not packed
    }
    if others or _is_output(op, fusion):
        return (
            f"pack read by {' and '.join(sorted(others)) or 'an output'}: nvFuser has no "
            "quantized tensors"
        )
    return None


def _quantize(op: Op, fusion: Fusion, target: Target) -> str | None:
    if op.attrs["encoding"] in eight_bits.NAMES:
        return _of_runs(op, op.outputs[0].type) or _inside(op, fusion)
    if op.attrs["encoding"] not in PACKED:
        return f"{op.kind.name} to {op.attrs['encoding']}: {' and '.join(PACKED)} is lowered"
    if op.rule != "max":
        return f'{op.kind.name} by {op.rule!r}: "max" is lowered'
    if op.attrs["encoding"] not in target.activation_formats:
        return (
            f"{op.kind.name} to {op.attrs['encoding']} on {target.name}: e2m1 requires compute "
            "capability 10.0"
        )
    if op.values[1].type.shape != op.values[0].type.shape[:-2]:
        return f"quantize with decode scales {op.values[1].type}: only one per matrix is lowered"
    return _inside(op, fusion)


def _dequantize(op: Op, fusion: Fusion, target: Target) -> str | None:
    if op.values[0].type.dtype in eight_bits.NAMES and op.values[0] in fusion.producers:
        return _of_runs(op, op.values[0].type)
    return f"dequantize of {op.values[0].type.dtype}: nvFuser has no quantized tensors"


def _inside(op: Op, fusion: Fusion, target: Target | None = None) -> str | None:
    """A quantized value may not leave the definition, nor may a value whose padding nvFuser leaves
    unwritten.
    """
    if not _is_output(op, fusion):
        return None
    return (
        f"{op.kind.name} whose result leaves the definition: nvFuser has no quantized or "
        "padded tensors"
    )


def _unpack(op: Op, fusion: Fusion, target: Target) -> str | None:
    if op.values[0] not in fusion.producers:
        return "unpack of an input: nvFuser has no quantized tensors"
    if op.values[0].type.dtype in eight_bits.NAMES:
        return _stored_scale(op, target) if op.outputs[1] in fusion.outputs else None
    return (
        "unpack of swizzled scales: nvFuser leaves their padding uninitialized"
        if op.values[0].type.layout != "linear"
        else None
    )


def _of_runs(op: Op, type: TensorType) -> str | None:
    if not in_runs(type.encoding, type.shape):
        return None
    return (
        f"{op.kind.name} of {type.dtype} in blocks along rows of groups: nvFuser's blocks "
        "begin at numbers known when compiling"
    )


def _stored_scale(op: Op, target: Target) -> str | None:
    """Scales inside a definition are float32; scales that enter or leave it are e8m0."""
    if target.capability is not None and target.capability < _E8M0:
        return (
            f"{op.kind.name} of stored scales on {target.name}: e8m0 requires compute "
            f"capability {'.'.join(map(str, _E8M0))}"
        )
    return None


def _product(op: Op, fusion: Fusion, target: Target) -> str | None:
    product = GroupedProduct.of(op)
    if product.weight is None:
        return f"{op.kind.name}: nvFuser's product leaves the matrices of empty groups unwritten"
    a, w = product.a.type, product.weight.type
    if operands := op.attrs.get("operands"):
        return f"{op.kind.name} of {operands} operands: nvFuser's products round none"
    if a.quantized:
        return _packed_product(op, fusion, a, w)
    dtype = w.dtype if not w.quantized else a.dtype
    if a.dtype not in NARROW or dtype != a.dtype:
        return (
            f"{op.kind.name} of {a.dtype} and {w.dtype}: nvFuser's product requires both in "
            "bf16 or both in f16"
        )
    return _from_outside(op, fusion) or _stored(op, fusion, a.dtype)


def _packed_product(op: Op, fusion: Fusion, a: TensorType, w: TensorType) -> str | None:
    if not w.quantized:
        return (
            f"{op.kind.name} of {a.dtype} and {w.dtype}: the 4-bit product requires two 4-bit "
            "operands"
        )
    _, n, k = w.shape
    if k % _K or n % _N:  # type: ignore[operator]  # both are numbers, as pack and the target's layouts require
        return (
            f"K = {k} and N = {n} of a 4-bit product: its kernel requires multiples of {_K} "
            f"and {_N}, and does not check them"
        )
    if op.values[0] not in fusion.producers:
        return (
            "a 4-bit product of activations quantized elsewhere: nvFuser has no quantized tensors"
        )
    return _from_outside(op, fusion) or _stored(op, fusion, *NARROW)


def _from_outside(op: Op, fusion: Fusion) -> str | None:
    """A quantized weight may be a value of the definition only if it is packed inside."""
    w = op.values[1]
    return (
        f"{op.kind.name} whose weight is packed elsewhere"
        if w.type.quantized and w not in fusion.producers
        else None
    )


def _stored(op: Op, fusion: Fusion, *dtypes: str) -> str | None:
    """The program must round the result of a product to one of these types too."""
    v = op.outputs[0]
    rounded = all(
        r.kind.name == "cast" and r.attrs["dtype"] in dtypes for r in fusion.readers.get(v, ())
    )
    if rounded and v not in fusion.outputs:
        return None
    return f"{op.kind.name} kept in float32: nvFuser's product rounds to {' or '.join(dtypes)}"


def _sort(op: Op, fusion: Fusion, target: Target) -> str | None:
    rows = elements(op.values[0].type.shape)
    if isinstance(rows, int) and rows <= SORTED:
        return None
    count = f"{rows}" if isinstance(rows, int) else "a dynamic number of"
    return (
        f"{op.kind.name} of {count} rows: nvFuser sorts within one block, and asserts beyond "
        f"{SORTED}"
    )


def _combine(op: Op, fusion: Fusion, target: Target) -> str | None:
    return (
        None
        if isinstance(op.values[1].type.shape[1], int)
        else ("combine of a dynamic number of slots: the definition unrolls them")
    )


def _is_output(op: Op, fusion: Fusion) -> bool:
    return any(v in fusion.outputs for v in op.outputs)


# whatever the types
NEVER = {
    "grouped_swizzle": "grouped_swizzle by itself: nvFuser leaves the padding uninitialized, and "
    "only its own product may read the result",
    "index_put_accumulate": "index_put_accumulate: nvFuser's scatter does not add",
    "dispatch": "dispatch: no kernel of nvFuser waits for another rank",
    "combine_from": "combine_from: no kernel of nvFuser waits for another rank",
    "group_sum": "group_sum: nvFuser has no sums over ragged dimensions",
    "logsumexp": "logsumexp: nvFuser has no such operation",
    "place": "place: nvFuser's gather reads outside of the table where an id names no expert",
    "routing_map": "routing_map: nvFuser has no such operation",
    "straight_through": "straight_through: canonicalize drops it before a backend sees it",
    "transpose_blocks": "transpose_blocks: nvFuser does not permute codes and scales together",
    "transpose_row_blocks": "transpose_row_blocks: nvFuser does not transpose groups of rows",
    "untranspose_row_blocks": "untranspose_row_blocks: nvFuser does not transpose groups of rows",
} | {
    name: f"{name}: nvFuser leaves open which of equal scores it chooses"
    for name in ("topk_ids", "topk_weights", "topk_weights_backward")
}
Rule = Callable[[Op, Fusion, Target], str | None]
_RULES: dict[str, Rule] = {
    "cast": _cast,
    "pack": _pack,
    "unpack": _unpack,
    "quantize": _quantize,
    "dequantize": _dequantize,
    "relayout": _inside,
    "grouped_mm": _product,
    "grouped_mm_t": _product,
    "grouped_outer": _product,
    "combine": _combine,
    **dict.fromkeys(_SORTS, _sort),
}
