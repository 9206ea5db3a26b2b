"""The kernels that run before products: routers (router.py), and what sorts rows by expert. Sums of
slots, which run after them, are in source.py.
"""

from __future__ import annotations

from dataclasses import replace

from ...ir import Op, elements, plain, value
from ..cxx import is_made_first, made_by_route, size, stored
from ..inexpressible import naming
from . import router
from .source import KernelSource, Sizes, Source

_WARPS = {32: 1, 1024: 8}  # of a block of `route`, for up to this many ids
_MAX_WARPS = 32
# a lane of `route` reads so many ids at once if there are more than the first, and no more groups:
# its registers leave a multiprocessor one block. Of a share of experts most ids may name none: so
# many blocks place those
_FEW_IDS, _FEW_GROUPS, _IDS_OF_LANE, _REST_BLOCKS = 4096, 128, 4, 8


def made_first(
    source: Source, sizes: Sizes, any_size: bool = False, without: Op | None = None
) -> list[KernelSource]:
    """Routers and routing; any_size: by kernels for any number of tokens. without: an operation
    that another kernel computes.
    """
    found, done = list[KernelSource](), {without}
    for op in filter(is_made_first, source.fusion.ops):
        if op in done:
            continue
        with naming(op):
            if op.kind.name in ("topk_ids", "topk_weights"):
                kernel, ops = router.kernel_and_operations(source, op, sizes, any_size)
                found.append(kernel)
                done.update(ops)
            elif op.kind.name == "route":
                found.append(_route(source, op, sizes, any_size))
            elif make := _OF_ANY_SIZE.get(op.kind.name):
                found += source.once(make, source, op)
    return found


def _route(source: Source, op: Op, sizes: Sizes, any_size: bool) -> KernelSource:
    count = value(elements(op.values[0].type.shape), sizes)
    warps = next((w for most, w in _WARPS.items() if not any_size and count <= most), _MAX_WARPS)
    many = not any_size and count > _FEW_IDS and op.attrs["groups"].count <= _FEW_GROUPS
    ids = _IDS_OF_LANE if many else 1
    return replace(source.once(_routing_kernel, source, op, ids), threads=32 * warps)


def _routing_kernel(source: Source, op: Op, ids_of_lane: int) -> KernelSource:
    (ids,), groups, (ends, row_of, slot_of) = op.values, op.attrs["groups"].count, op.outputs
    count, slots = elements(ids.type.shape), size(ids.type.shape[1])
    given = f"{source.array(ids, source.made_later)}, i32({size(count)}), i32({slots}), {groups}, "
    given += f"{source.array(ends)}, {source.array(row_of)}, {source.array(slot_of)}, error"
    first = op.attrs.get("first_expert")
    local, given = first is not None, f"{given}, {first or 0}"
    rest = _REST_BLOCKS if local and ids_of_lane > 1 else 1
    types = f"{stored(ids)}, {str(local).lower()}, {ids_of_lane}, {rest}"
    body = [*source.WAIT, f"Route<{types}>{{{given}}}.run();"]
    return source.kernel("route", body, groups + rest, threads=32 * _MAX_WARPS)


def _place(source: Source, op: Op) -> list[KernelSource]:
    (ids, expert_map), (made,) = op.values, op.outputs
    given = f"{source.array(ids, source.made_later)}[i], {source.array(expert_map)}"
    counts = f"{size(expert_map.type.shape[0])}, {op.attrs['here']}"
    place = f"place_of({given}, {counts}, i, error)"
    body = [f"{source.names[made]}[i] = {place};"]
    return [source.for_all("place", elements(ids.type.shape), body)]


def problem(source: Source, op: Op) -> str:
    """The C++ of a partition in nvFuser's form: a Problem of kernels/ragged.cuh."""
    arrays = ", ".join(source.array(v, source.made_later) for v in op.values)
    return f"{{{arrays}, {op.attrs['n']}, {op.attrs['k']}}}"


def _problem_ends(source: Source, op: Op) -> list[KernelSource]:
    groups, ends = op.attrs["groups"].count, source.names[op.outputs[0]]
    given = f"{problem(source, op)}, {size(op.attrs['rows'])}, {ends}, error"
    body = [*source.WAIT, f"problem_ends<{groups}>({given});"]
    return [source.kernel("problem_ends", body, 1, threads=32)]


def _invert(source: Source, op: Op) -> list[KernelSource]:
    """One kernel for a permutation. If it may not be one, every row is first made to name a
    valid slot.
    """
    (slot_of,), count, made = op.values, plain(op.attrs["rows"]), source.array(op.outputs[0])
    place = f"{source.array(slot_of, source.made_later)}[i]"
    if made_by_route(source.fusion, slot_of) == "slot_of":
        return [source.for_all("invert", count, [f"{made}[{place}] = i32(i);"])]
    return [
        source.for_all("invert_begin", count, [f"{made}[i] = -1;"]),
        source.for_all(
            "invert", count, [f"{made}[clamp_index({place}, {size(count)}, error)] = i32(i);"]
        ),
        source.for_all(
            "invert_end",
            count,
            [f"{made}[i] = i32(clamp_index({made}[i], {size(count)}, error));"],
        ),
    ]


# by operation: what makes its kernels, which are the same for any number of tokens
_OF_ANY_SIZE = {"place": _place, "invert": _invert, "problem_ends": _problem_ends}
