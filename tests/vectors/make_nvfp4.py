"""Writes nvfp4.npz: small inputs, and what nvidia-modelopt makes of them on the CPU. `nvfp4.md`
says what is in it.

python -m venv /tmp/judges && /tmp/judges/bin/pip install torch==2.13.0 numpy
nvidia-modelopt==0.47.0 /tmp/judges/bin/python tests/vectors/make_nvfp4.py
"""

from pathlib import Path

import numpy as np
import torch
from modelopt.torch.quantization.qtensor import NVFP4QTensor

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def inputs():
    """Yields (name, x [N, K], given decode scale or None)."""
    rand = torch.Generator().manual_seed(20)

    def normal(*shape):
        return torch.randn(*shape, generator=rand)

    for dtype in BITS:
        yield f"normal_{dtype}", normal(8, 64).to(dtype), None
        yield f"weights_{dtype}", (normal(8, 64) * 0.02).to(dtype), None
        yield f"given_{dtype}", normal(8, 64).to(dtype), torch.tensor(0.013)
        yield f"saturated_{dtype}", normal(8, 64).to(dtype), torch.tensor(1e-4)
        yield f"tiny_{dtype}", (normal(8, 64) * 1e-6).to(dtype), None
        x = normal(8, 64)
        x[:, 16:32] = 0
        x[3], x[5, :16], x[6, :16], x[7, 32:48] = (
            x[3] * 1e-4,
            x[5, :16] * 1e-3,
            -0.0,
            x[7, 32:48] * 1e-6,
        )
        yield f"zero_and_tiny_blocks_{dtype}", x.to(dtype), None
        yield (
            f"heavy_tail_{dtype}",
            (normal(8, 64) / normal(8, 64)).clamp(-1e4, 1e4).to(dtype),
            None,
        )
        ties = torch.tensor(
            [6, 0.25, 0.5, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 0, -0.25, -0.75, -1.25, -1.75, -2.5, -5]
        )
        yield (
            f"ties_{dtype}",
            (ties.repeat(8, 4) * torch.exp2(torch.arange(8) - 4.0)[:, None]).to(dtype),
            torch.tensor(2.0**-5),
        )
        yield (
            f"ties_own_scale_{dtype}",
            (ties.repeat(8, 4) * torch.exp2(torch.arange(8) - 4.0)[:, None]).to(dtype),
            None,
        )
    yield "subnormal", normal(8, 64) * 1e-38, None
    yield "vanishing", normal(8, 64) * 1e-43, None
    yield "huge", normal(8, 64) * 1e37, None


def main():
    """Writes the file beside this script."""
    arrays = {}
    for name, x, given in inputs():
        packed, block_scale, decode_scale = NVFP4QTensor.quantize(x.clone(), 16, None, given)
        name = name.replace("torch.", "")
        arrays[f"{name}/x/{str(x.dtype).removeprefix('torch.')}"] = x.view(BITS[x.dtype]).numpy()
        if given is not None:
            arrays[f"{name}/given"] = given.numpy()
        arrays[f"{name}/codes"] = packed._quantized_data.numpy()
        arrays[f"{name}/block_scale"] = block_scale.view(torch.uint8).numpy()
        arrays[f"{name}/decode_scale"] = decode_scale.numpy()
        for dtype, bits in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
            back = packed.dequantize(
                dtype=dtype, scale=block_scale, double_scale=decode_scale, block_sizes={-1: 16}
            )
            arrays[f"{name}/back_{str(dtype).removeprefix('torch.')}"] = back.view(bits).numpy()
    np.savez_compressed(Path(__file__).with_name("nvfp4.npz"), **arrays)


if __name__ == "__main__":
    main()
