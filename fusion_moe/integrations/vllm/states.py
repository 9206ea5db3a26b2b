"""What vLLM does with the tensors of modules, whose names and layout here are not those of what it
loads: it saves states and loads them, and moves parameters between the host and a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.model_loader import ShardedStateLoader
from vllm.platforms import current_platform

from ..serving import LEAVE, of_states, refuse, save_no_states_


def need_kept(layer: Any, names: Sequence[str]) -> None:
    """Makes vLLM refuse to save states. UnsupportedError if it would load one, move a layer's
    parameters of these names, or write into them, by its configuration.
    """
    if (config := get_current_vllm_config_or_none()) is None:
        return
    save_no_states_("vLLM", ShardedStateLoader)
    option, transfer = _moves(config.offload_config, layer, names), config.weight_transfer_config
    refuse(
        "vLLM",
        (
            of_states(str(config.load_config.load_format)),
            (
                transfer is not None and transfer.backend == "sparse_nccl",
                "--weight-transfer-config with sparse_nccl, which writes into weights as files "
                "have them",
                "a backend that loads",
                '{"backend": "nccl"}',
            ),
            (
                bool(option),
                f"{option}, which moves experts to the host",
                "experts that stay on the GPU",
                "name other parameters, such as self_attn, in --cpu-offload-params or "
                f"--offload-params, or {LEAVE}",
            ),
        ),
    )


def _moves(offload: Any, layer: Any, names: Sequence[str]) -> str:
    """The option of vLLM that would move parameters of a layer; "" if none does, as on CPUs."""
    if current_platform.is_cpu():
        return ""
    uva, prefetch = offload.uva, offload.prefetch
    if prefetch.offload_group_size:
        option, chosen = "--offload-group-size", prefetch.offload_params
    elif uva.cpu_offload_gb:
        # without UVA vLLM takes the state dicts of whole layers
        option, apart = "--cpu-offload-gb", not envs.VLLM_WEIGHT_OFFLOADING_DISABLE_UVA
        chosen = uva.cpu_offload_params if apart else ()
    else:
        return ""
    owners = f".{layer.layer_name}", f".{layer.layer_name}.routed_experts"
    full = [f"{owner}.{name}." for owner in owners for name in names]
    moved = not chosen or any(f".{part}." in name for part in chosen for name in full)
    return option if moved else ""
