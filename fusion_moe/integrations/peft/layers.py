"""The layers of PEFT's LoRA around modules of fusion_moe.nn."""

from __future__ import annotations

from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import peft
import torch
from peft.tuners.lora import layer
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor

from ...errors import UnsupportedError
from ...lora.files.factors import a_from_peft, b_from_peft, to_peft
from ...lora.merging import add_, write_
from ...nn.frozen import PackedModule, Weight

# what rounding lost of what merging added, by the name of a weight
losses: ContextVar[dict[str, Tensor] | None] = ContextVar("fusion_moe_losses", default=None)
_INITIAL = (True, False, "gaussian")


class _OnCodes(layer.LoraLayer):
    """A layer whose base has an encoded weight, `encoded`: its numbers are never read as such."""

    encoded: str
    _before: Weight | None = None  # the weight before it was merged into

    def update_layer(self, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """As PEFT's. UnsupportedError for initial values that come from the weight's numbers."""
        config = kwargs["config"]
        if config.init_lora_weights not in _INITIAL or config.lora_bias:
            raise UnsupportedError(
                f"init_lora_weights = {config.init_lora_weights!r}, "
                f"lora_bias = {config.lora_bias} for {self._packed.encoding.name} weights",
                expected=f"init_lora_weights of {', '.join(map(repr, _INITIAL))}, without bias",
                where=self.kwargs.get("target_name", ""),
            )
        super().update_layer(adapter_name, *args, **kwargs)

    @property
    def lora_variants(self) -> dict[Any, Any]:
        """None: PEFT's variants read the weight's numbers."""
        return {(): None}

    @property
    def _packed(self) -> PackedModule:
        base: Any = self.get_base_layer()
        return base

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: Any = None) -> None:
        there = getattr(self._packed, "adapters_on", None)
        if there is None and self._packed.encoding.plain:
            super()._move_adapter_to_device_of_base_layer(adapter_name, device)
            return
        there = there or self._packed.weight_of(self.encoded).device
        for factors in (self.lora_A, self.lora_B):
            if not factors[adapter_name].weight.is_meta:
                factors[adapter_name].to(there)  # as float32: codes have no dtype to take over

    def _delta(self, adapter_name: str, matrix: int) -> Tensor:
        """float32 [N, K]: what an adapter adds to a matrix, in the order of its rows."""
        raise NotImplementedError

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """As PEFT's, into the encoded weight. NonFiniteError, before anything changes, for NaN."""
        names = check_adapters_to_merge(self, adapter_names)
        names = [name for name in names if name in self.lora_A]
        if not names:
            return
        packed, where = self._packed, self.kwargs.get("target_name", "")
        parts = [part.clone() for part in packed.weight_of(self.encoded)]
        before = Weight(parts, packed.forms[self.encoded])
        norms = add_(
            packed,
            {self.encoded: lambda e: torch.stack([self._delta(n, e) for n in names]).sum(0)},
            where,
        )
        if self._before is None:
            self._before = before
        self.merged_adapters += names
        if (lossy := losses.get()) is not None and not packed.encoding.plain:
            lossy[f"{where} ({packed.encoding.name})"] = norms

    def unmerge(self) -> None:
        """As PEFT's: puts back the bits that were there before, in the layout of now."""
        if self._before is not None:
            form = self._packed.forms[self.encoded]
            write_(self._packed, {self.encoded: self._before.to(form).parts})
        self._before, self.merged_adapters = None, []


class Linear(_OnCodes, layer.Linear):
    """LoRA beside a `QuantizedLinear`."""

    encoded = "weight"

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        return module.in_features, module.out_features

    def _delta(self, adapter_name: str, matrix: int) -> Tensor:
        delta: Tensor = self.get_delta_weight(adapter_name)
        return delta.float()


class ParamWrapper(_OnCodes, layer.ParamWrapper):  # PEFT asks for this name
    """LoRA beside a weight [E, N, K] of a module of fusion_moe.nn, which reads the factors of all
    active adapters in its own call: this only stands around it, as PEFT's layers do.
    """

    def __init__(self, base_layer: Any, adapter_name: str, parameter_name: str, **kwargs: Any):
        packed = base_layer.get_base_layer() if hasattr(base_layer, "base_layer") else base_layer
        names = {parts[0]: name for name, parts in packed.part_names.items()}
        if parameter_name not in names:
            raise UnsupportedError(
                f"{parameter_name} in target_parameters",
                expected=f"the weights of a {type(packed).__name__}: {', '.join(names)}",
            )
        self.encoded = names[parameter_name]
        if packed.adapter(self.encoded) is not None or packed.sharding is not None:
            raise UnsupportedError(
                f"{parameter_name} in target_parameters, which has adapters of add_lora_"
                if packed.adapted
                else f"{parameter_name} in target_parameters, divided between ranks",
                expected="a weight without adapters, as a whole",
                todo="leave it out: add_lora_'s become a part of PEFT's adapter, or remove_lora_ "
                "takes them away"
                if packed.adapted
                else "add_lora_(model) makes adapters that are divided too",
                where=type(packed).__name__,
            )
        super().__init__(base_layer, adapter_name, parameter_name, **kwargs)
        packed.wrappers[self.encoded] = self

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        """The two that `update_layer` swaps."""
        self.num_experts, n, k = module.shape_of(self.encoded)
        self._param_ndim = 3
        return (k, n) if module.turned else (n, k)

    def unload_and_optionally_merge_module(self, *args: Any, **kwargs: Any) -> Any:
        """As PEFT's. The module that is left reads no factors."""
        base = super().unload_and_optionally_merge_module(*args, **kwargs)
        base.wrappers.clear()
        return base

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The module's own call."""
        self._check_forward_args(x, *args, **kwargs)
        if self.disable_adapters and self.merged:
            self.unmerge()
        result: Tensor = self.base_layer(x, *args, **kwargs)
        return result

    # What the module reads ------------------------------------------------------------------------

    @property
    def _active(self) -> list[str]:
        return [name for name in self.active_adapters if name in self.lora_A]

    @property
    def disabled(self) -> bool:
        """Whether nothing is added for now."""
        return bool(self.disable_adapters or self.merged or not self._active)

    @property
    def scale(self) -> float:
        """The factor of B @ A; 1 for several adapters, whose B have theirs."""
        names = self._active
        return float(self.scaling[names[0]]) if len(names) == 1 else 1.0

    @property
    def A(self) -> Tensor:
        """[E, r, K], ranks of the active adapters one after the other."""
        factors = [self._a(name) for name in self._active]
        return factors[0] if len(factors) == 1 else torch.cat(factors, 1)

    @property
    def B(self) -> Tensor:
        """[E, N, r], rows in the order of the weight's."""
        names = self._active
        factors = [self._b(name) for name in names]
        if len(factors) == 1:
            return factors[0]
        return torch.cat([b * self.scaling[n] for n, b in zip(names, factors, strict=True)], 2)

    def _of_peft(self, adapter_name: str) -> tuple[Tensor, Tensor, int, bool]:
        a, b = (t.get_parameter(f"{adapter_name}.weight") for t in (self.lora_A, self.lora_B))
        return a, b, self.num_experts, self._packed.turned

    def _a(self, adapter_name: str) -> Tensor:
        return a_from_peft(*self._of_peft(adapter_name))

    def _b(self, adapter_name: str) -> Tensor:
        b = b_from_peft(*self._of_peft(adapter_name))
        return self._packed.view_of(self.encoded).deinterleave(b)

    def fill_(self, a: Tensor, b: Tensor) -> None:
        """Gives the one adapter A [E, r, K] and B [E, N, r]."""
        (name,) = self._active
        packed = self._packed
        factors = to_peft(a, packed.view_of(self.encoded).interleave(b), packed.turned)
        with torch.no_grad():
            for layers, t in zip((self.lora_A, self.lora_B), factors, strict=True):
                layers.get_parameter(f"{name}.weight").copy_(t)

    def problems(self) -> list[str]:
        """Whether PEFT adds something else to the weight than the module that reads the factors: by
        the first column, for `verify`.
        """
        return [
            f"of {name} its module reads other factors than PEFT {peft.__version__} multiplies"
            for name in (self._active if self.num_experts > 1 else ())
            if not torch.allclose(*self._first_columns(name), rtol=1e-4, atol=0)
        ]

    @torch.no_grad()
    def _first_columns(self, adapter_name: str) -> tuple[Tensor, Tensor]:
        """What the module adds to the first column of each matrix as the module in floats has it,
        and what PEFT would.
        """
        a, b, _, turned = self._of_peft(adapter_name)
        theirs: Any = SimpleNamespace(
            num_experts=self.num_experts,
            lora_A={adapter_name: SimpleNamespace(weight=a[:, :1].double())},
            lora_B={adapter_name: SimpleNamespace(weight=b.double())},
            scaling=self.scaling,
            get_param=lambda: a.double(),
            _did_swap_in_out_features=True,
        )
        own_a, own_b = (t.double() for t in (self._a(adapter_name), self._b(adapter_name)))
        view = self._packed.view_of(self.encoded)
        ours = (
            (own_b[:, :1] @ own_a).mT if turned else view.interleave(own_b @ own_a[:, :, :1])
        ) * self.scaling[adapter_name]
        return ours, layer.ParamWrapper.get_delta_weight(theirs, adapter_name)

    def _delta(self, adapter_name: str, matrix: int) -> Tensor:
        a, b = self._a(adapter_name), self._b(adapter_name)
        return self.scaling[adapter_name] * (b[matrix].float() @ a[matrix].float())
