"""What autograd saves for all that differentiates here: read once in each backward, under hooks and
in checkpoints, which give a tensor once.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from experts import experts, float_weights, routed
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import fusion_moe
from fusion_moe.distributed import parallelize_
from fusion_moe.nn import GroupedLinear, add_lora_, qat_
from tests.families.tiny import tiny

E, H, I, ROWS = 3, 64, 32, 7
ENDS = torch.tensor([2, 2, 7], dtype=torch.int32)
Given = tuple[Callable[..., Tensor], tuple[Tensor, ...]]


def of_operations() -> Given:
    """Each with a derivative of its own, one behind the other."""
    ops, weight = torch.ops.fusion_moe, float_weights(E, H, I)[0]
    bias, w, slots = torch.randn(E, 2 * I), torch.rand(ROWS, 1), torch.arange(ROWS)[:, None].int()

    def f(x: Tensor, weight: Tensor, bias: Tensor, w: Tensor) -> Tensor:
        y = ops.grouped_mm(x, [weight], ENDS, weight_format="f32")
        return ops.combine(ops.scaled_swiglu(ops.group_add(y, bias, ENDS)), slots, w)

    return f, (torch.randn(ROWS, H), weight, bias, w)


def of_experts() -> Given:
    module = experts(E, H, I)
    add_lora_(module, rank=4)
    x, ids, w = routed(E, H)
    return lambda x, w: module(x, ids, w), (x, w)


def of_training() -> Given:
    model = tiny("qwen3_moe")
    qat_(model)
    module = model.model.layers[1].mlp.experts
    x, ids, w = routed(module.num_experts, H)
    return lambda x, w: module(x, ids, w), (x.float(), w.float())


def of_main_grad() -> Given:
    """Whose backward writes elsewhere, some of it later."""
    module = GroupedLinear(E, H, I, accumulate_into_main_grad=True, delay_wgrad_compute=True)
    for p in module.parameters():
        p.main_grad = torch.zeros_like(p)  # type: ignore[attr-defined]
    splits = ENDS.diff(prepend=ENDS.new_zeros(1)).long()

    def f(x: Tensor) -> Tensor:
        return module(x, splits)

    return f, (torch.randn(ROWS, H),)


def of_ranks(dispatch: str) -> Given:
    module = experts(E, H, I)
    parallelize_(module, init_device_mesh("cpu", (1,)), tokens="sharded", dispatch=dispatch)
    x, ids, w = routed(E, H)
    return lambda x, w: module(x, ids, w), (x, w)


WAYS: dict[str, Callable[[], Given]] = {
    "operations": of_operations,
    "experts": of_experts,
    "training": of_training,
    "main_grad": of_main_grad,
    "all_gather": lambda: of_ranks("all_gather"),
    "all_to_all": lambda: of_ranks("all_to_all"),
}
# the classes that these call
FUNCTIONS = {"Differentiated", "_Tracked", "Linear"}


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with fusion_moe.options.override(target="reference"):
        yield
    dist.destroy_process_group()
    gc.collect()


class Once:
    """A saved tensor that is given once."""

    def __init__(self, t: Tensor):
        self.t: Tensor | None = t.clone()

    def take(self) -> Tensor:
        assert self.t is not None, "a saved tensor is read twice"
        t, self.t = self.t, None
        return t


def gradients(f: Callable[..., Tensor], given: tuple[Tensor, ...], context: Any) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in given]
    with context:
        y = f(*leaves)
        y.square().sum().backward()
    return [y.detach(), *(t.grad for t in leaves if t.grad is not None)]


@pytest.mark.parametrize("way", WAYS)
def test_read_once(way):
    torch.manual_seed(0)
    f, given = WAYS[way]()
    want = gradients(f, given, nullcontext())
    assert len(want) == 1 + len(given)

    def again(*xs: Tensor) -> Tensor:
        return checkpoint(f, *xs, use_reentrant=False)

    for found in (
        gradients(f, given, saved_tensors_hooks(Once, Once.take)),
        gradients(f, given, save_on_cpu()),
        gradients(again, given, set_checkpoint_early_stop(True)),
        gradients(again, given, set_checkpoint_early_stop(False)),
        gradients(again, given, save_on_cpu()),
    ):
        assert all(map(torch.equal, found, want))


def test_no_other_class_saves():
    ours = {
        cls.__name__
        for cls in torch.autograd.Function.__subclasses__()
        if cls.__module__.startswith("fusion_moe.")
    }
    assert ours == FUNCTIONS
