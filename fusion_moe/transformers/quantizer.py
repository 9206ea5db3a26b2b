"""transformers' HfQuantizer for our modules: modules on the meta device, conversions of the files'
tensors, and steps after loading.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers.quantizers import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..checkpoints import KNOWN, Directory, Entry
from ..encodings import NVFP4
from ..errors import UnsupportedError
from ..nn import Adapter, prepare_
from ..nn.frozen.packed import PackedModule
from .adapters import read_adapters_, write_adapters
from .completeness import check_complete
from .config import ModelOptConfig, NVFP4Config, set_quantization
from .conversions import expert_converters, longest_first, without
from .names import is_weight_norm
from .on_load import Contracts, QuantizeExperts, prepare_to_quantize
from .operations import is_ours
from .replacements import Replacements, replace_modules
from .saving import (
    conversions_for_saving,
    linears_as_stored,
    modelopt_config,
    with_activation_format,
)
from .share import shared
from .stored_module import StoredModule, cast_, check_scales, finish_, freeze_

before_training: list[Callable[[], None]] = []  # done when a Trainer gets a model of ours
state_dict_entries: ContextVar[Mapping[str, Entry] | None] = ContextVar(
    "fusion_moe_state_dict_entries", default=None
)


class FusionMoeQuantizer(HfQuantizer):
    """Loads directories with encoded experts and linear layers into modules of fusion_moe.nn."""

    replaced: Replacements | None = None
    _model: Any = None  # while it is loaded
    _path: Path | None = None  # what it is loaded from, unless each rank reads its share

    def __init__(self, quantization_config: Any, **kwargs: Any):
        if not isinstance(quantization_config, QuantizationConfigMixin):  # fusion_moe.NVFP4Config
            quantization_config = NVFP4Config(**asdict(quantization_config))
        super().__init__(quantization_config, **kwargs)
        self._contracts: Contracts = {}
        self._theirs: list[Any] = []  # transformers' conversions
        self._of_others: list[Any] = []  # those for other parameters than ours
        self._ignored: Any = None  # transformers' patterns of names that are not needed
        self._dtypes: dict[str, torch.dtype] = {}

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """UnsupportedError for encoded weights outside of memory. Called again with the map that
        transformers made of "auto".
        """
        if self._model is not None:
            _check_in_memory(self._model, device_map)

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Any = None, **kwargs: Any
    ) -> None:
        """Replaces modules. CheckpointError for files without tensors that they need,
        UnsupportedError for a parallel plan, and for encoded weights outside of memory.
        """
        if getattr(model.config, "distributed_config", None) is not None:
            # transformers divides modules after they were replaced, by plans for its own modules
            raise UnsupportedError(
                "a model that a parallel plan divides between devices",
                expected="all of it on one device",
                todo="fusion_moe.transformers.from_pretrained(directory, mesh=mesh) reads each "
                "rank's experts, without those plans",
            )
        self._model, share = model, shared()
        if not self.pre_quantized:
            self._contracts = prepare_to_quantize(model, self.quantization_config)
            _check_in_memory(model, kwargs.get("device_map"))
            if share is not None:
                share.take(model, {})
            return
        tensors = share.directory.tensors if share is not None else _tensors(checkpoint_files)
        self._path = Path(checkpoint_files[0]).parent if checkpoint_files else None
        self._dtypes = {
            name: p.dtype for name, p in model.named_parameters() if p.is_floating_point()
        }
        config = self.quantization_config
        self.replaced = replace_modules(
            model, tensors, config.method, config.experts, config.quantizes
        )
        _check_in_memory(model, kwargs.get("device_map"))
        self._ignored = model._keys_to_ignore_on_load_unexpected
        model._keys_to_ignore_on_load_unexpected = {
            *(self._ignored or ()),
            *(f"{re.escape(suffix)}$" for suffix in KNOWN),
        }
        if share is not None:
            share.take(model, self.replaced.experts)

    def update_weight_conversions(
        self, weight_conversions: list[Any], model: Any = None
    ) -> list[Any]:
        """Our conversions before transformers', which may still read experts that are not encoded,
        by other names.
        """
        if self.replaced is None:
            return weight_conversions
        self._theirs = [c for c in weight_conversions if not is_weight_norm(c)]
        ours = expert_converters(
            (source, self._model.get_submodule(name))
            for name, source in self.replaced.experts.items()
        )
        self._of_others = without(self._theirs, ours)
        conversions = [*longest_first(ours), *self._theirs]
        check_complete(self.replaced, self._model, conversions)
        return conversions

    def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
        """8-bit floats are not cast, nor are the inputs of our operations."""
        if isinstance(param, torch.Tensor):
            eight_bit = param.dtype.itemsize == 1
        else:
            eight_bit = str(param.get_dtype()).startswith("F8")
        if eight_bit or is_ours(converter):
            return None
        return super().get_new_dtype(converter, param, dtype)

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Whether a parameter is quantized after its float tensor was read."""
        base, _, key = param_name.rpartition(".")
        return base in self._contracts and key in self._contracts[base].names

    def get_quantize_ops(self) -> QuantizeExperts:
        """The operation that quantizes it."""
        return QuantizeExperts(self._contracts)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> None:
        """Checks scales, freezes parameters, moves them to large pages on the CPU, and reorders
        them for the kernels on CUDA. Adds the adapters that were saved with the model.
        """
        del self._model
        # what is read later, such as layers for multi-token prediction, is in floats
        if self.replaced is not None:
            model._keys_to_ignore_on_load_unexpected = self._ignored
            model._weight_conversions = [
                c for c in self._theirs if c.was_used() or c not in self._of_others
            ]
        check_scales(model, {} if self.replaced is None else self.replaced.experts)
        finish_(model)
        cast_(model, self._dtypes)
        freeze_(model)
        if any(p.is_cuda for p in model.parameters()):
            prepare_(model)
        if self._path is not None:
            read_adapters_(model, self._path)

    def get_state_dict_and_metadata(
        self, model: Any
    ) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """Called before the model is written: tells it how its weights are written, and with which
        configuration. Writes its adapters.
        """
        sources = {} if self.replaced is None else self.replaced.experts
        model._weight_conversions = conversions_for_saving(model, sources)
        set_quantization(model.config, with_activation_format(self._saved_config(model), model))
        write_adapters(model)
        names = (name for name, module in model.named_modules() if isinstance(module, Adapter))
        adapters, state = tuple(f"{name}." for name in names), None
        if adapters:
            whole = model.state_dict()
            state = {key: t for key, t in whole.items() if not key.startswith(adapters)}
        if self.replaced is not None:
            state = linears_as_stored(model, self.replaced.linears, state)
        return state, {}

    def _saved_config(self, model: Any) -> Any:
        """The loaded configuration, unless the weights are stored differently now. UnsupportedError
        if no configuration describes them.
        """
        replaced, config = self.replaced, self.quantization_config
        modules = dict(model.named_modules())
        as_loaded = replaced is not None and all(
            isinstance(modules.get(name), PackedModule) for name in replaced.linears
        )
        if as_loaded and config.method == "modelopt":
            return config.original()
        encodings = {m.encoding for m in model.modules() if isinstance(m, PackedModule)}
        if encodings == {NVFP4}:
            return modelopt_config(model)
        if as_loaded and NVFP4 not in encodings:
            return config.original()
        found = " and ".join(sorted(e.name for e in encodings)) or "no encoded weights"
        raise UnsupportedError(
            f"{found} of a {config.method} directory to save",
            expected="NVFP4, or weights as they were loaded",
        )

    def is_serializable(self) -> bool:
        """True: save_pretrained writes ModelOpt's format."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True: encoded weights are frozen, but adapters beside them (`add_lora_`) and the rest of
        the model train.

        A Trainer asks this of its model: only then is its module certain to be imported.
        """
        for prepare in before_training:
            prepare()
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """Whether a Trainer accepts the model without PEFT around it."""
        return True

    @property
    def is_compileable(self) -> bool:
        """True: `generate` may compile the model."""
        return True


def _tensors(files: list[str] | None) -> Mapping[str, Entry]:
    """The tensors that transformers is going to read: of a state dict, or of files, whatever
    variant these are.
    """
    if (given := state_dict_entries.get()) is not None:
        return given
    if files is None:
        todo = "fusion_moe.transformers.from_pretrained takes config and state_dict"
        raise UnsupportedError(
            "encoded weights in a state dict",
            expected="a directory",
            todo=todo,
            where="from_pretrained",
        )
    return Directory.open(Path(files[0]).parent, [Path(file).name for file in files]).tensors


def _check_in_memory(model: Any, device_map: Any) -> None:
    """UnsupportedError for encoded weights that a device map leaves on disk or on the meta
    device.
    """
    # else the name of a way to make one
    devices = device_map if isinstance(device_map, Mapping) else {}
    for name, module in model.named_modules():
        if not isinstance(module, (PackedModule, StoredModule)):
            continue
        for place, _ in module.named_parameters(name, recurse=False):
            while place and place not in devices:
                place = place.rpartition(".")[0]
            if str(devices.get(place)) in ("disk", "meta"):
                raise UnsupportedError(
                    f"{name} on {devices[place]}",
                    expected="encoded weights in memory",
                    todo="name a device with room for it, or raise max_memory; modules that are "
                    "not quantized may be on disk",
                    where="device_map",
                )


def attach(model: Any) -> None:
    """Makes `save_pretrained` write a model that `quantize_` changed so that it can be loaded
    again.
    """
    if getattr(model, "hf_quantizer", None) is None:
        model.hf_quantizer = FusionMoeQuantizer(ModelOptConfig(), pre_quantized=True)
