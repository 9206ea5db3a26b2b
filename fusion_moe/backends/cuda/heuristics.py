"""The choice of kernels for a product: one, or several for groups by size. By tables of measured
times; for one group, by a model of them.

The choice looks at the GPU and at sizes that the host knows (rows, groups, and those of a matrix),
never at how many rows a group has: only kernels look at that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...arch import Arch
from ...errors import OptionError, UnsupportedError
from ...layouts import groups as ragged
from . import one_group
from .table import Table, table_of
from .variants import ALL, Matrices, SmallM, Variant

AUTO = "auto"  # not the name of a variant


@dataclass(frozen=True)
class SizeClass:
    """A kernel and the groups that it handles: those of more than above_rows rows and at most
    max_rows, if that is not None.
    """

    variant: Variant
    above_rows: int = 0
    max_rows: int | None = None

    def __str__(self) -> str:
        """The kernel's name and, if it does not handle all groups, which ones it does."""
        if self.max_rows is None:
            return (
                f"{self.variant.name} (groups of more than {self.above_rows} rows)"
                if self.above_rows
                else self.variant.name
            )
        return f"{self.variant.name} (groups of {self.above_rows + 1} to {self.max_rows} rows)"


@dataclass(frozen=True)
class Chosen:
    """How a segment is computed for certain sizes. size_classes: the kernels of its product, in
    order; none if it has no product, or one by kernels/product.cuh, which has no variants.

    any_size: whether to use kernels that work for calls of any sizes, so that their text contains
    none. rows_given, writes_fragment_order: whether the product reads rows as an earlier segment
    has them for it, in fragment order or (fp8.py) not yet quantized, and whether the result is in
    fragment order. without_codes: whether that is so of the rows that this segment would quantize.
    without_rest: whether rows of no group are left unwritten, since nothing reads them. few_ids:
    whether no kernel sorts ids but the product's own, and the next product's; one_token: whether
    each of these ids has tiles of its own; ids: for the latter product, their type, and the one of
    group 0. by_wgmma: whether a product of codes is. way: which of a product's ways computes it
    (product.py).
    """

    size_classes: tuple[SizeClass, ...] = ()
    rows_given: bool = False
    writes_fragment_order: bool = False
    without_codes: bool = False
    any_size: bool = False
    without_rest: bool = False
    few_ids: bool = False
    one_token: bool = False
    ids: tuple[str, int] | None = None
    by_wgmma: bool = False
    way: int = 0

    @property
    def small_m(self) -> SmallM | None:
        """The small-M kernel that computes all groups, if one does."""
        only = self.size_classes[0].variant if len(self.size_classes) == 1 else None
        return only if isinstance(only, SmallM) else None

    @property
    def activation_reader(self) -> Variant:
        """The variant that determines the order in which concurrent kernels read rows: one that
        reads only row-major, or else the first.
        """
        return min((s.variant for s in self.size_classes), key=lambda v: v.reads_fragment_order)


def choose_kernels(
    rows: int, of: Matrices, arch: Arch, variant: str = AUTO
) -> tuple[SizeClass, ...]:
    """The kernels, in order, for `rows` rows in groups: the variant with this name, or by the GPU's
    table.
    """
    return (
        choose_from(table_of(arch), rows, of, arch)
        if variant == AUTO
        else (SizeClass(_pinned(variant, of, arch)),)
    )


def check_variant(name: str) -> None:
    """OptionError if no variant has this name."""
    if name not in (names := [AUTO, *dict.fromkeys(v.name for v in ALL)]):
        raise OptionError(f"cuda_variant = {name!r}", expected=f"one of {', '.join(names)}")


def _pinned(name: str, of: Matrices, arch: Arch) -> Variant:
    """The variant with this name. If two differ only in their blocks per multiprocessor, one that
    the table has for such weights.
    """
    of_table = (v for regime in table_of(arch).regimes(of) for v in regime.variants)
    fitting = [v for v in (*of_table, *ALL) if v.fits(of, arch)]
    found = next((v for v in fitting if v.name == name), None)
    if found is None:
        raise UnsupportedError(
            f"cuda_variant = {name!r} does not fit a product of {of.groups} matrices "
            f"[{16 * of.tiles}, {of.k}] on {arch.name}",
            expected=f"one of {', '.join(dict.fromkeys(v.name for v in fitting))}",
            where="cuda",
        )
    return found


def choose_from(table: Table, rows: int, of: Matrices, arch: Arch) -> tuple[SizeClass, ...]:
    """The same by any table; a product with one group that the model covers, by the model.

    If few blocks leave a GPU idle, split-K makes more.
    """
    if one_group.admits(of) and (only := one_group.fastest(rows, of, arch)):
        return (SizeClass(only),)
    # how many groups have rows, if rows choose them evenly
    touched = of.groups * (1 - (1 - 1 / of.groups) ** rows)

    def cost(v: Variant) -> float:
        expected = max(touched, rows / v.tile_m) * -(-of.tiles // v.tiles)
        return v.cost(expected, blocks(SizeClass(v), rows, of) - expected, of, arch)

    def fastest(among: Sequence[Variant]) -> Variant | None:
        return min((v for v in among if v.fits(of, arch)), key=cost, default=None)

    possible = (
        (regime, fastest(regime.variants))
        for regime in table.regimes(of)
        if rows <= regime.max_average * of.groups
    )
    regime, usual = next(
        ((regime, variant) for regime, variant in possible if variant), (None, None)
    )
    if regime is None or usual is None:
        raise UnsupportedError(
            f"a {of.kind} of {of.groups} matrices of {of.k} x {16 * of.tiles} has no kernel on "
            f"{arch.name}",
            where="cuda",
        )
    bounds = [most for most, _ in regime.size_classes]
    found = [v for _, among in regime.size_classes if (v := fastest(among))]
    # large-M kernels add up K in row order if they read fragment order, small-M kernels read rows
    # as they are stored
    mixed = of.row_order and not of.rows_stored and len({v.reads_fragment_order for v in found}) > 1
    if not found or len(found) < len(bounds) or mixed:
        return (SizeClass(usual),)
    size_classes = [
        SizeClass(v, above or 0, most)
        for v, above, most in zip(found, [0, *bounds], bounds, strict=False)
    ]
    # other kernels fill what persistent kernels leave of a GPU
    return tuple(sorted(size_classes, key=lambda c: not c.variant.persistent))


def blocks(size_class: SizeClass, rows: int, of: Matrices) -> int:
    """The amount of work, in blocks, whatever the sizes of groups. Rows of no group count as one
    more group.
    """
    tile_m, count = size_class.variant.tile_m, min(of.groups, rows // (size_class.above_rows + 1))
    high = ragged.bound(rows, count + 1, tile_m) // tile_m
    if size_class.max_rows is not None:
        high = min(high, count * -(-size_class.max_rows // tile_m))
    return high * -(-of.tiles // size_class.variant.tiles) * size_class.variant.cluster
