"""Linear layers with an encoded weight, for attention, shared experts and dense layers of a
quantized checkpoint.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...definitions.operations import restored
from ...encodings import Quantized, as_plain_tensors
from ...errors import Error, ShapeError
from .. import checks
from .packed import PackedModule


class QuantizedLinear(PackedModule):
    """x @ weight.T + bias, computed as a grouped product with one group.

    N out-features, K in-features. Frozen parameters: weight, weight_scale and, if the encoding has
    a scale of the matrix, weight_scale_2 are the parts of the weight, in linear order; bias is the
    only one that a cast of the model casts. A scale that is a scalar is a buffer.

    Args:
        weight: [N, K] in any encoding.
        bias: float [N], or None.

    Raises:
        ShapeError: for a weight or bias of another shape.
    """

    castable = ("bias",)
    bias: nn.Parameter | None

    def __init__(self, weight: Quantized, bias: Tensor | None = None):
        super().__init__()
        if len(weight.shape) != 2 or (bias is not None and bias.shape != weight.shape[:1]):
            of_bias = "" if bias is None else f" and bias {list(bias.shape)}"
            raise ShapeError(f"weight {list(weight.shape)}{of_bias}", expected="[N, K] and [N]")
        self.out_features, self.in_features = weight.shape
        names = ("weight", "weight_scale", "weight_scale_2")[: len(weight)]
        self.hold("weight", names, weight)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]. ShapeError for another K, DtypeError for float64 or integers,
        before anything is computed.
        """
        with as_plain_tensors():
            self.order()
            checks.need_narrow_rows("x", x, self.in_features, "QuantizedLinear")
            rows, form = x.reshape(-1, self.in_features), self.forms["weight"]
            padding = form.padding
            rows = padding.pad_columns(rows) if padding else rows
            offs = torch.full((1,), rows.shape[0], dtype=torch.int32, device=x.device)
            try:
                y = torch.ops.fusion_moe.grouped_mm(
                    rows,
                    [t[None] for t in self._parts("weight")],
                    offs,
                    weight_format=form.encoding.name,
                    weight_layout=form.layout,
                )
            except Error as error:  # whose message has the operation's argument names
                raise error.at(f"{type(self).__name__}, whose x is a") from None
            y = restored(padding.cut_rows(y) if padding else y, x.shape[:-1])
            return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        """For print(model)."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, weight_format={self.encoding.name!r}, "
            f"weight_layout={self.weight_layout!r}"
        )
