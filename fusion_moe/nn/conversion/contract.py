"""Expert modules as transformers' decorator `use_experts_implementation` describes them, and the
modules that replace them.

The decorator gives an instance `is_transposed`, `is_concatenated`, `has_bias`, `has_gate`,
`has_post_expert_norm` (since transformers 5.20) and a method `_apply_gate`; the class has
`gate_up_proj` or `up_proj`, `down_proj`, biases, `act_fn`. transformers is not imported: any module
that has these attributes qualifies. Letters: E experts, H hidden, I intermediate features.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ...encodings import NVFP4, Quantized, is_dtensor
from ...errors import ShapeError, UnsupportedError
from ..config import NVFP4Config, QuantizationConfig
from ..frozen import FROZEN, CustomExperts, Experts, NVFP4Experts, Projections, View
from .traced_activation import activation_of

# in this order: transformers' modules of codes raise if asked for the last, but lack the others
_FLAGS = ("has_gate", "has_bias", "is_concatenated", "is_transposed")


@dataclass(frozen=True)
class ExpertsContract:
    """The layout of an expert module's weights, as its attributes describe it.

    transposed: they are [E, K, N], as in `x @ weight`. concatenated: gate and up are the first and
    the second half of 2I; otherwise they alternate. post_expert_norm: there is a norm between down
    and the sum over a token's experts.
    """

    experts: int
    hidden: int
    intermediate: int
    has_gate: bool
    has_bias: bool
    transposed: bool
    concatenated: bool
    post_expert_norm: bool

    @property
    def up_name(self) -> str:
        """The name of the first projection."""
        return "gate_up_proj" if self.has_gate else "up_proj"

    @property
    def names(self) -> tuple[str, ...]:
        """The module's parameters: both projections, then their biases."""
        weights = self.up_name, "down_proj"
        return (*weights, *(f"{name}_bias" for name in weights)) if self.has_bias else weights

    @property
    def up_shape(self) -> tuple[int, int, int]:
        """[E, 2I, H], or [E, I, H] without a gate."""
        return self.experts, (2 if self.has_gate else 1) * self.intermediate, self.hidden

    @property
    def down_shape(self) -> tuple[int, int, int]:
        """[E, H, I]"""
        return self.experts, self.hidden, self.intermediate

    def view_of(self, name: str) -> View:
        """How the module stores one of its parameters."""
        return View(self.transposed, name.startswith("gate_up") and not self.concatenated)

    def up(self, weight: Tensor) -> Tensor:
        """The first projection, or its bias, as the module stores it -> [E, 2I, H], gate above up,
        or [E, I, H].
        """
        (rows,) = self.view_of(self.up_name).unpack(weight)
        return rows

    def down(self, weight: Tensor) -> Tensor:
        """The second projection as the module stores it -> [E, H, I]."""
        return weight.mT if self.transposed else weight


def contract_of(module: nn.Module) -> ExpertsContract | None:
    """The contract of an expert module, also on the meta device; None for any other module."""
    if not all(isinstance(getattr(module, name, None), bool) for name in _FLAGS):
        return None
    gate, transposed = module.has_gate, module.is_transposed
    up, down = (
        getattr(module, name, None) for name in ("gate_up_proj" if gate else "up_proj", "down_proj")
    )
    if not all(isinstance(t, Tensor) and t.dim() == 3 for t in (up, down)):
        return None
    experts, hidden, intermediate = (down.mT if transposed else down).shape  # type: ignore[union-attr]
    return ExpertsContract(
        experts,
        hidden,
        intermediate,
        bool(gate),
        bool(module.has_bias),
        bool(transposed),
        bool(module.is_concatenated),
        bool(getattr(module, "has_post_expert_norm", False)),
    )


def experts_from(
    module: nn.Module,
    up: Quantized,
    down: Quantized,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    config: QuantizationConfig | None = None,
) -> Projections:
    """The module of fusion_moe.nn that replaces an expert module, with weights in any encoding,
    also on the meta device.

    up [E, 2I, H], gate above up, or [E, I, H] without a gate, and down [E, H, I]; up_bias [E, 2I]
    or [E, I], down_bias [E, H]. The result is an `Experts` (NVFP4Experts for NVFP4) if the
    activation is pointwise, otherwise a `CustomExperts`. It keeps none of the module's
    own weights. UnsupportedError if `module` is no expert module or is divided between devices;
    ShapeError for weights whose shapes are not the module's.
    """
    contract = need_contract(module)
    _check_shapes(contract, up, down, up_bias, down_bias)
    activation_format = (config or NVFP4Config()).activation_format
    activation = None if contract.post_expert_norm else activation_of(module)
    if activation is None:
        replacement: Projections = CustomExperts(
            up, down, module, activation_format, up_bias=up_bias, down_bias=down_bias
        )
    else:
        cls = NVFP4Experts if up.encoding == NVFP4 else Experts
        replacement = cls(
            up,
            down,
            activation_format,
            gate_up_bias=up_bias,
            down_bias=down_bias,
            activation=activation,
        )
    replacement.transposed = contract.transposed
    replacement.interleaved = contract.has_gate and not contract.concatenated
    return replacement.train(module.training)


def need_contract(module: nn.Module) -> ExpertsContract:
    """The contract of a module. UnsupportedError if it has none, or if no module of fusion_moe.nn
    can replace it.
    """
    contract, where = contract_of(module), type(module).__name__
    if contract is None:
        raise UnsupportedError(
            "not a module of experts",
            expected="a class that use_experts_implementation decorates",
            where=where,
        )
    if getattr(module, "_is_expert_parallel", False) or any(
        is_dtensor(p) for p in module.parameters(recurse=False)
    ):
        raise UnsupportedError(
            "experts that a parallel plan divides between devices",
            expected="all experts on one device",
            todo="load the model without tp_plan and expert parallelism",
            where=where,
        )
    tensors = {
        name
        for named in (module.named_parameters, module.named_buffers)
        for name, _ in named(recurse=False)
    }
    if unknown := sorted(n for n in tensors - {*contract.names} if not n.endswith(FROZEN)):
        raise UnsupportedError(
            f"parameters {', '.join(unknown)}", expected=", ".join(contract.names), where=where
        )
    return contract


def _check_shapes(
    contract: ExpertsContract,
    up: Quantized,
    down: Quantized,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
) -> None:
    if up.shape != contract.up_shape or down.shape != contract.down_shape:
        raise ShapeError(
            f"weights {list(up.shape)} and {list(down.shape)}",
            expected=f"{list(contract.up_shape)} and {list(contract.down_shape)}, as the module",
        )
    if (up_bias is not None) != contract.has_bias or (down_bias is not None) != contract.has_bias:
        wanted = "biases of both projections" if contract.has_bias else "no biases"
        there = [name for name, bias in (("up", up_bias), ("down", down_bias)) if bias is not None]
        raise ShapeError(
            f"biases of {' and '.join(there) or 'no projection'}",
            expected=f"{wanted}, as the module",
        )
