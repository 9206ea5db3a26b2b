"""The CUDA kernels of products for tests: those of the H200's table and of one group, or others in
the table's place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fusion_moe.arch import H200
from fusion_moe.backends.cuda import heuristics, one_group
from fusion_moe.backends.cuda.table import ALWAYS, Regime, table_of
from fusion_moe.backends.cuda.variants import ALL, LargeMma, Variant

TABLE = table_of(H200)
PAIRS = [  # of weights and activations
    ("nvfp4", "bf16"),
    ("nvfp4", "f16"),
    ("mxfp4", "bf16"),
    ("mxfp4", "f16"),
    ("int4", "bf16"),
    ("int4", "f16"),
    ("bf16", "bf16"),
    ("f16", "f16"),
]
EIGHT_BITS = [
    ("fp8", "bf16"),
    ("fp8", "f16"),
    ("fp8_e8m0", "bf16"),
    ("fp8_channel", "bf16"),
    ("fp8_tensor", "bf16"),
]


# without wgmma: in no table of an H200, where they run too
MMA = [v for v in ALL if isinstance(v, LargeMma)]


def variants_of(kind: str) -> list[Variant]:
    """The kernels for weights of a kind: "tiled", "linear", "wide_tiled", "wide_linear"."""
    regimes = (*getattr(TABLE, kind), *(TABLE.row_order if kind == "tiled" else ()))
    of_table = [v for regime in regimes for v in regime.variants]
    return list(dict.fromkeys((*of_table, *(one_group.VARIANTS if kind == "tiled" else ()))))


def use(monkeypatch: Any, **fields: Any) -> None:
    """Every GPU has the H200's table with other fields."""
    changed = replace(TABLE, **fields)
    monkeypatch.setattr(heuristics, "table_of", lambda arch: changed)


def use_variant(monkeypatch: Any, kind: str, variant: Variant) -> None:
    """One kernel is chosen for all sizes, where it fits."""
    regimes = Regime(ALWAYS, (variant,)), getattr(TABLE, kind)[-1]
    use(monkeypatch, row_order=(), **{kind: regimes})
