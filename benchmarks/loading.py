"""How long a checkpoint of many tensors takes to load, and how much memory a large one takes
meanwhile.

    python benchmarks/loading.py              # 92,160 tiny tensors; 1.1 GB in shards. Both on the
                                              CPU

Directories are Qwen3-MoE's in ModelOpt's NVFP4 with random bytes, made in a temporary folder; each
is loaded in a process of its own. Memory is what the process has of its own (RssAnon), looked at
every 5 ms; pages of files that are mapped are the system's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MANY = {"hidden_size": 64, "moe_intermediate_size": 16, "num_hidden_layers": 60, "num_experts": 128}
LARGE = {
    "hidden_size": 1024,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 20,
    "num_experts": 64,
}
SHARDS = 6


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--load",
        type=Path,
        help="load this directory in this process and print what it took, as JSON",
    )
    given = parser.parse_args()
    if given.load:
        print(json.dumps(load(given.load)))
        return
    for name, sizes in (("many", MANY), ("large", LARGE)):
        with tempfile.TemporaryDirectory() as directory:
            tensors = make(Path(directory), sizes)
            found = json.loads(
                subprocess.run(
                    [sys.executable, __file__, "--load", directory],
                    check=True,
                    stdout=subprocess.PIPE,
                ).stdout
            )
        wanted = found["model_mb"] * (1 + 1 / sizes["num_hidden_layers"])
        print(
            f"{name}: {tensors:,} tensors, {found['seconds']:.1f} s, of all CPUs "
            f"{found['cpu_seconds']:.1f} s; memory at the peak "
            f"{found['peak_mb']:,.0f} MB, model and one layer {wanted:,.0f} MB, "
            f"{found['peak_mb'] - wanted:,.0f} MB more"
        )


def make(directory: Path, sizes: dict[str, int]) -> int:
    """Writes a directory in shards; how many tensors it has."""
    from safetensors.torch import save_file
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        **sizes,
        vocab_size=256,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_experts_per_tok=2,
        architectures=["Qwen3MoeForCausalLM"],
        dtype="bfloat16",
        tie_word_embeddings=False,
    )
    config.quantization_config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    config.save_pretrained(directory)
    weight_map: dict[str, str] = {}
    layers = sizes["num_hidden_layers"]
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        held = dict(t for i in range(shard, layers, SHARDS) for t in _layer(i, config))
        held |= dict(_outside(config)) if shard == 0 else {}
        save_file(held, directory / file, {"format": "pt"})
        weight_map |= dict.fromkeys(held, file)
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return len(weight_map)


def _layer(i: int, config: Any) -> Iterator[tuple[str, Tensor]]:
    layer, hidden, inner = f"model.layers.{i}", config.hidden_size, config.moe_intermediate_size
    for expert in range(config.num_experts):
        for name, n, k in (
            ("gate_proj", inner, hidden),
            ("up_proj", inner, hidden),
            ("down_proj", hidden, inner),
        ):
            weight = f"{layer}.mlp.experts.{expert}.{name}"
            yield f"{weight}.weight", torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
            yield f"{weight}.weight_scale", torch.full((n, k // 16), 1.0).to(torch.float8_e4m3fn)
            yield f"{weight}.weight_scale_2", torch.tensor(0.01)
            yield f"{weight}.input_scale", torch.tensor(0.01)
    sizes = {
        "q_proj": (64, hidden),
        "k_proj": (32, hidden),
        "v_proj": (32, hidden),
        "o_proj": (hidden, 64),
    }
    yield from (
        (f"{layer}.self_attn.{name}.weight", torch.zeros(shape).bfloat16())
        for name, shape in sizes.items()
    )
    yield from (
        (f"{layer}.self_attn.{name}.weight", torch.ones(32).bfloat16())
        for name in ("q_norm", "k_norm")
    )
    yield from (
        (f"{layer}.{name}.weight", torch.ones(hidden).bfloat16())
        for name in ("input_layernorm", "post_attention_layernorm")
    )
    yield f"{layer}.mlp.gate.weight", torch.zeros(config.num_experts, hidden).bfloat16()


def _outside(config: Any) -> Iterator[tuple[str, Tensor]]:
    for name in ("model.embed_tokens", "lm_head"):
        yield f"{name}.weight", torch.zeros(config.vocab_size, config.hidden_size).bfloat16()
    yield "model.norm.weight", torch.ones(config.hidden_size).bfloat16()


def load(directory: Path) -> dict[str, float]:
    """Seconds, the bytes of the model and of what the process had more than before, in MB."""
    from transformers import AutoModelForCausalLM

    import fusion_moe.transformers

    assert fusion_moe.transformers
    AutoModelForCausalLM  # noqa: B018  (imports the class before time is taken)
    before, peak, done = own_memory(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            peak[0] = max(peak[0], own_memory())

    watching = threading.Thread(target=watch)
    watching.start()
    start, cpu = time.perf_counter(), time.process_time()
    model = AutoModelForCausalLM.from_pretrained(directory)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    done.set()
    watching.join()
    size = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    return {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "model_mb": size / 1e6,
        "peak_mb": (peak[0] - before) / 1e6,
    }


def own_memory() -> int:
    """Bytes of this process that are no file's."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(
        next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon"))
    )


if __name__ == "__main__":
    main()
