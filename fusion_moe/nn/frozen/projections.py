"""Base of all expert modules: the weights and biases of two projections, in an encoding."""

from __future__ import annotations

from torch import Tensor, nn

from ...encodings import NVFP4, Encoding, Quantized, exactly
from ...errors import ShapeError
from .adaptable import AdaptableModule


class Projections(AdaptableModule):
    """The projections up [E, N, H] and down [E, H, I] of E experts. N is 2I if up is "gate_up"
    (gate above up), and I if it is "up".

    H hidden, I intermediate features. Frozen parameters, one for each part of the encoding:

        gate_up_proj, down_proj              elements: [E, 2I, H] and [E, H, I], packed along the
                                             last dimension
        gate_up_proj_scale, down_proj_scale  block scales, in linear order
        gate_up_decode_scale                 float32 [E, 2], a scale for gate and one for up
        down_decode_scale                    float32 [E]
        gate_up_proj_bias, down_proj_bias    float [E, 2I] and [E, H], or None; the only ones that a
                                             cast of the model casts

    or up_proj [E, I, H], up_proj_scale, up_decode_scale [E], up_proj_bias [E, I]. Scales of other
    names keep them: gate_up_proj_super_scale, of blocks, and gate_up_outer_scale, of a matrix.
    Optional submodules gate_up_lora and down_lora are adapters that train (lora/).

    Attributes:
        activation_format: "bf16", activations as they come in; or quantized too: "nvfp4" (compute
            capability 10.0 only), "int8" (CPUs only, weights in NVFP4 or MXFP4) or "fp8" (compute
            capability 8.9 or higher, where weights are read in FP8).
        first_expert: None: ids are 0 to E - 1, or -1 for no expert; otherwise the module has E
            local experts of more, this is the id of the first, and slots with other ids add
            nothing to the result.
    """

    down_proj: nn.Parameter
    down_proj_bias: nn.Parameter | None
    targets = ("gate_up", "down")
    first_expert: int | None = None

    def __init__(
        self,
        gated: bool,
        up: Quantized,
        down: Quantized,
        activation_format: str,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
    ):
        """up [E, N, H] and down [E, H, I] of one encoding, up_bias [E, N], down_bias [E, H]."""
        super().__init__(activation_format)
        self.first_expert = None
        self.projections = ("gate_up" if gated else "up", "down")
        self._check(gated, up, down)
        experts, rows, hidden = up.shape
        self.castable = tuple(f"{name}_proj_bias" for name in self.projections)
        self._set_weights(up, down)
        biases = (up_bias, (experts, rows)), (down_bias, (experts, hidden))
        for name, (bias, shape) in zip(self.projections, biases, strict=True):
            setattr(self, f"{name}_proj_bias", _bias(f"{name}_bias", bias, shape))

    def _set_weights(self, up: Quantized, down: Quantized) -> None:
        weights = self.weights
        self.read_as_("packed")
        for name, weight in zip(self.projections, (up, down), strict=True):
            self.hold(name, _names(weight.encoding, name), weight)
        self.read_as_(weights)

    def to_nvfp4(self) -> Projections:
        """Converts MXFP4 weights to NVFP4 with equal values, in place, in the linear layout: for
        nvFuser, which reads no MXFP4. Returns the module.

        Gate and up get their own decode scales or, if weights span many octaves, each row does.
        Raises like `encodings.exactly`.
        """
        if self.encoding != NVFP4:
            self.reform(layout="linear")
            up, down = [
                exactly(self.weight_of(name), NVFP4, 2 if name == "gate_up" else 0)
                for name in self.projections
            ]
            self._set_weights(up, down)
        return self

    def _check(self, gated: bool, up: Quantized, down: Quantized) -> None:
        experts, hidden, intermediate = down.shape if len(down.shape) == 3 else (0, 0, 0)
        wanted = (experts, intermediate * (2 if gated else 1), hidden)
        if tuple(up.shape) != wanted or up.encoding != down.encoding:
            raise ShapeError(
                f"{self.projections[0]} {up.encoding.name} {list(up.shape)} and down "
                f"{down.encoding.name} {list(down.shape)}",
                expected=f"[E, {'2I' if gated else 'I'}, H] and [E, H, I] of one encoding",
                todo="transpose weights that are stored [E, K, N]",
                where=type(self).__name__,
            )

    def _bias(self, projection: str, like: Tensor) -> Tensor | None:
        """The bias of a projection in the dtype of activations."""
        bias = getattr(self, f"{projection}_proj_bias")
        return None if bias is None else bias.to(like.dtype)

    def extra_repr(self) -> str:
        """For print(model)."""
        experts, hidden, intermediate = self.shape_of("down")
        ids = "" if self.first_expert is None else f" from {self.first_expert}"
        return (
            f"experts={experts}{ids}, hidden={hidden}, intermediate={intermediate}, "
            f"weight_format={self.encoding.name!r}, activation_format={self.activation_format!r}, "
            f"weight_layout={self.weight_layout!r}"
        )


def _names(encoding: Encoding, projection: str) -> tuple[str, ...]:
    """The names of the parameters that are the parts of a weight."""
    names = [f"{projection}_proj"]
    for s in encoding.scales:
        kind = "_proj" if s.block else ""
        names.append(f"{projection}{kind}_{'scale' if s.part == 'block_scale' else s.part}")
    return tuple(names)


def _bias(name: str, bias: Tensor | None, shape: tuple[int, int]) -> nn.Parameter | None:
    if bias is not None and tuple(bias.shape) != shape:
        raise ShapeError(f"{name} {list(bias.shape)}", expected=f"{list(shape)}")
    return None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)
