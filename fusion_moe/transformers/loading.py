"""from_pretrained for directories whose `quant_method` is transformers' own, which would load them its way."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

from ..checkpoints import Directory, method_of
from ..errors import CheckpointError
from ..nn.config import NVFP4Config
from .sources import some


def from_pretrained(directory: str | Path, *, auto_class: Any = AutoModelForCausalLM, **kwargs: Any) -> Any:
    """`auto_class.from_pretrained(directory, **kwargs)`, with encoded weights in modules of fusion_moe.nn whoever quantized them.

    directory: a local one, or a name that transformers knows. quantization_config=NVFP4Config(): experts in floats, of 8 bits too, are
    rounded to NVFP4. UnsupportedError for a `quant_method` that is not read here; of the weights,
    CheckpointError for what is missing, left over or of another dtype or size, of encoded ones before any is read. Of a directory in
    floats transformers finds what is missing while it loads; output_loading_info=True returns (model, info) even so.
    """
    config = kwargs.pop("config", None) or AutoConfig.from_pretrained(directory)
    found = getattr(config, "quantization_config", None) or _beside(Path(directory))
    if found:
        found = found if isinstance(found, dict) else found.to_dict()
        config.quantization_config = {**found, "source": method_of(found, str(directory)), "quant_method": "fusion_moe"}
        if isinstance(kwargs.get("quantization_config"), NVFP4Config):
            config.quantization_config["experts_config"] = dataclasses.asdict(kwargs.pop("quantization_config"))
    wanted = kwargs.pop("output_loading_info", False)
    model, info = auto_class.from_pretrained(directory, config=config, output_loading_info=True, **kwargs)
    if wanted:
        return model, info
    if missing := sorted(info["missing_keys"]):
        todo = "output_loading_info=True returns the model with random numbers there, and their names"
        raise CheckpointError(f"nothing for {some(missing)}", expected="a tensor for each parameter", todo=todo, where=str(directory))
    return model


def _beside(directory: Path) -> dict[str, Any]:
    """What stands beside config.json: older exports of ModelOpt have a file of their own."""
    return dict(Directory.open(directory).quantization) if (directory / "hf_quant_config.json").exists() else {}
