"""Llama-4's mixture-of-experts layer in NVFP4 through thunder.jit: the trace with our fusions, and
its distance from float64.

    python examples/thunder_llama4_moe.py        (pip install '.[models,thunder]')

The layer is transformers' own, small and with random weights. Its router picks one expert for each
token and scales the expert's input; a shared expert in bf16 sees every token.
"""

import argparse

import torch
from torch import Tensor, nn
from transformers import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe

import fusion_moe
from fusion_moe.encodings import NVFP4, Quantized, dequantize
from fusion_moe.errors import UnsupportedError
from fusion_moe.nn import Llama4MoE
from fusion_moe.thunder import thunder_executors


def layer() -> Llama4MoE:
    """8 experts with quantized weights, in place of transformers' module."""
    config = Llama4TextConfig(
        hidden_size=128,
        intermediate_size=256,
        intermediate_size_mlp=256,
        num_local_experts=8,
        num_experts_per_tok=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_hidden_layers=1,
    )
    model = nn.ModuleDict({"moe": Llama4TextMoe(config)})
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    fusion_moe.quantize_(model.to(torch.bfloat16))
    return model["moe"].requires_grad_(False).eval()


def in_float64(moe: Llama4MoE, x: Tensor) -> Tensor:
    """The layer as a loop over experts with decoded weights. Routing is decided in bf16, as in the
    layer.
    """
    e, shared = moe.experts, moe.shared_expert
    gate_up = dequantize(
        Quantized(
            e.gate_up_proj,
            e.gate_up_proj_scale,
            e.gate_up_decode_scale,
            encoding=NVFP4,
        )
    ).double()
    down = dequantize(
        Quantized(e.down_proj, e.down_proj_scale, e.down_decode_scale, encoding=NVFP4)
    ).double()

    def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return (nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    _, logits = moe(x)
    score, expert = logits.double().max(-1)
    wide = x.double()
    out = swiglu(
        wide,
        *(
            linear.weight.double()
            for linear in (shared.gate_proj, shared.up_proj, shared.down_proj)
        ),
    )
    for i in range(len(down)):
        out[expert == i] += swiglu(
            (wide * score.sigmoid()[:, None])[expert == i], *gate_up[i].chunk(2), down[i]
        )
    return out


if __name__ == "__main__":
    # --help alone
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    torch.manual_seed(0)
    moe, x = layer(), torch.randn(40, 128).bfloat16()
    try:
        import thunder

        executors = thunder_executors()
    except (ImportError, UnsupportedError) as error:
        raise SystemExit(f"This example needs thunder: {error}; pip install '.[thunder]'") from None
    jitted = thunder.jit(moe, executors=executors)
    with torch.no_grad():
        found, _ = jitted(x)
        want = in_float64(moe, x)
    print(
        "== the trace that thunder runs: the experts are one call of fusion_moe, what it stands "
        "for is below it\n"
    )
    print(thunder.last_traces(jitted)[-1])
    print("\n== what was fused, and what was not\n")
    with torch.no_grad():
        print(fusion_moe.explain(jitted, x).details())
    difference = (found.double() - want).abs().max().item()
    print(
        f"\nlargest difference from float64: {difference:.3g}, of values up to "
        f"{want.abs().max().item():.3g}"
    )
