"""A process of its own: SGLang's model of gpt-oss loads a directory, without an engine, whose
attention needs a GPU. Prints, as JSON, how far its blocks of experts are from transformers'.

Arguments: the directory; one of the same numbers in floats.
"""

from __future__ import annotations

import json
import sys

import torch
from sglang.benchmark import one_batch
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader import get_model
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import PortArgs, ServerArgs
from transformers import AutoModelForCausalLM


def load(directory: str) -> torch.nn.Module:
    """As a scheduler of SGLang does it."""
    load_plugins()
    arguments = ServerArgs(
        model_path=directory,
        device="cpu",
        attention_backend="triton",
        quantization="fusion_moe",
        skip_tokenizer_init=True,
        disable_cuda_graph=True,
    )
    arguments.resolve_once()
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
    one_batch._init_process_global_configs()
    config = ModelConfig.from_server_args(arguments)
    port = PortArgs.init_new(arguments).nccl_port
    one_batch.bootstrap.init_parallel_runtime(server_args=arguments, device="cpu", dist_port=port)
    one_batch.bootstrap.init_layer_runtime(model_config=config)
    return get_model(
        model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu")
    )


def main() -> None:
    served = load(sys.argv[1])
    judge = AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=torch.float32)
    errors = []
    for ours, theirs in zip(served.model.layers, judge.model.layers, strict=True):
        x = torch.randn(9, judge.config.hidden_size).bfloat16()
        with torch.inference_mode():
            found, (want, _) = ours.mlp(x).float(), theirs.mlp(x[None].float())
            errors.append(((found - want[0]).norm() / want.norm()).item())
    print("FOUND", json.dumps(errors), flush=True)


if __name__ == "__main__":
    main()
