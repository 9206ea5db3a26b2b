"""from_pretrained for directories whose `quant_method` is one of transformers' own, which
transformers would load in its own way.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import cached_file

from ...checkpoints import Directory, Entry, Source, layers_of_experts, method_of, read_json, shown
from ...checkpoints.directory import (
    INDEX,
    OLDER_CONFIG,
    architectures_of,
    as_matrices,
    older_quantization,
    quantization_of,
    read_index,
)
from ...checkpoints.gguf_models import FAMILIES
from ...errors import CheckpointError, Error, OptionError, UnsupportedError, in_one_line
from ...messages import CONFIG, GGUF, log, some
from ...nn.config import config_of
from ...options import during
from .adapters import read_adapters_
from .completeness import new_heads
from .config import IN_4BIT, check_experts_per_token, experts_config, set_quantization
from .names import key_mapping
from .quantizer import Tensors, open_once, opened_directories, state_dict
from .share import Share

if TYPE_CHECKING:
    from ..distributed.parallelize import Division

# arguments that say where files are
_OF_HUB = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
)
_OF_CODE = ("trust_remote_code", "code_revision")
_SAME_AS = {"kimi_k2": "deepseek_v3"}  # model types of config.json whose model is another one's
# entries of configurations that a model's own from_pretrained sets, in all parts of the
# configuration
_OF_MODEL = (
    "dtype",
    "torch_dtype",
    "quantization_config",
    "attn_implementation",
    "experts_implementation",
)


def from_pretrained(
    directory: str | Path | None,
    *,
    auto_class: Any = None,
    mesh: Any = None,
    plan: str = "ep",
    tokens: str = "replicated",
    dispatch: str = "all_gather",
    capacity: int | float = 1.0,
    experts_device: str | None = None,
    kv_tokens: int | None = None,
    **kwargs: Any,
) -> Any:
    """`auto_class.from_pretrained(directory, **kwargs)`, with encoded weights in modules of
    fusion_moe.nn, whoever quantized them. Adapters in a local directory's folder `adapters` are
    loaded too.

    directory: a local one, a file of GGUF, or a name that transformers knows; None with the
    arguments config and state_dict, tensors as in files. auto_class: None for the class that
    config.json names, such as one with a vision tower, or AutoModelForCausalLM if transformers has
    no such class. kwargs may change entries of the configuration, unless config is given, which
    stays as it is.
    quantization_config="nvfp4", or NVFP4Config(): rounds experts in floats, also of 8 bits, to
    NVFP4; with weights="fp8" those in 8-bit floats stay, all others in few bits are read as FP8.
    transformers' FineGrainedFP8Config() asks for that and activation_format="fp8": what a directory
    itself says about activations never does.
    UnsupportedError for a `quant_method` that is not supported here, and for a device_map with
    encoded weights on the meta device, or on disk while they are rounded or requantized (those that
    a directory has encoded may be there, with offload_folder); CheckpointError for weights that are
    missing, left over or of another dtype or size. For encoded weights both are raised before any
    weight is read. In a directory in floats, transformers finds missing weights while it loads;
    output_loading_info=True returns (model, info) nevertheless. A new head, such as a classifier's,
    may be missing: transformers warns.

    mesh, plan, tokens, dispatch, capacity: as for `distributed.parallelize_`; the result is the
    same as calling that afterwards, but each rank reads only the experts that it keeps. The
    directory must then be a local one. The plans "tp" and "ep_tp" divide features, and do so only
    for experts encoded in 4 bits.

    max_memory of one GPU, and perhaps the CPU, with device_map="auto" or experts_device: experts
    that do not fit on the GPU are offloaded. experts_device, kv_tokens: as for `offload.offload_`.
    """
    if isinstance(name := kwargs.get("quantization_config"), str):
        kwargs["quantization_config"] = config_of(name, "from_pretrained")
    with (
        during(opened_directories, opened_directories.get() or {}),
        during(key_mapping, kwargs.get("key_mapping")),
    ):
        return _loaded(
            directory,
            auto_class,
            (mesh, plan, tokens, dispatch, capacity),
            experts_device,
            kv_tokens,
            kwargs,
        )


def _loaded(
    directory: str | Path | None,
    auto_class: Any,
    divided: tuple[Any, str, str, str, int | float],
    experts_device: str | None,
    kv_tokens: int | None,
    kwargs: dict[str, Any],
) -> Any:
    """`from_pretrained`, whose headers are read once."""
    mesh = divided[0]
    offloads = experts_device is not None or kv_tokens is not None
    if offloads or _may_offload(directory, mesh, kwargs):
        from ...offload.loading import offloaded  # a large import, which others need not wait for

        load = partial(from_pretrained, directory, auto_class=auto_class)
        encoded = directory is not None and not kwargs.get("quantization_config")
        planned = _files(directory, kwargs) if directory is not None and encoded else None
        placed = offloaded(load, planned, mesh, experts_device, kv_tokens, kwargs)
        if placed is not None:
            return placed
    wanted = kwargs.pop("output_loading_info", False)
    sizes_differ = kwargs.pop("ignore_mismatched_sizes", False)
    if directory is None and (
        mesh is not None or kwargs.get("config") is None or kwargs.get("state_dict") is None
    ):
        raise OptionError(
            "no directory",
            expected="config and state_dict instead, without mesh",
            where="from_pretrained",
        )
    where, opened = str(directory), None
    if directory is not None and Path(directory).suffix == GGUF:
        opened = _gguf(directory)
        if mesh is None:  # its tensors are read as those of a state dict
            kwargs["state_dict"] = {name: opened.slice(name) for name in opened.tensors}
            directory = None
    elif directory is not None:
        _check_json(directory, kwargs)
    arguments, written = kwargs, opened.config if opened else None
    config, kwargs = _configuration(directory, kwargs, written)
    if directory is not None and not opened:
        _check_tensors(directory, arguments)
    auto_class = auto_class or _class_named(config, where, kwargs)
    check_experts_per_token(auto_class, config)
    if quantization := quantization_of(config.to_dict()) or (
        _beside(directory, _some_of(kwargs, _OF_HUB)) if directory and not opened else {}
    ):
        quantization = {
            **quantization,
            "source": method_of(quantization, where),
            "quant_method": "fusion_moe",
        }
        quantization.pop(IN_4BIT, None)  # before which transformers sees no quant_method
        if asked := experts_config(kwargs.get("quantization_config")):
            quantization["experts_config"] = asked
            del kwargs["quantization_config"]
        set_quantization(config, quantization)
    kwargs["ignore_mismatched_sizes"] = True  # whose error does not name them
    with _explained(where, auto_class, config):
        if directory is None or kwargs.get("state_dict") is not None:
            argument, file = kwargs["state_dict"], Path(where if opened else "state_dict")
            entries = {
                name: Entry(name, t.dtype, (*t.shape,), file) for name, t in argument.items()
            }
            entries, result = as_matrices(
                entries, lambda name: argument[name][...], config.to_dict()
            )
            tensors = Tensors(
                entries, lambda name: result[name]() if name in result else argument[name][...]
            )
            model, info = _in_place_of_files(tensors, auto_class, config, kwargs, directory)
        elif mesh is None:
            model, info = auto_class.from_pretrained(
                directory, config=config, output_loading_info=True, **kwargs
            )
        else:
            # imported here: torch may have been built without torch.distributed
            from ..distributed.parallelize import Division

            division = Division(*divided)
            model, info = _shared(
                opened or _opened(where, kwargs), division, auto_class, config, kwargs
            )
    if not sizes_differ:
        _check_sizes(info["mismatched_keys"], where)
    if wanted:
        return model, info
    if missing := sorted(set(info["missing_keys"]) - new_heads(model)):
        raise CheckpointError(
            f"nothing for {some(missing)}",
            expected="a tensor for each parameter",
            todo="output_loading_info=True returns the model with random numbers there, and their "
            "names",
            where=where,
        )
    return model


@contextlib.contextmanager
def _explained(where: str, auto_class: Any, config: Any) -> Iterator[None]:
    """CheckpointError in place of what transformers raises for a configuration that it makes no
    model of, and for experts that it cannot stack.
    """
    try:
        yield
    except Error:
        raise
    except Exception:
        if not hasattr(config, "auto_map"):  # of a class in the repository
            with _readable(f"{where}: {CONFIG}"), torch.device("meta"):
                make = getattr(auto_class, "from_config", None) or auto_class._from_config
                make(copy.deepcopy(config))
        if Path(where, CONFIG).exists():
            _check_same_sizes(Source.of(open_once(Path(where))))
        raise


@contextlib.contextmanager
def _readable(where: str, kind: type[Error] = CheckpointError) -> Iterator[None]:
    """An error of ours in place of what transformers raises for entries of a configuration."""
    try:
        yield
    except (Error, OSError, ImportError):
        raise
    except Exception as error:  # of a wrong one transformers and torch raise any kind
        raise kind(
            f"{type(error).__name__}: {in_one_line(error)}",
            expected="a configuration of which transformers makes a model",
            where=where,
        ) from error


def _check_sizes(differ: Any, where: str) -> None:
    """CheckpointError for tensors of other sizes than their parameters."""
    for name, size, expected in sorted(differ):
        raise CheckpointError(
            f"{name} {[*size]}{f', and {len(differ) - 1} more' if len(differ) > 1 else ''}",
            expected=f"{[*expected]}, by config.json",
            where=where,
        )


def _check_same_sizes(source: Source) -> None:
    """CheckpointError for a matrix of experts of another size than its neighbours'."""
    layers = layers_of_experts([*source.weights, *source.plain])
    for names in (names for layer in layers.values() for names in layer.projections.values()):
        entries = [source.plain[name] for name in names if name in source.plain]
        for entry in entries:
            if entry.shape != entries[0].shape:
                raise CheckpointError(
                    f"{entry}",
                    expected=f"{[*entries[0].shape]}, as {entries[0].name}",
                    where=str(entry.file),
                )


def placed(device: str) -> dict[str, Any]:
    """What `from_pretrained` is told so that a model is on a device: on the CPU nothing, since
    transformers takes device_map only where accelerate is installed.
    """
    return {} if device == "cpu" else {"device_map": device}


def _gguf(file: str | Path) -> Directory:
    """UnsupportedError for an architecture without a configuration."""
    opened = Directory.open(file)
    if not opened.config["architectures"]:
        raise UnsupportedError(
            f"architecture {shown(opened.config['model_type'])}",
            expected=f"one of {', '.join(FAMILIES)}, with experts",
            todo="fusion-moe convert and quantize write its experts",
            where=str(file),
        )
    return opened


def _may_offload(directory: str | Path | None, mesh: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether max_memory names a GPU, for modules that are placed by it, and experts are in few
    bits. If not, the log says why accelerate places them.
    """
    memory = kwargs.get("max_memory")
    if kwargs.get("device_map") != "auto" or not isinstance(memory, Mapping) or mesh is not None:
        return False
    if [isinstance(key, int) for key in memory if key != "cpu"] != [True]:
        why = "max_memory is not of one GPU"
    elif directory is None or (files := _files(directory, kwargs)) is None:
        why = "neither a directory nor a name on the Hub of safetensors without variant"
    elif not (kwargs.get("quantization_config") or files.quantization):
        why = "experts are in floats"
    else:
        return True
    log.info("%s: accelerate places whole modules, no experts: %s", directory, why)
    return False


def _files(directory: str | Path, kwargs: Mapping[str, Any]) -> Directory | None:
    """A local directory, or that of a name on the Hub in its cache, where what is missing is
    downloaded; None for others.
    """
    if _is_local(directory):
        return None if Path(directory).is_file() else _opened(directory, kwargs)
    if kwargs.get("variant") is not None:  # whose files have other names
        return None
    found = {name: value for name, value in _some_of(kwargs, _OF_HUB).items() if value is not None}
    found.pop("force_download", None)  # which loading does

    def cached(name: str) -> str | None:
        return cached_file(directory, name, _raise_exceptions_for_missing_entries=False, **found)

    index = cached(INDEX)
    names = read_index(Path(index))["weight_map"].values() if index else ["model.safetensors"]
    files = [cached(name) for name in (OLDER_CONFIG, CONFIG, *sorted({*names}))]
    return open_once(Path(files[-1]).parent) if files[-1] else None


def _opened(directory: str | Path, kwargs: Mapping[str, Any]) -> Directory:
    """A local directory with the files that transformers reads, by its arguments."""
    path, variant = Path(directory, kwargs.get("subfolder") or ""), kwargs.get("variant")
    if variant is None:
        return open_once(path)
    files, index = [f"model.{variant}.safetensors"], f"{INDEX.removesuffix('json')}{variant}.json"
    if not (path / files[0]).exists() and (path / index).exists():
        files = sorted({*read_index(path / index)["weight_map"].values()})
    return open_once(path, files)


def _is_local(directory: str | Path) -> bool:
    """Whether it is no name on the Hub."""
    return Path(directory).exists() or str(directory).startswith(("/", "./", "../"))


def _check_json(directory: str | Path, kwargs: Mapping[str, Any]) -> None:
    """CheckpointError for a local directory without a configuration, and for files that
    transformers would read without end.
    """
    path = Path(directory, kwargs.get("subfolder") or "")
    for file in (path / CONFIG, path / "generation_config.json", path / INDEX):
        if os.path.lexists(file):
            read_json(file)
        elif _is_local(directory) and file.name == CONFIG and kwargs.get("config") is None:
            Directory.open(path)  # says what is there instead


def _check_tensors(directory: str | Path, kwargs: Mapping[str, Any]) -> None:
    """Raises what `fusion-moe inspect` reports of a local directory. Weights in floats that only
    transformers reads are left to it.
    """
    path = Path(directory, kwargs.get("subfolder") or "")
    others = ("config", "state_dict", "variant", "gguf_file")
    if not (path / CONFIG).exists() or any(kwargs.get(other) is not None for other in others):
        return
    try:
        Source.of(open_once(path))
    except UnsupportedError:
        if quantization_of(read_json(path / CONFIG)):
            raise


def _class_named(config: Any, directory: str | Path | None, kwargs: dict[str, Any]) -> Any:
    """The class of transformers that a configuration names, if it is for such configurations;
    AutoModelForCausalLM for any other.
    """
    names = architectures_of(vars(config), f"{directory}: {CONFIG}")
    if kwargs.get("trust_remote_code") and hasattr(config, "auto_map"):
        return AutoModelForCausalLM
    results: list[Any] = [getattr(transformers, name, None) for name in names]
    models: list[Any] = [
        kind for kind in results if isinstance(kind, type) and issubclass(kind, PreTrainedModel)
    ]
    return next(
        (kind for kind in models if isinstance(config, kind.config_class or ())),
        AutoModelForCausalLM,
    )


def on_meta(config: Any, where: str = "") -> Any:
    """A model of a configuration without weights, of the class that `from_pretrained` takes. The
    configuration becomes the model's own.
    """
    kind = _class_named(config, where, {})
    of_model = issubclass(kind, PreTrainedModel)
    with _readable(f"{where}: {CONFIG}", UnsupportedError), torch.device("meta"):
        return kind._from_config(config) if of_model else kind.from_config(config)


def _configuration(
    directory: str | Path | None, kwargs: dict[str, Any], written: Mapping[str, Any] | None = None
) -> tuple[Any, dict[str, Any]]:
    """The configuration, and the arguments that do not change entries of it, as transformers' auto
    classes divide them. written: config.json, if there is no such file.
    """
    kwargs = dict(kwargs)
    config = kwargs.pop("config", None)
    if isinstance(config, PreTrainedConfig):
        return copy.deepcopy(config), kwargs
    kept = _some_of(kwargs, (*_OF_HUB, *_OF_CODE, *_OF_MODEL))
    entries = {key: value for key, value in kwargs.items() if key not in _OF_MODEL}
    if written is not None:
        config, unused = _from_dict(written, return_unused_kwargs=True, **entries)
    else:
        config, unused = configuration(
            directory if config is None else config, return_unused_kwargs=True, **entries
        )
    return config, unused | kept


def configuration(directory: str | Path | None, **kwargs: Any) -> Any:
    """`AutoConfig.from_pretrained`, also for model types that transformers knows under another
    name, and for files of GGUF.
    """
    if directory is not None and Path(directory).suffix == GGUF:
        return _from_dict(_gguf(directory).config, **kwargs)
    where = f"{directory}: {CONFIG}"
    with _readable(where):  # what is nested deeply, for one
        config_dict, _ = PreTrainedConfig.get_config_dict(directory, **_some_of(kwargs, _OF_HUB))
    model_type = config_dict.get("model_type", "")
    if not isinstance(model_type, str):
        raise CheckpointError(
            f"model_type {shown(model_type)}",
            expected="the name of a family of models",
            where=str(directory),
        )
    family = _SAME_AS.get(model_type)
    known, own_code = {model_type, family} & {*CONFIG_MAPPING}, "auto_map" in config_dict
    if own_code and not known and not kwargs.get("trust_remote_code"):
        raise UnsupportedError(  # transformers would ask whoever sits there
            f"model_type {shown(model_type)}, whose code comes with the checkpoint",
            expected=f"a family of transformers {transformers.__version__}",
            todo="trust_remote_code=True runs that code: read it before",
            where=where,
        )
    if model_type and not known and not own_code:
        raise UnsupportedError(
            f"model_type {shown(model_type)}",
            expected=f"a family of transformers {transformers.__version__}",
            todo="a newer transformers may have it; quantize and convert need none",
            where=where,
        )
    if family is None or kwargs.get("trust_remote_code"):
        with _readable(where):
            return AutoConfig.from_pretrained(directory, **kwargs)
    entries = {key: value for key, value in kwargs.items() if key not in (*_OF_HUB, *_OF_CODE)}
    config_dict.pop("auto_map", None)  # the repository's own code
    return _from_dict(config_dict, **entries)


def is_known(model_type: Any) -> bool:
    """Whether transformers has a configuration of this type."""
    return isinstance(model_type, str) and _SAME_AS.get(model_type, model_type) in CONFIG_MAPPING


def _from_dict(written: Mapping[str, Any], **kwargs: Any) -> Any:
    """The configuration of a config.json, of a model type that transformers knows."""
    model_type = _SAME_AS.get(written["model_type"], written["model_type"])
    return CONFIG_MAPPING[model_type].from_dict(
        dict(written) | {"model_type": model_type}, **kwargs
    )


def _in_place_of_files(
    tensors: Tensors,
    auto_class: Any,
    config: Any,
    kwargs: dict[str, Any],
    directory: str | Path | None = None,
) -> tuple[Any, Any]:
    """A model of a state dict, with transformers' report about loading it."""
    model_class, config = _class_and_config(auto_class, config)
    with during(state_dict, tensors):
        return model_class.from_pretrained(
            directory, config=config, output_loading_info=True, **kwargs
        )


def _some_of(kwargs: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: kwargs[name] for name in names if name in kwargs}


def _shared(
    directory: Directory, division: Division, auto_class: Any, config: Any, kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """A rank's share of a model, with transformers' report about loading it."""
    quantization = getattr(config, "quantization_config", None)
    in_floats = not (quantization or "quantization_config" in kwargs)
    if in_floats:  # our quantizer makes the modules smaller
        config.quantization_config = quantization = {"quant_method": "fusion_moe", "source": ""}
    share = Share(directory, division)
    tensors = Tensors(directory.tensors, directory.read, share)
    result, info = _in_place_of_files(tensors, auto_class, config, kwargs | {"state_dict": share})
    if in_floats:
        result.hf_quantizer.remove_quantization_config(result)
    share.join(result)
    read_adapters_(result, directory.path)
    result.name_or_path = result.config.name_or_path = str(directory.path)
    if result.can_generate():
        with contextlib.suppress(OSError):  # without the file, it is made from the configuration
            result.generation_config = GenerationConfig.from_pretrained(directory.path)
    return result, info


def _class_and_config(auto_class: Any, config: Any) -> tuple[Any, Any]:
    """The class of a model, which unlike auto classes takes a state dict without a name, and the
    configuration that it takes.
    """
    model_class = auto_class
    if not issubclass(auto_class, PreTrainedModel):
        with torch.device("meta"):
            model_class = type(auto_class.from_config(copy.deepcopy(config)))
    if not isinstance(config, model_class.config_class):
        quantization, config = (
            getattr(config, "quantization_config", None),
            config.get_text_config(),
        )
        config.quantization_config = quantization  # as transformers' auto classes do it
    return model_class, config


def _beside(directory: str | Path, hub: dict[str, Any]) -> dict[str, Any]:
    """The configuration in a file beside config.json, as older exports of ModelOpt have it; {}
    without one. hub: arguments for the Hub.
    """
    file = cached_file(directory, OLDER_CONFIG, _raise_exceptions_for_missing_entries=False, **hub)
    return dict(older_quantization(Path(file))) if file else {}
