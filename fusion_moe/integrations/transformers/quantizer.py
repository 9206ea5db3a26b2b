"""transformers' HfQuantizer for our modules: modules on the meta device, conversions of the files'
tensors, and steps after loading.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers.integrations.accelerate import get_device
from transformers.quantizers import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ...checkpoints import KNOWN, Directory, Entry, Read, packing_of
from ...encodings import NVFP4
from ...errors import UnsupportedError
from ...nn import Adapter, prepare_
from ...nn.frozen import PackedModule, own_parameters, place_
from .adapters import read_adapters_, state_to_save, write_adapters
from .completeness import check_complete
from .config import ModelOptConfig, check_experts_per_token, in_transformers_form, set_quantization
from .on_disk import is_brought, keep_buffers, put_on_disk
from .on_load import Contracts, QuantizeExperts, floats_of, layout_of, prepare_to_quantize
from .replacements import Replacements, replace_modules
from .saving import (
    conversions_for_saving,
    linears_as_stored,
    makes_experts,
    with_own_entries,
    written_config,
)
from .share import Share
from .tensors import load_, load_converted_

before_training: list[Callable[[], None]] = []  # done when a Trainer gets a model of ours


class Tensors(NamedTuple):
    """The tensors that transformers is going to read, by name, and the function that reads one.
    share: what of them a rank reads; None: all.
    """

    entries: Mapping[str, Entry]
    read: Read
    share: Share | None = None


# if a model is made of a state dict, its tensors
state_dict: ContextVar[Tensors | None] = ContextVar("fusion_moe_state_dict", default=None)


# what a call of `from_pretrained` has opened, by the path or by the files: headers are read once
opened_directories: ContextVar[dict[Path | frozenset[Path], Directory] | None] = ContextVar(
    "fusion_moe_opened_directories", default=None
)


def open_once(path: Path, files: Sequence[str] = ()) -> Directory:
    """`Directory.open`, or what this call of `from_pretrained` has opened already."""
    opened, key = opened_directories.get(), frozenset(path / file for file in files) or path
    if opened is None:
        return Directory.open(path, files)
    if key not in opened:
        directory = Directory.open(path, files)
        used = frozenset(entry.file for entry in directory.tensors.values())
        opened[key] = opened[used] = directory
    return opened[key]


class Unsent:
    """The names of a model's encoded tensors, also inside of a PeftModel, for DDP: each rank has
    read them from files, and need not get those of the first.
    """

    def __init__(self, model: Any):
        self.model = model

    def __iter__(self) -> Iterator[str]:
        for name, module in self.model.named_modules():
            for key in module._parts_by_name() if isinstance(module, PackedModule) else ():
                yield from (f"{outer}{name}.{key}" for outer in ("", "base_model.model."))


class FusionMoeQuantizer(HfQuantizer):
    """Loads directories with encoded experts and linear layers into modules of fusion_moe.nn."""

    replaced: Replacements | None = None
    _model: Any = None  # while it is loaded
    _path: Path | None = None  # what it is loaded from, unless each rank reads its share

    def __init__(self, quantization_config: Any, **kwargs: Any):
        if not isinstance(quantization_config, QuantizationConfigMixin):  # fusion_moe.NVFP4Config
            quantization_config = in_transformers_form(quantization_config)
        super().__init__(quantization_config, **kwargs)
        self._contracts: Contracts = {}
        self._theirs: list[Any] = []  # transformers' conversions
        self._ignored: Any = None  # transformers' patterns of names that are not needed
        self._dtypes: dict[str, torch.dtype] = {}
        self._on_disk: dict[str, Callable[[], None]] = {}  # what loads modules

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """UnsupportedError for encoded weights where none can be. Called again with the map that
        transformers made of "auto".
        """
        if self._model is not None:
            self._check_places(self._model, device_map)

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Any = None, **kwargs: Any
    ) -> None:
        """Replaces modules. CheckpointError for files without tensors that they need,
        UnsupportedError for a parallel plan, and for encoded weights where none can be.
        """
        if getattr(model.config, "distributed_config", None) is not None:
            # transformers divides modules after they were replaced, by plans for its own modules
            raise UnsupportedError(
                "a model that a parallel plan divides between devices",
                expected="all of it on one device",
                todo="fusion_moe.transformers.from_pretrained(directory, mesh=mesh) reads each "
                "rank's experts, without those plans",
            )
        check_experts_per_token(type(model), model.config)
        self._model, tensors = model, state_dict.get()
        share = tensors.share if tensors else None
        if not self.pre_quantized:
            self._contracts = prepare_to_quantize(model, self.quantization_config)
            self._check_places(model, kwargs.get("device_map"))
            if share is not None:
                share.take(model, {})
            return
        tensors = tensors or _tensors(checkpoint_files)
        self._path = Path(checkpoint_files[0]).parent if checkpoint_files else None
        self._dtypes = {
            name: p.dtype for name, p in model.named_parameters() if p.is_floating_point()
        }
        config = self.quantization_config
        self.replaced = replace_modules(
            model,
            tensors.entries,
            config.method,
            config.experts,
            config.quantizes,
            packing_of(vars(config)),
        )
        self.replaced.check_fixed(tensors.read)
        for name, source in (self.replaced.experts | self.replaced.linears).items():
            module = model.get_submodule(name)
            if isinstance(module, PackedModule) and not source.rounds:
                module.scales = config.scales_in_files
        self._check_places(model, kwargs.get("device_map"))
        self._ignored = model._keys_to_ignore_on_load_unexpected
        model._keys_to_ignore_on_load_unexpected = {
            *(self._ignored or ()),
            *(f"{re.escape(suffix)}$" for suffix in KNOWN),
        }
        if share is not None:
            share.take(model, self.replaced.experts | self.replaced.floats)
        self._load_later(model, self.replaced, tensors.read)

    def _load_later(self, model: Any, replaced: Replacements, read: Read) -> None:
        """Hides encoded parameters from transformers, which would read tensors of the same names,
        and loads them when it has placed all others, before accelerate moves any; those on disk
        after it has made what brings them.
        """
        place, hidden = model._move_missing_keys_from_meta_to_device, []
        sources = replaced.experts | replaced.floats | replaced.linears
        for name, source in sources.items():
            module = model.get_submodule(name)
            names = {*layout.names} if (layout := layout_of(module)) else {"weight"}
            if isinstance(module, PackedModule):
                names = {row.parameter for row in source.rows(module)}
                names.update(key for keys in module.part_names.values() for key in keys)
            hidden.append(module.register_state_dict_post_hook(partial(_hide, names)))
            # the numbers of layers and experts are left open: one pattern for all of them
            pattern = re.sub(r"\d+", r"\\d+", re.escape(name))
            model._keys_to_ignore_on_load_unexpected.add(rf"^{pattern}\.")

        for parameter in {*replaced.converted.values()}:
            owner, _, key = parameter.rpartition(".")
            hook = model.get_submodule(owner).register_state_dict_post_hook(partial(_hide, {key}))
            hidden.append(hook)
            model._keys_to_ignore_on_load_unexpected.add(rf"^{re.escape(owner)}\.")

        def read_live(name: str) -> torch.Tensor:
            return read(replaced.in_files[name])

        def place_all(missing: Any, device_map: Any, *args: Any) -> None:
            del model._move_missing_keys_from_meta_to_device
            place(missing, device_map, *args)
            for hook in hidden:
                hook.remove()
            for name, source in sources.items():
                module, device = model.get_submodule(name), get_device(device_map, f"{name}.weight")
                load = partial(load_, module, source, replaced.weights, read_live)
                if device == "disk":
                    keep_buffers(module)
                    self._on_disk[name] = partial(load, "cpu")
                else:
                    load(device)
            if replaced.converted:
                weights = [replaced.weights[name] for name in replaced.converted]
                load_converted_(model, weights, self._theirs, read_live, device_map)

        model._move_missing_keys_from_meta_to_device = place_all

    def update_weight_conversions(
        self, weight_conversions: list[Any], model: Any = None
    ) -> list[Any]:
        """transformers' conversions, which read what is not encoded. CheckpointError as from
        `check_complete`.
        """
        if self.replaced is not None:
            self._theirs = weight_conversions
            check_complete(self.replaced, self._model, weight_conversions, self._ignored)
        return weight_conversions

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Whether a parameter is quantized after its float tensor was read."""
        base, _, key = param_name.rpartition(".")
        return base in self._contracts and key in floats_of(self._contracts[base])

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
                c for c in self._theirs if c.was_used() or makes_experts(c, model)
            ]
        for name, load in self._on_disk.items():
            load()
            put_on_disk(model.get_submodule(name), name)
        for name, module in model.named_modules():
            if isinstance(module, PackedModule):
                module.brought = is_brought(module)
                # transformers makes every float require a gradient
                for p in own_parameters(module):
                    p.requires_grad_(False)
                place_(module)
            else:  # before 5.21, transformers does not cast if anything is quantized
                for key, p in module.named_parameters(name, recurse=False):
                    p.data = p.data.to(self._dtypes.get(key, p.dtype))
        model._ddp_params_and_buffers_to_ignore = Unsent(model)
        asked: Any = getattr(self.quantization_config, "experts", self.quantization_config)
        if asked.weights != "packed":
            prepare_(model, weights=asked.weights)
        elif any(p.is_cuda for p in model.parameters()):
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
        set_quantization(model.config, with_own_entries(self._saved_config(model), model))
        write_adapters(model)
        names = (name for name, module in model.named_modules() if isinstance(module, Adapter))
        adapters, given = tuple(f"{name}." for name in names), state_to_save.get()
        state = None if given is None else dict(given)
        if adapters:
            whole = model.state_dict() if state is None else state
            state = {key: t for key, t in whole.items() if not key.startswith(adapters)}
        linears = {} if self.replaced is None else self.replaced.linears
        return linears_as_stored(model, linears, state), {}

    def _saved_config(self, model: Any) -> Any:
        """The loaded configuration, unless the weights are stored differently now. UnsupportedError
        if no configuration describes them.
        """
        replaced, config = self.replaced, self.quantization_config
        modules = dict(model.named_modules())
        as_loaded = (
            replaced is not None
            and not any(source.rounds for source in replaced.experts.values())
            and all(isinstance(modules.get(name), PackedModule) for name in replaced.linears)
        )
        if as_loaded and config.method == "modelopt":
            return config.original()
        encodings = {m.encoding for m in model.modules() if isinstance(m, PackedModule)}
        if as_loaded and NVFP4 not in encodings:
            return config.original()
        if len(encodings) == 1:
            return written_config(model, *encodings)
        actual = " and ".join(sorted(e.name for e in encodings)) or "no encoded weights"
        raise UnsupportedError(
            f"{actual} of a {config.method} directory to save",
            expected="NVFP4, or weights as they were loaded",
        )

    def _check_places(self, model: Any, device_map: Any) -> None:
        """UnsupportedError for encoded weights that a device map leaves on the meta device, and for
        those on disk that are encoded or requantized only now.
        """
        # else the name of a way to make one
        devices = device_map if isinstance(device_map, Mapping) else {}
        config: Any = self.quantization_config
        asked = getattr(config, "experts", config)
        refused = {"meta": "encoded weights in memory, or on disk"}
        if not self.pre_quantized or config.quantizes or asked.weights != "packed":
            refused["disk"] = "encoded weights in memory, where they are made while a model loads"
        for name, module in model.named_modules():
            if not isinstance(module, PackedModule):
                continue
            for place, _ in module.named_parameters(name, recurse=False):
                while place and place not in devices:
                    place = place.rpartition(".")[0]
                if expected := refused.get(str(devices.get(place))):
                    raise UnsupportedError(
                        f"{name} on {devices[place]}",
                        expected=expected,
                        todo="name a device with room for it, raise max_memory, or quantize the "
                        "directory before",
                        where="device_map",
                    )

    def is_serializable(self) -> bool:
        """True: save_pretrained writes a format that loads again."""
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

    is_qat_trainable = True  # a Trainer accepts the model without PEFT around it
    is_compileable = True  # `generate` may compile the model


def _hide(names: set[str], module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name in names:
        state.pop(prefix + name, None)


def _tensors(files: list[str] | None) -> Tensors:
    """Those of files, whatever variant these are."""
    if files is None:
        raise UnsupportedError(
            "encoded weights in a state dict",
            expected="a directory",
            todo="fusion_moe.transformers.from_pretrained takes config and state_dict",
            where="from_pretrained",
        )
    directory = open_once(Path(files[0]).parent, [Path(file).name for file in files])
    return Tensors(directory.tensors, directory.read)


def attach(model: Any) -> None:
    """Makes `save_pretrained` write a model that `quantize_` changed so that it can be loaded
    again.
    """
    if getattr(model, "hf_quantizer", None) is None:
        model.hf_quantizer = FusionMoeQuantizer(ModelOptConfig(), pre_quantized=True)
