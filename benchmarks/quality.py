"""What 4 bits cost: the perplexity of the small real model with experts in each encoding, on
held-out text it was not trained on.

    python benchmarks/quality.py [--max-bytes 90000]  # needs transformers; nvidia-modelopt for its
                                                      # row. Writes results/quality.md
    python benchmarks/quality.py --fp8 [--max-bytes 150000]  # what FP8 costs, token by token.
                                                             # Writes results/quality_fp8.md

All rows are the same model, `examples/tiny_qwen3_moe`, in bf16 but for the experts' weights;
activations stay in bf16 but where int8 is said, which rounds both operands of the experts' products
(on CPUs), and where fp8 is said, which rounds rows before each product (by the reference). A row of
`--fp8` is compared with another one by the difference of both losses of each token; its interval
holds 95 %, by the standard error over windows of text. ModelOpt's row is a directory that
nvidia-modelopt quantized and exported, loaded with `from_pretrained`. Its exporter gives gate and
up of an expert one scale, the larger of the two, where `quantize_` keeps both; all other bytes are
equal.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.append(str(EXAMPLES))

from heldout import bits_per_byte_and_perplexity, load_heldout, losses_of_windows  # noqa: E402
from results import table, write  # noqa: E402

import fusion_moe  # noqa: E402
import fusion_moe.transformers  # noqa: E402  (loads ModelOpt's directories)
from fusion_moe.encodings import find, quantize  # noqa: E402
from fusion_moe.nn.conversion.contract import contract_of, experts_from  # noqa: E402

MODEL = EXAMPLES / "tiny_qwen3_moe"


def plain(path: str | Path = MODEL) -> Any:
    """The model in bf16."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()


def in_nvfp4(activation_format: str = "bf16", scales: str = "max") -> Any:
    """Its experts quantized by quantize_."""
    model = plain()
    fusion_moe.quantize_(model, fusion_moe.NVFP4Config(activation_format, scales=scales))
    return model


def in_encoding(name: str, activation_format: str = "bf16", scales: str = "max") -> Any:
    """Its experts quantized to an encoding."""
    model, encoding, config = plain(), find(name), fusion_moe.NVFP4Config(activation_format)
    for path, experts in list(model.named_modules()):
        if contract := contract_of(experts):
            up, down = (
                t.detach()
                for t in (contract.up(experts.gate_up_proj), contract.down(experts.down_proj))
            )
            weights = (quantize(t, encoding, scales=scales) for t in (up, down))
            model.set_submodule(path, experts_from(experts, *weights, config=config))
    return model


def folded(make: Callable[[], Any]) -> Any:
    """A model whose experts read their weights as FP8."""
    model = make()
    fusion_moe.prepare_(model, weights="fp8")
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


def experts_bytes(model: nn.Module) -> int:
    """Bytes of the experts' weights."""
    return sum(t.nbytes for name, t in model.named_parameters() if ".experts." in name)


VARIANTS: dict[str, Callable[[], Any]] = {
    "bf16": plain,
    "NVFP4, `quantize_`": in_nvfp4,
    'NVFP4, `quantize_`, scales="four_over_six"': lambda: in_nvfp4(scales="four_over_six"),
    'NVFP4, `quantize_`, scales="mse"': lambda: in_nvfp4(scales="mse"),
    "NVFP4, `quantize_`, int8 activations": lambda: in_nvfp4("int8"),
    "NVFP4, nvidia-modelopt's directory": by_modelopt,
    "MXFP4": lambda: in_encoding("mxfp4"),
    'MXFP4, scales="mse"': lambda: in_encoding("mxfp4", scales="mse"),
    "MXFP4, int8 activations": lambda: in_encoding("mxfp4", "int8"),
    "INT4, groups of 32": lambda: in_encoding("int4"),
}


# name -> how it is made, and the row that it is compared with
IN_FP8: dict[str, tuple[Callable[[], Any], str]] = {
    "bf16": (plain, ""),
    "NVFP4": (in_nvfp4, "bf16"),
    "NVFP4, fp8 activations": (lambda: in_nvfp4("fp8"), "NVFP4"),
    "NVFP4 folded to FP8": (lambda: folded(in_nvfp4), "NVFP4"),
    "NVFP4 folded to FP8, fp8 activations": (
        lambda: folded(lambda: in_nvfp4("fp8")),
        "NVFP4 folded to FP8",
    ),
    "MXFP4, folded to FP8 or not": (lambda: folded(lambda: in_encoding("mxfp4")), "bf16"),
    "MXFP4 folded to FP8, fp8 activations": (
        lambda: folded(lambda: in_encoding("mxfp4", "fp8")),
        "MXFP4, folded to FP8 or not",
    ),
    "FP8, 128 x 128": (lambda: in_encoding("fp8"), "bf16"),
    "FP8, 128 x 128, fp8 activations": (lambda: in_encoding("fp8", "fp8"), "FP8, 128 x 128"),
}


def in_pairs(texts: list[str]) -> str:
    """The table of `IN_FP8`: perplexity, and its change from that of another row."""
    tokenizer, rows = AutoTokenizer.from_pretrained(MODEL), list[tuple[object, ...]]()
    found: dict[str, list[torch.Tensor]] = {}
    for name, (make, other) in IN_FP8.items():
        with fusion_moe.options.override(target="reference"):
            found[name] = losses_of_windows(make(), tokenizer, texts)
        mean = float(torch.cat(found[name]).mean())
        more = f"{_change(found[name], found[other])} than {other}" if other else ""
        rows.append((name, f"{math.exp(mean):.4f}", more))
        print(*rows[-1], flush=True)
    return table(["experts", "perplexity", "change, 95 % interval"], rows)


def _change(losses: list[torch.Tensor], of: list[torch.Tensor]) -> str:
    """How much higher the perplexity of the same tokens is."""
    sums = torch.stack([(a - b).sum() for a, b in zip(losses, of, strict=True)]).double()
    sizes = torch.tensor([len(a) for a in losses], dtype=torch.float64)
    mean = sums.sum() / sizes.sum()
    spread = (sums - mean * sizes).square().sum().sqrt() / sizes.sum()
    low, middle, high = (100 * math.expm1(float(mean + z * spread)) for z in (-1.96, 0, 1.96))
    return f"{middle:+.3f} % ({low:+.3f} to {high:+.3f})"


def measured(texts: list[str]) -> str:
    """The table of all variants."""
    tokenizer, rows, first = AutoTokenizer.from_pretrained(MODEL), list[tuple[object, ...]](), 0.0
    for name, make in VARIANTS.items():
        if "modelopt" in name and find_spec("modelopt") is None:
            continue
        model = make()
        bits, perplexity = bits_per_byte_and_perplexity(model, tokenizer, texts)
        first = first or perplexity
        more = f"{100 * (perplexity / first - 1):+.2f} %"
        size = f"{experts_bytes(model):,}"
        rows.append((name, size, f"{bits:.5f}", f"{perplexity:.4f}", more))
        print(*rows[-1], flush=True)
    return table(["experts", "bytes of experts", "bits per byte", "perplexity", "of bf16's"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--max-bytes", type=int, help="of held-out text (default: all)")
    parser.add_argument("--fp8", action="store_true", help="what FP8 costs, token by token")
    arguments = parser.parse_args()
    texts = load_heldout(max_bytes=arguments.max_bytes)
    packages = {"torch": "torch", "transformers": "transformers", "modelopt": "nvidia-modelopt"}
    versions = ", ".join(
        f"{package} {version(package)}" for name, package in packages.items() if find_spec(name)
    )
    size = sum(len(text.encode()) for text in texts)
    name, rows = ("quality_fp8", in_pairs) if arguments.fp8 else ("quality", measured)
    found = f"{size:,} bytes of held-out text; {versions}", rows(texts)
    print(write(name, "benchmarks/quality.py", *found))


if __name__ == "__main__":
    main()
