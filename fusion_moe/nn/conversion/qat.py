"""qat_: experts whose weights are floats that train, rounded in every forward, which runs what
`quantize_` would make of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ... import backends, options
from ...backends import TARGETS
from ...bodies import batched
from ...definitions.operations import LIBRARY
from ...encodings import MXFP4, NVFP4, Encoding, check_rule, find
from ...errors import OptionError, UnsupportedError, need_one_of
from ...ir.kinds.quantized import STRAIGHT_THROUGH
from ...layouts import Padding
from ...messages import log, some
from ..config import NVFP4Config, QuantizationConfig
from ..frozen import FROZEN, Form, Projections, Weight, rounded
from .contract import ExpertsContract, contract_of
from .converters import DECORATED, by_contract, check, without_memory
from .quantize import Filter, chosen, quantized_experts

_WHERE = "qat_"


def qat_(
    model: nn.Module,
    encoding: str = "nvfp4",
    *,
    scales: str = "max",
    frozen: bool = False,
    straight_through: str = "saved",
    filter_fn: Filter | None = None,
) -> list[str]:
    """Makes the experts of a model compute with rounded weights, while their weights stay the
    floats that train: quantization-aware training, in place. Returns the names of the modules.

    Parameters, names and state dicts stay those of the model. Each forward rounds the weights as
    `quantize_` does and runs its program, so results are those of the quantized model bit for bit,
    with gradients or without. Rounding is the identity to gradients, also for weights that are
    clipped or lie between two codes. `quantize_(model)` ends it, by the same rule and in the same
    format, whatever its own defaults are, and changes no result.

    Args:
        model: the model, in floating point: before DDP or FSDP2 get it.
        encoding: "nvfp4" or "mxfp4", whose matrices have K in whole blocks of 32.
        scales: the rule for scales of blocks, as in `NVFP4Config`. On GPUs "four_over_six" takes
            twice the time of "max", "mse" three to five times: in every forward that has gradients
            or is compiled, else in the first after a change.
        frozen: NVFP4's scales of matrices stay what they are now, in buffers, and weights that
            outgrow them are clipped; those of blocks follow the weights. False: all do.
        straight_through: the backward multiplies with the rounded weights. "saved": it reads what
            the forward saves of the first product, in the dtype of the activations. "exact":
            nothing is saved, and it computes that product again. "float": as "exact", but gradients
            of activations are products with the float weights.
        filter_fn: filter_fn(module, name) chooses modules; None: all.

    Raises:
        UnsupportedError: for a model without such experts, one whose experts are all quantized
            already (offloaded, too), or whose parameters are divided already; for scales that the
            format does not have.
        OptionError: for an option that is not listed here.
        NonFiniteError, ShapeError: as `quantize_`.
    """
    need_one_of("encoding", encoding, (NVFP4.name, MXFP4.name), where=_WHERE)
    check_rule(scales, find(encoding), _WHERE)
    need_one_of("straight_through", straight_through, STRAIGHT_THROUGH, where=_WHERE)
    if frozen and encoding != NVFP4.name:
        raise OptionError(
            f"frozen = True with {encoding}", expected="False: matrices have no scale", where=_WHERE
        )
    names = [name for name, *_ in chosen(model, filter_fn, trained=True)]
    if (others := [*quantized_experts(model)]) and filter_fn is None:
        log.warning("qat_ leaves %s as they are: their weights are codes", some(others))
    for name in names:
        module = model.get_submodule(name)
        if (contract := contract_of(module)) is None or isinstance(module, RoundedExperts):
            raise UnsupportedError(
                f"{name}, a {type(module).__name__}",
                expected=f"{DECORATED}, with weights in floating point",
                todo="filter_fn chooses modules",
                where=_WHERE,
            )
        check(module, None, name)
        how = _Rounding(find(encoding), scales, straight_through, contract)
        if contract.post_expert_norm and straight_through == "float":
            raise OptionError(
                "straight_through = 'float' for experts with a norm",
                expected="'exact' or 'saved'",
                where=name,
            )
        _start(module, how, frozen)
    return names


def _start(module: nn.Module, how: _Rounding, frozen: bool) -> None:
    cls = type(module)
    if frozen:
        for name, master, runs in how.masters(module):
            scale = rounded(master.detach(), how.encoding, runs)[-1]
            # a matrix of zeros may grow
            module.register_buffer(_scale_of(name), torch.where(scale == 0, 1.0, scale))
    module.__class__ = type(cls.__name__, (RoundedExperts, cls), {"__module__": cls.__module__})
    module.__dict__["qat"] = how
    how.prepare(module)


def _scale_of(projection: str) -> str:
    return projection + FROZEN


@dataclass
class _Rounding:
    """How the weights of a module are rounded. scales: the rule for those of blocks; template: what
    `quantize_` would make of the module, without memory; made: the same with memory, for calls
    without gradients, while `seen` is what it was made of.
    """

    encoding: Encoding
    scales: str
    straight_through: str
    contract: ExpertsContract
    template: Any = None
    made: Projections | None = None
    seen: list[Any] = field(default_factory=list)

    def masters(self, module: nn.Module) -> list[tuple[str, Tensor, int]]:
        """For each projection its name, its weight [E, N, K], gate above up, and how many scales a
        matrix has.
        """
        up, down = (module.get_parameter(name) for name in self.contract.names[:2])
        gated = self.contract.has_gate
        return [
            ("gate_up" if gated else "up", self.contract.up(up), 1 + gated),
            ("down", self.contract.down(down), 1),
        ]

    def quantized(self, module: nn.Module, config: QuantizationConfig) -> Projections:
        """What `quantize_` makes of the module, whatever rule the configuration has."""
        weights = [
            rounded(
                master.detach(),
                self.encoding,
                runs,
                None if master.is_meta else getattr(module, _scale_of(name), None),
                scales=self.scales,
            )
            for name, master, runs in self.masters(module)
        ]
        result = by_contract(module, config, weights)
        result.scales = self.scales
        result.frozen_scales = any(name.endswith(FROZEN) for name, _ in module.named_buffers())
        return result

    def prepare(self, module: nn.Module) -> None:
        """Makes the template, in the layout of the module's device."""
        self.made, self.seen = None, []
        device = module.get_parameter("down_proj").device
        template: Any = self.quantized(without_memory(module), NVFP4Config())
        wanted = options.current().target
        if device.type in TARGETS or wanted != "auto":
            template.put_in(template.layout_on(backends.find(wanted, device)))
        template.decided()
        kind = type(template)
        template.__class__ = type(kind.__name__, (_Template, kind), {})
        for name in template.projections:
            template.register_parameter(f"{name}_master", None)
        template.straight_through = self.straight_through
        self.template = template

    def tensors(self, module: nn.Module) -> dict[str, Tensor]:
        """The parameters of the template, computed from the module's."""
        template = self.template
        results: dict[str, Tensor] = {}
        for name, master, runs in self.masters(module):
            shape = master.shape[1], master.shape[2]
            padding = template.forms[name].padding or Padding(shape, shape)
            parts = torch.ops.fusion_moe.encode_weight(
                master.detach(),
                self.encoding.name,
                template.weight_layout,
                runs,
                [*padding.padded, padding.runs],
                getattr(module, _scale_of(name), None),
                self.scales,
            )
            results |= zip(template.part_names[name], parts, strict=True)
            results[f"{name}_master"] = padding.pad_rows(padding.pad_columns(master), -2)
        if self.contract.has_bias:
            up, down = self.contract.names[2:]
            results[up] = self.contract.up(module.get_parameter(up))
            results[down] = module.get_parameter(down)
        return results | {name: p for name, p in module.named_parameters() if "." in name}

    def cached(self, module: nn.Module) -> nn.Module:
        """The module with memory, made again if a parameter changed."""
        of = [*module.parameters(), *module.buffers()]
        now: list[Any] = [None]
        if not any(t.is_inference() for t in of):
            now = [(id(t), t.data_ptr(), t._version) for t in of]
        if self.made is None or now != self.seen or None in now:
            self.made = self.quantized(module, NVFP4Config())
            self.made.put_in(self.template.weight_layout)
            self.made.decided()
            self.seen = now
        return self.made


class RoundedExperts(nn.Module):
    """What `qat_` puts in front of the class of a module of experts."""

    qat: _Rounding

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [..., H], top_k_index int[T, k], top_k_weights [T, k] -> [..., H]"""
        how, rows = self.qat, (hidden_states, top_k_index, top_k_weights)
        if torch.compiler.is_compiling():
            return functional_call(how.template, how.tensors(self), rows)
        if torch.is_grad_enabled():
            how.made = None  # a step may follow whose writes no version counts
            return functional_call(how.template, how.tensors(self), rows)
        y: Tensor = how.cached(self)(*rows)
        return y

    def as_quantized(self, config: QuantizationConfig) -> Projections:
        """The module that `quantize_` replaces this one by."""
        return self.qat.quantized(self, config)

    def _apply(self, fn: Any, recurse: bool = True) -> RoundedExperts:
        scales = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, t in scales.items():  # a cast is for the weights
            if t is not None and name.endswith(FROZEN):
                self._buffers[name] = t.to(self._buffers[name].device)  # type: ignore[union-attr]
        self.qat.prepare(self)
        return self


class _Template(Projections):
    """What is put in front of the class of a template: its weights have masters."""

    straight_through: str

    def _parts(self, weight: str) -> list[Tensor]:
        master = self._parameters[f"{weight}_master"]
        assert master is not None
        return [*super()._parts(weight), master]

    def _arguments(self, like: Tensor) -> dict[str, Any]:
        arguments: dict[str, Any] = super()._arguments(like)  # type: ignore[misc]
        return arguments | {"straight_through": self.straight_through}


# The operation that rounds ------------------------------------------------------------------------


def _form(x: Tensor, encoding: str, layout: str, runs: int, padding: Sequence[int]) -> Form:
    (_, n, k), (rows, columns, padded_runs) = x.shape, padding
    return Form(find(encoding), layout, Padding((n, k), (rows, columns), padded_runs) or None, runs)


def _empty(
    x: Tensor, encoding: str, layout: str, runs: int, padding: Sequence[int], *scaling: Any
) -> list[Tensor]:
    return Weight.of_numbers(x).empty(_form(x, encoding, layout, runs, padding))


def _encode(
    x: Tensor,
    encoding: str,
    layout: str,
    runs: int,
    padding: Sequence[int],
    matrix_scale: Tensor | None = None,
    scales: str = "max",
) -> list[Tensor]:
    form = _form(x, encoding, layout, runs, padding)
    parts = [*Weight.of_numbers(x).to(form, (), matrix_scale, scales).parts]
    return parts if matrix_scale is None else [*parts[:-1], matrix_scale.clone()]


LIBRARY.define(
    "encode_weight(Tensor x, str encoding, str layout, int runs, int[] padding, "
    "Tensor? matrix_scale=None, str scales='max') -> Tensor[]"
)
LIBRARY.impl("encode_weight", _encode, "CompositeExplicitAutograd")
torch.library.register_fake("fusion_moe::encode_weight", _empty, lib=LIBRARY)
batched.implement("encode_weight")
