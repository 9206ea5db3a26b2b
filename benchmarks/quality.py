"""What few bits cost: the perplexity of the small real model in each format, on two held-out texts
that it was not trained on.

    python benchmarks/quality.py [--write]        # needs transformers; nvidia-modelopt for its row.
                                                  # --write: results/quality.md
    python benchmarks/quality.py --fp8 [--write]  # what rows in FP8 cost, on all of the text.
                                                  # --write: results/quality_fp8.md

All rows are the same model, `examples/tiny_qwen3_moe`, in bf16 but for the weights that are
quantized: those of experts, unless a row says otherwise. Activations stay in bf16 but where int8 is
said, which rounds both operands of the experts' products (on CPUs), and where fp8 is said, which
rounds rows before each product (by the reference). A row is compared with another one, bf16 unless
it says otherwise, by the difference of both losses of each token; the interval holds 95 %, by the
standard error over windows of text. ModelOpt's row is a directory that nvidia-modelopt quantized
and exported, loaded with `from_pretrained`. Its exporter gives gate and up of an expert one scale,
the larger of the two, where `quantize_` keeps both; all other bytes are those of
scales="max", which all of --fp8 has.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.append(str(EXAMPLES))

from heldout import load_heldout  # noqa: E402
from results import table, write  # noqa: E402

import fusion_moe  # noqa: E402
import fusion_moe.transformers  # noqa: E402  (loads ModelOpt's directories)
from fusion_moe.integrations.transformers.evaluation import Evaluation, change, evaluate  # noqa: E402
from fusion_moe.nn import (  # noqa: E402
    FP8Config,
    INT4Config,
    MXFP4Config,
    NVFP4Config,
    QuantizationConfig,
)

MODEL = EXAMPLES / "tiny_qwen3_moe"
LAST = 9  # files of the second text, 124 kB


def plain(path: str | Path = MODEL) -> Any:
    """The model in bf16."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()


def quantized(config: str | QuantizationConfig, linear: bool = False) -> Any:
    """Quantized by quantize_."""
    model = plain()
    fusion_moe.quantize_(model, config, linear=linear)
    return model


def by_modelopt() -> Any:
    """Its experts quantized and exported by nvidia-modelopt, then loaded."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    config = copy.deepcopy(mtq.W4A16_NVFP4_CFG)
    config["quant_cfg"].append({"quantizer_name": "*self_attn*", "enable": False})
    with tempfile.TemporaryDirectory() as folder:
        made = mtq.quantize(
            plain(), config, lambda model: model(torch.zeros(1, 8, dtype=torch.long))
        )
        with torch.no_grad():
            export_hf_checkpoint(made, dtype=torch.bfloat16, export_dir=folder)
        return plain(folder)


def weights_bytes(model: nn.Module) -> int:
    """Bytes of all weights but the embedding, which is the head too."""
    return sum(t.nbytes for name, t in model.named_parameters() if "embed" not in name)


VARIANTS: dict[str, Callable[[], Any]] = {
    "bf16": plain,
    'NVFP4, `scales="max"`': lambda: quantized(NVFP4Config(scales="max")),
    'NVFP4, `scales="four_over_six"`': lambda: quantized(NVFP4Config(scales="four_over_six")),
    'NVFP4, `scales="mse"`, the default': lambda: quantized("nvfp4"),
    "NVFP4, int8 activations": lambda: quantized(NVFP4Config("int8")),
    "NVFP4, linear layers too": lambda: quantized("nvfp4", linear=True),
    "NVFP4, nvidia-modelopt's directory": by_modelopt,
    'MXFP4, `scales="max"`, the default': lambda: quantized("mxfp4"),
    'MXFP4, `scales="mse"`': lambda: quantized(MXFP4Config(scales="mse")),
    "MXFP4, int8 activations": lambda: quantized(MXFP4Config("int8")),
    'INT4, groups of 32, `scales="max"`': lambda: quantized(INT4Config(scales="max")),
    'INT4, groups of 32, `scales="mse"`, the default': lambda: quantized("int4"),
    "FP8, 128 x 128": lambda: quantized("fp8"),
    "FP8, 128 x 128, linear layers too": lambda: quantized("fp8", linear=True),
}


# name -> how it is made, and the row that it is compared with
IN_FP8: dict[str, tuple[Callable[[], Any], str]] = {
    "bf16": (plain, ""),
    "NVFP4": (lambda: quantized(NVFP4Config(scales="max")), "bf16"),
    "NVFP4 requantized to FP8": (lambda: quantized(NVFP4Config("bf16", "fp8", "max")), "NVFP4"),
    "NVFP4 requantized to FP8, fp8 activations": (
        lambda: quantized(NVFP4Config("fp8", "fp8", "max")),
        "NVFP4 requantized to FP8",
    ),
    "MXFP4, requantized to FP8 or not": (lambda: quantized(MXFP4Config(weights="fp8")), "bf16"),
    "MXFP4 requantized to FP8, fp8 activations": (
        lambda: quantized(MXFP4Config("fp8", "fp8")),
        "MXFP4, requantized to FP8 or not",
    ),
    "FP8, 128 x 128": (lambda: quantized("fp8"), "bf16"),
    "FP8, 128 x 128, fp8 activations": (lambda: quantized(FP8Config("fp8")), "FP8, 128 x 128"),
}


def in_pairs(texts: list[str]) -> str:
    """The table of `IN_FP8`: perplexity, and its change from that of another row."""
    tokenizer, rows = AutoTokenizer.from_pretrained(MODEL), list[tuple[object, ...]]()
    found: dict[str, Sequence[torch.Tensor]] = {}
    for name, (make, other) in IN_FP8.items():
        with fusion_moe.options.override(target="reference"):
            of_name = evaluate(make(), tokenizer, texts)
        found[name] = of_name.losses
        more = f"{_change(found[name], found[other])} than {other}" if other else ""
        rows.append((name, f"{of_name.perplexity:.4f}", more))
        print(*rows[-1], flush=True)
    return table(["experts", "perplexity", "change, 95 % interval"], rows)


def _change(losses: Sequence[torch.Tensor], of: Sequence[torch.Tensor]) -> str:
    """How much higher the perplexity of the same tokens is."""
    low, middle, high = (100 * end for end in change(losses, of))
    return f"{middle:+.3f} % ({low:+.3f} to {high:+.3f})"


def measured(parts: Sequence[list[str]]) -> str:
    """The table of all variants, on several texts."""
    tokenizer, rows = AutoTokenizer.from_pretrained(MODEL), list[tuple[object, ...]]()
    first: list[Evaluation] = []
    for name, make in VARIANTS.items():
        if "modelopt" in name and find_spec("modelopt") is None:
            continue
        model = make()
        found = [evaluate(model, tokenizer, texts) for texts in parts]
        first = first or found
        of_parts = [
            (f"{its.perplexity:.4f}", _change(its.losses, of.losses))
            for its, of in zip(found, first, strict=True)
        ]
        rows.append(
            (name, f"{weights_bytes(model):,}", *(text for each in of_parts for text in each))
        )
        print(*rows[-1], flush=True)
    each = [("perplexity", "change, 95 % interval")] * len(parts)
    return table(["experts", "bytes", *(head for heads in each for head in heads)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fp8", action="store_true", help="what rows in FP8 cost")
    parser.add_argument("--write", action="store_true", help="the page in benchmarks/results")
    arguments = parser.parse_args()
    packages = {"torch": "torch", "transformers": "transformers", "modelopt": "nvidia-modelopt"}
    versions = ", ".join(
        f"{package} {version(package)}" for name, package in packages.items() if find_spec(name)
    )
    if arguments.fp8:
        name, parts = "quality_fp8", [load_heldout(max_bytes=300_000)]
        found = in_pairs(*parts)
    else:
        name, parts = "quality", [load_heldout(max_bytes=90_000), load_heldout()[-LAST:]]
        found = measured(parts)
    sizes = " and ".join(f"{sum(len(text.encode()) for text in texts):,}" for texts in parts)
    print(found)
    if arguments.write:
        print(
            write(
                name, "benchmarks/quality.py", f"{sizes} bytes of held-out text; {versions}", found
            )
        )


if __name__ == "__main__":
    main()
