"""What a machine's parts take: measured once, and kept on disk."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fusion_moe import options
from fusion_moe.encodings import NVFP4, Quantized
from fusion_moe.nn import NVFP4Experts
from fusion_moe.offload import machine
from fusion_moe.offload.device import HostStorage
from fusion_moe.offload.machine import EXPECTED, Machine, copy_alone
from fusion_moe.offload.requester import Requester
from fusion_moe.offload.worker import library

pytestmark = pytest.mark.once


def made_layer(experts: int, hidden: int, inner: int) -> NVFP4Experts:
    """Experts with random codes, and scales as trained models have them."""
    g = torch.Generator().manual_seed(0)

    def weight(n: int, k: int) -> Quantized:
        parts = []
        for part in NVFP4.parts:
            t = torch.empty(NVFP4.part_shape(part, [experts], n, k), dtype=part.dtype)
            if part.of_matrix:
                t.fill_(2.0**-9)
            else:
                most = 0x60 if part.of_blocks else 256
                t.view(torch.uint8).random_(0x20, most, generator=g)
            parts.append(t)
        return Quantized(*parts, encoding=NVFP4)

    made = NVFP4Experts(weight(2 * inner, hidden), weight(hidden, inner))
    made.order()
    return made


def test_measured_once(tmp_path):
    storage, copied = HostStorage(made_layer(16, 256, 128)), set[str]()

    def copier(storage: HostStorage) -> machine.Copy:
        slot = {name: torch.zeros_like(t[0]) for name, t in storage.tensors.items()}

        def copy(first: int, count: int) -> None:
            for i in range(first, first + count):
                for name, t in storage.tensors.items():
                    copy_alone(slot[name], t[i])
            copied.update(name for name, t in slot.items() if t.any())

        return copy

    library()  # is not compiled into another folder
    with options.override(cache_dir=str(tmp_path)):
        found = machine.measured("a device", storage, copier(storage), lambda: (1000, 2000))
        again = machine.measured("a device", storage, copier(storage), lambda: 1 // 0)
        other = HostStorage(made_layer(1, 128, 64))
        assert machine.measured("a device", other, copier(other), lambda: (1000, 2000)) != found
    assert found == again
    rates = found.cpu, found.cpu_beside, found.macs, found.copy, found.copy_beside
    assert all(1e6 < rate < 1e14 for rate in rates)
    assert found.cpu_start >= 2000
    assert found.copy_start == 2000
    assert copied == set(storage.tensors)


def test_products_are_timed_by_the_worker():
    """What an expert takes by the constants is what steps pay: no call from Python is in it."""
    requester = Requester(HostStorage(made_layer(16, 256, 128)), torch.bfloat16)
    x, ids, w = torch.ones(1, 256, dtype=torch.bfloat16), torch.zeros(1, 1).long(), torch.ones(1, 1)
    before = requester.busy()
    requester.computed(x, ids, w)
    assert requester.busy() > before


def test_constants():
    """Of more bytes and of more multiplications; never faster beside each other."""
    rates = Machine(4e9, 5e9, 1e10, 2e9, 1e9, 7, 8)
    found = rates.constants(nbytes=8000, macs=50)
    assert (found.cpu_expert, found.cpu_expert_beside, found.cpu_row) == (2000, 2000, 5)
    assert (found.copy_expert, found.copy_expert_beside) == (4000, 8000)
    assert (found.cpu_start, found.copy_start) == (7, 8)
    assert found.gpu_expert == 0
    of_gpu = replace(rates, gpu=8e9).constants(8000, 50)  # whose products take time to begin
    assert (of_gpu.copy_start, of_gpu.gpu_expert) == (8 + 10_000, 1000)
    for expected in EXPECTED.values():  # DeepSeek-V3's experts: a miss is the CPU's
        costs = expected.constants(24_800_000, 3 * 7168 * 2048)
        assert costs.cpu_expert < costs.copy_expert < 2 * costs.cpu_expert
