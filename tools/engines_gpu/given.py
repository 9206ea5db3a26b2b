"""A small checkpoint of any config.json, as of DeepSeek, GLM or MiniMax: its sizes, few layers,
random weights, experts in few bits.

    python tools/engines_gpu/given.py FOLDER CONFIG.json ... [--layers 4] [--to fp8]

transformers builds and saves the model, in bf16 on the GPU if there is one, and `quantize` writes
it again: DeepSeek-V3 with one layer of experts takes 26 GB of memory, and 32 GB of disk meanwhile.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import models
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from fusion_moe.checkpoints import quantize

_LAYERS = 2  # with experts
# of what the published files are, not of the model
_DROPPED = "quantization_config", "auto_map", "transformers_version"


def make(folder: Path, file: Path, layers: int | None = None, to: str = "nvfp4") -> Path:
    """Writes folder/NAME unless it is there, NAME being the file's or, of a config.json, that of
    its folder. layers: by default those without experts and two more. A layer for multi-token
    prediction in DeepSeek's form, which GLM has too, is drawn as well; others are left out.
    """
    made = folder / (file.parent.resolve().name if file.stem == "config" else file.stem)
    if (made / "config.json").exists():
        return made
    floats, entries = made.with_name(f"{made.name}-bf16"), shortened(file, layers)
    shutil.rmtree(floats, ignore_errors=True)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        config = AutoConfig.for_model(**entries)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(floats)
    if entries.get("num_nextn_predict_layers"):
        _draw_mtp(floats, entries)
    del model
    models.write_tokenizer(floats, entries["vocab_size"])
    quantize(floats, made, to=to, scales="max")
    shutil.rmtree(floats)
    return made


def shortened(file: Path, layers: int | None) -> dict[str, Any]:
    """A config.json's entries with fewer layers, in each list that has one entry a layer too: of a
    model that sees or hears, those of its text.
    """
    entries = json.loads(file.read_text())
    entries = {k: v for k, v in entries.get("text_config", entries).items() if k not in _DROPPED}
    all_of = entries["num_hidden_layers"]
    few = min(all_of, layers or entries.get("first_k_dense_replace", 0) + _LAYERS)
    entries |= {k: v[:few] for k, v in entries.items() if isinstance(v, list) and len(v) == all_of}
    mtp = {"num_nextn_predict_layers": 1} if entries.get("num_nextn_predict_layers") else {}
    return entries | {"num_hidden_layers": few} | mtp


def _draw_mtp(folder: Path, entries: dict[str, Any]) -> None:
    """Adds the last layer once more, as the layer for multi-token prediction, with what joins it to
    the model, in a file of its own; config.json says that there is one.
    """
    index, last, hidden = _index(folder), entries["num_hidden_layers"] - 1, entries["hidden_size"]
    old, new = f"model.layers.{last}.", f"model.layers.{last + 1}."
    held = {n: load_file(folder / file)[n] for n, file in index.items() if n.startswith(old)}
    tensors = {n.replace(old, new): t for n, t in held.items()}
    ones = torch.ones(hidden, dtype=torch.bfloat16)
    tensors |= {f"{new}{n}.weight": ones.clone() for n in ("enorm", "hnorm", "shared_head.norm")}
    tensors[f"{new}eh_proj.weight"] = (torch.randn(hidden, 2 * hidden) * 0.02).bfloat16()
    for name, of in ("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head"):
        tensors[f"{new}{name}.weight"] = load_file(folder / index[f"{of}.weight"])[f"{of}.weight"]
    save_file(tensors, folder / "mtp.safetensors", {"format": "pt"})
    index |= dict.fromkeys(tensors, "mtp.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))


def _index(folder: Path) -> dict[str, str]:
    """The file of each tensor."""
    if (file := folder / "model.safetensors.index.json").exists():
        return json.loads(file.read_text())["weight_map"]
    return dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("config", type=Path, nargs="+")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--to", choices=("nvfp4", "mxfp4", "int4", "fp8"), default="nvfp4")
    asked = parser.parse_args()
    for file in asked.config:
        print(make(asked.folder, file, asked.layers, asked.to), flush=True)


if __name__ == "__main__":
    main()
