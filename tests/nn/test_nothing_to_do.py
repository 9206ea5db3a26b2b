"""What changes a model in place says so if there is nothing for it to do."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from experts import experts
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fusion_moe
from fusion_moe import nn as ours
from fusion_moe.distributed import parallelize_
from fusion_moe.encodings import FP8, quantize
from fusion_moe.errors import Error
from fusion_moe.offload import learn_

E, H, I = 3, 64, 32


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4))


def encoded() -> nn.Module:
    return nn.Sequential(experts(E, H, I))


def in_eight_bits() -> nn.Module:
    return nn.Sequential(ours.QuantizedLinear(quantize(torch.ones(128, 128), FP8)))


def divided(model: nn.Module) -> Any:
    return parallelize_(model, init_device_mesh("cpu", (1,)))


def routers(model: nn.Module) -> Any:
    return pytest.importorskip("fusion_moe.transformers").fuse_routers_(model)


# what a verb gets, and a part of what it says
NOTHING: dict[str, tuple[Callable[[Any], Any], Callable[[], Any], str]] = {
    "quantize_": (fusion_moe.quantize_, plain, "no experts that can be quantized"),
    "quantize_ again": (fusion_moe.quantize_, encoded, "experts of this Sequential are in nvfp4"),
    "qat_": (ours.qat_, plain, "no experts that can be quantized"),
    "qat_ of codes": (ours.qat_, encoded, "no experts but NVFP4Experts in nvfp4; expected experts"),
    "prepare_": (fusion_moe.prepare_, plain, "prepare_ changes nothing: no encoded weights in a S"),
    "prepare_ fp8": (
        lambda m: fusion_moe.prepare_(m, weights="fp8"),
        in_eight_bits,
        "weights = 'fp8' changes nothing: none of the weights, in fp8",
    ),
    "add_lora_": (ours.add_lora_, plain, "no experts of fusion_moe.nn"),
    "merge_lora_": (ours.merge_lora_, encoded, "no adapters"),
    "remove_lora_": (ours.remove_lora_, encoded, "no adapters"),
    "parallelize_": (divided, plain, "no modules of experts"),
    "offload_": (lambda m: fusion_moe.offload_(m, {"pretended": "1GB"}), plain, "Sequential"),
    "learn_": (learn_, encoded, "no offloaded experts in a Sequential; expected"),
    "fuse_routers_": (routers, plain, "fuse_routers_ changes nothing: no router in a Sequential"),
    "update_weights_": (
        lambda m: fusion_moe.update_weights_(m, iter(())),
        encoded,
        "update_weights_ changes nothing: no tensors",
    ),
}


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    gc.collect()


@pytest.mark.parametrize("verb", NOTHING)
def test_it_says_so(verb, caplog):
    do, model, text = NOTHING[verb]
    said = ""
    try:
        do(model())
    except Error as error:
        said = str(error)
    assert text in said + caplog.text
