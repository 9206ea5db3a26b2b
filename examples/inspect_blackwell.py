"""What would run on GPUs that are not present: a small real Qwen3-MoE, explained for Blackwell and
for Hopper. No GPU is needed.

    python examples/inspect_blackwell.py

The call is traced on fake tensors: nothing is executed, not even on the CPU. With nvFuser installed
(pip install '.[nvfuser]'), the last stage of a fusion is its nvFuser definition; without nvFuser,
it is the program that would become one. The code emitted for Blackwell has never run on one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, logging as transformers_logging

import fusion_moe
from fusion_moe.report import Report

MODEL = Path(__file__).parent / "tiny_qwen3_moe"
TOKENS = torch.zeros(1, 64, dtype=torch.long)

# A target and its activation format: 4-bit activations need compute capability 10.0; elsewhere
# weights are decoded to bf16. A 4-bit product needs K in multiples of 64 and N of 128, as in this
# model; the report would give the reason of a refusal.
MACHINES = (("sm_100", "nvfp4"), ("sm_90", "bf16"))


def explained(target: str, activation_format: str) -> Report:
    """The report of the model with its experts quantized, for a target."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16).eval()
    fusion_moe.quantize_(model, fusion_moe.NVFP4Config(activation_format=activation_format))
    with torch.inference_mode():
        return fusion_moe.explain(model, TOKENS, target=target, use_cache=False)


def show(report: Report) -> None:
    """Prints the report, and the last stages of the first fusion only, since the layers are
    equal.
    """
    print(report.details())
    for stage in ("schedules", "source"):
        print(
            f"\n-- {stage} of fusion0 (all stages: "
            f"{', '.join(report.stages)})\n\n{report.stage(stage)}"
        )


if __name__ == "__main__":
    # --help alone
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    for target, activation_format in MACHINES:
        print(f"\n== {target}, activations in {activation_format}: nothing of this was executed\n")
        show(explained(target, activation_format))
