"""Weights of modules lie on large pages on the CPU, and are otherwise like any other parameters."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from experts import experts, same_state
from torch.utils._python_dispatch import TorchDispatchMode

import fusion_moe
from fusion_moe.encodings import NVFP4, quantize
from fusion_moe.nn import NVFP4GroupedLinear
from fusion_moe.nn.frozen import weight as frozen
from fusion_moe.runtime.host_memory import pages

E, H, I = 6, 1024, 1024
CODES = ("gate_up_proj", "down_proj")
needs_advice = pytest.mark.skipif(
    not pages._TAKES_ADVICE, reason="this system takes no advice on pages"
)


def floats(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.fixture(scope="module")
def made():
    return experts(E, H, I)


def starts_at_pages(module):
    return [
        p.data_ptr() % pages.PAGE == 0 for name, p in module.named_parameters() if name in CODES
    ]


def same_bytes(a, b):
    return same_state(a.state_dict(), b.state_dict())


@needs_advice
def test_quantized_weights_are_made_there(made):
    assert starts_at_pages(made) == [True, True]
    assert NVFP4GroupedLinear.from_float(floats(E, H, I)).weight.data_ptr() % pages.PAGE == 0


@pytest.mark.parametrize("panel", [1, 4 * I * H])
def test_a_few_matrices_at_a_time_give_the_bytes_of_all_at_once(panel, monkeypatch):
    monkeypatch.setattr(frozen, "_PANEL", panel)
    weight = floats(E, I, H)
    weight[1] = 0
    for x in weight.mT, weight.view(E, 2, I // 2, H):
        found, want = frozen.rounded(x, NVFP4), quantize(x, NVFP4)
        assert all(
            a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            for a, b in zip(found, want, strict=True)
        )


class Largest(TorchDispatchMode):
    """Elements of the largest result that has memory of its own."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        in_place = isinstance(result, torch.Tensor) and any(result is a for a in args)
        if isinstance(result, torch.Tensor) and not func.is_view and not in_place:
            self.numel = max(self.numel, result.numel())
        return result


def test_quantizing_needs_room_for_a_few_matrices_only(monkeypatch):
    monkeypatch.setattr(frozen, "_PANEL", 2 * I * H)
    weights = floats(E, 2 * I, H), floats(E, H, I)
    with Largest() as largest:
        fusion_moe.NVFP4Experts.from_float(*weights)
    assert 0 < largest.numel <= 2 * I * H


@needs_advice
def test_tensors_from_elsewhere_are_copied_there():
    weight = quantize(floats(E, H, I), NVFP4)
    module = NVFP4GroupedLinear(weight)
    assert module.weight.data_ptr() % pages.PAGE == 0
    assert torch.equal(module.weight, weight.codes)
    assert (
        NVFP4GroupedLinear(weight.with_(codes=module.weight.detach())).weight.data_ptr()
        == module.weight.data_ptr()
    )


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda m: torch.load(saved(m), weights_only=False),
        lambda m: copy.deepcopy(m).to(torch.float16),
        copy.copy,
    ],
    ids=["deepcopy", "pickle", "cast", "copy"],
)
def test_copies_are_whole(copied, made):
    assert same_bytes(copied(made), made)


def saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    assert file.tell() < 1.01 * module.nbytes + 2**14  # and nothing of what lies around the weights
    file.seek(0)
    return file


@needs_advice
def test_what_came_from_another_device_is_put_there(made):
    with torch.device("meta"):
        other = experts(E, H, I)
    assert all(p.is_meta for p in other.parameters())
    other.to_empty(device="cpu")
    assert starts_at_pages(other) == [True, True]
    places = [p.data_ptr() for p in other.parameters()]
    other.load_state_dict(made.state_dict())
    assert same_bytes(other, made)
    assert [p.data_ptr() for p in other.parameters()] == places


@needs_advice
def test_prepare_puts_copies_there(made):
    module = copy.deepcopy(made)
    for p in module.parameters():
        elsewhere = torch.empty(p.nbytes + 2 * pages.PAGE, dtype=torch.uint8)
        start = 64 - elsewhere.data_ptr() % pages.PAGE + pages.PAGE
        p.data = elsewhere[start : start + p.nbytes].view(p.dtype).view(p.shape).copy_(p.data)
    assert starts_at_pages(module) == [False, False]
    fusion_moe.prepare_(module, "cpu")
    assert starts_at_pages(module) == [True, True]
    assert same_bytes(module, made)


def test_prepare_leaves_shared_memory(made):
    shared = copy.deepcopy(made).share_memory()
    places = [p.data_ptr() for p in shared.parameters()]
    fusion_moe.prepare_(shared, "cpu")
    assert all(p.is_shared() for p in shared.parameters())
    assert [p.data_ptr() for p in shared.parameters()] == places
    assert same_bytes(shared, made)


@needs_advice
@pytest.mark.gpu
def test_to_a_gpu_and_back(made):
    back = copy.deepcopy(made).cuda().cpu()
    assert starts_at_pages(back) == [True, True]
    assert same_bytes(back, made)
