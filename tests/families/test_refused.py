"""Families whose experts are not described as the others' are: `quantize_` names the class and says
why.
"""

from __future__ import annotations

import importlib.util

import pytest

pytest.importorskip("transformers")

import torch
from torch import nn

import fusion_moe
from fusion_moe.errors import UnsupportedError
from fusion_moe.integrations.hooks.transformers import REFUSED
from tests.families.models import AnyConfig, E, H, I, class_of, randomized


class Config(AnyConfig):
    """What these families need beside sizes."""

    (
        zero_expert_num,
        ffn_act_fn,
        activation_function,
        activation_dropout,
        dropout_rate,
        moe_token_dropout,
    ) = 2, {}, "relu", 0.0, 0.0, 0.0
    dense_act_fn, d_model, d_ff = "relu", H, I


ARGUMENTS = {"JetMoeParallelExperts": (E, H, I), "NllbMoeExperts": (Config(), I)}


@pytest.mark.parametrize("path", REFUSED, ids=lambda path: path.rpartition(".")[2])
def test_refused(path, golden):
    family, name = path.split(".")[2], path.rpartition(".")[2]
    if importlib.util.find_spec(f"transformers.models.{family}") is None:
        pytest.skip(f"this version of transformers has no {family}")
    model = nn.ModuleDict(
        {"experts": randomized(class_of(family, name)(*ARGUMENTS.get(name, (Config(),))))}
    )
    before = [type(m) for m in model.modules()]
    with pytest.raises(UnsupportedError) as error:
        fusion_moe.quantize_(model)
    golden(str(error.value))
    assert [type(m) for m in model.modules()] == before
    with pytest.raises(UnsupportedError, match=name):
        fusion_moe.nn.convert(model["experts"])


def test_experts_divided_by_a_plan(golden):
    """As tp_plan makes them: parameters that are DTensors, here of one process."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    experts = randomized(class_of("qwen3_moe", "Qwen3MoeExperts")(AnyConfig()))
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for name, p in list(experts.named_parameters()):
            setattr(experts, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))
        with pytest.raises(UnsupportedError) as error:
            fusion_moe.quantize_(nn.ModuleDict({"experts": experts}))
    finally:
        distributed.destroy_process_group()
    golden(str(error.value))


def test_experts_of_other_ranks():
    experts = randomized(class_of("qwen3_moe", "Qwen3MoeExperts")(AnyConfig()))
    experts._is_expert_parallel = True
    with pytest.raises(
        UnsupportedError,
        match="experts: Qwen3MoeExperts: experts that a parallel plan divides between devices",
    ):
        fusion_moe.quantize_(nn.ModuleDict({"experts": experts}))
    assert isinstance(experts.gate_up_proj, torch.Tensor)
