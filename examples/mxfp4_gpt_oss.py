"""gpt-oss with its MXFP4 experts in this library's kernels, compared with transformers' own
dequantized experts.

A small model of transformers' classes with random weights. Its experts are quantized to the tensors
of gpt-oss' checkpoints, `gate_up_proj_blocks` and `_scales`, with alternating gate and up rows.
transformers turns these into bfloat16 matrices; here they stay encoded, and biases, clamp and gate
become part of the fused operation. Both models compute the same logits, up to bfloat16's rounding.

    python examples/mxfp4_gpt_oss.py

Runs on a GPU if there is one. Exits with 1 if the results differ from those of transformers.
"""

from __future__ import annotations

import argparse
import copy
import sys

import torch
from torch import Tensor, nn
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import fusion_moe
from fusion_moe.encodings import MXFP4, Quantized, quantize
from fusion_moe.nn import Experts, swiglu

# for "gate_up_proj" and "down_proj": blocks u8 [E, N, K/32, 16], scales u8 [E, N, K/32]
Packed = dict[str, tuple[Tensor, Tensor]]


def small_model() -> GptOssForCausalLM:
    """A small gpt-oss with random weights."""
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_local_experts=8,
        num_experts_per_tok=4,
        max_position_embeddings=256,
        sliding_window=64,
        eos_token_id=0,
        pad_token_id=0,
    )
    config.layer_types = ["sliding_attention", "full_attention"]
    model = GptOssForCausalLM(config).to(torch.bfloat16).eval()
    for name, p in model.named_parameters():
        if "experts" in name:
            nn.init.normal_(p, std=0.1 if name.endswith("bias") else p.shape[1] ** -0.5)
    return model


def checkpoint_tensors(experts: nn.Module) -> Packed:
    """The weights of transformers' experts, [E, K, N] each, as the tensors of a checkpoint."""
    found = {}
    for name in ("gate_up_proj", "down_proj"):
        codes, scales = quantize(experts.get_parameter(name).detach().mT, encoding=MXFP4)
        found[name] = (codes.unflatten(-1, (-1, 16)).contiguous(), scales.view(torch.uint8))
    return found


def ours(experts: nn.Module, packed: Packed) -> Experts:
    """The module that replaces them, with codes and scales as they are stored."""
    gate_up, down = (
        Quantized(b.flatten(-2), s.view(torch.float8_e8m0fnu), encoding=MXFP4)
        for b, s in packed.values()
    )
    biases = {"gate_up_bias": experts.gate_up_proj_bias, "down_bias": experts.down_proj_bias}
    return Experts(
        gate_up,
        down,
        **biases,
        activation=swiglu(interleave=1, limit=experts.limit, alpha=experts.alpha, up_offset=1.0),
    )  # type: ignore[arg-type]


def both_models() -> tuple[GptOssForCausalLM, GptOssForCausalLM]:
    """The model with transformers' dequantized experts, and the one with ours, from the same
    tensors.
    """
    theirs = small_model()
    model = copy.deepcopy(theirs)
    for layer, here in zip(theirs.model.layers, model.model.layers, strict=True):
        packed = checkpoint_tensors(layer.mlp.experts)
        here.mlp.experts = ours(here.mlp.experts, packed)
        for name, (blocks, scales) in packed.items():
            layer.mlp.experts.get_parameter(name).data = convert_moe_packed_tensors(blocks, scales)
    return theirs, model


def distance(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|"""
    return float((a.double() - b.double()).norm() / b.double().norm())


@torch.no_grad()
def main() -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    theirs, model = both_models()
    ids = torch.randint(1, 512, (2, 48), generator=torch.Generator().manual_seed(1))
    bytes_of = [
        sum(p.numel() * p.element_size() for n, p in m.named_parameters() if "experts" in n)
        for m in (theirs, model)
    ]
    print(
        f"gpt-oss, {len(theirs.model.layers)} layers of {theirs.config.num_local_experts} experts"
    )
    print(f"expert weights: {bytes_of[0]:,} bytes in bf16, {bytes_of[1]:,} in MXFP4")

    exact = copy.deepcopy(theirs).float()(ids).logits
    same = distance(copy.deepcopy(model).float()(ids).logits, exact)
    print(f"float32 activations, cpu: logits {same:.1e} from transformers' on dequantized weights")

    theirs, model, ids, exact = (
        theirs.to(device),
        model.to(device),
        ids.to(device),
        exact.to(device),
    )
    compiled = torch.compile(model, backend="fusion_moe")
    found = {
        "transformers, dequantized": theirs(ids).logits,
        "fusion_moe": model(ids).logits,
        "fusion_moe, compiled": compiled(ids).logits,
    }
    for name, logits in found.items():
        print(
            f"bf16 activations, {device.type}, {name + ':':26} {distance(logits, exact):.1%} "
            "from float32"
        )
    for segment in fusion_moe.explain(model, ids).fusions[0].segments:
        print(
            f"{segment.id}: {segment.kind} on "
            f"{segment.backend}{segment.backend_why and ', ' + segment.backend_why}"
        )

    # a token near a tie may choose other experts in bf16
    limit = 1.5 * distance(found["transformers, dequantized"], exact)
    good = same < 1e-4 and all(distance(logits, exact) <= limit for logits in found.values())
    print("the results of transformers" if good else "NOT the results of transformers")
    return 0 if good else 1


if __name__ == "__main__":
    # --help alone
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    sys.exit(main())
