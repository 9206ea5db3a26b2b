"""accelerate and safetensors write every group of a GroupedLinear, though groups lie in one
buffer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fusion_moe.nn import GroupedLinear

pytestmark = pytest.mark.judges("accelerate")


def layer(**how: Any) -> GroupedLinear:
    torch.manual_seed(0)
    made = GroupedLinear(3, 16, 8, dtype=torch.bfloat16, **how)
    torch.nn.init.normal_(made.bias1)
    return made


def assert_loaded(model: torch.nn.Module) -> None:
    want = layer().state_dict()
    assert all(torch.equal(t, want[name]) for name, t in model.state_dict().items())


def zero(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()


def test_save_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), layer()
    prepared = accelerator.prepare(model)
    accelerator.save_state(str(tmp_path))
    zero(model)
    accelerator.load_state(str(tmp_path))
    assert_loaded(prepared)
    assert "Removed shared tensor" not in caplog.text


def test_save_model(tmp_path: Path) -> None:
    from accelerate import Accelerator, load_checkpoint_in_model

    model = layer()
    Accelerator(cpu=True).save_model(model, str(tmp_path), max_shard_size=500)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    zero(model)
    load_checkpoint_in_model(model, str(tmp_path))
    assert_loaded(model)


def test_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_model, save_model

    model = layer()
    save_model(model, str(tmp_path / "file"))
    zero(model)
    load_model(model, str(tmp_path / "file"))
    assert_loaded(model)


def test_a_state_dict_is_on_the_parameters_memory() -> None:
    model = layer()
    state = model.state_dict()
    assert len({t.untyped_storage().data_ptr() for t in state.values()}) == 6
    state["weight2"].zero_()
    assert not model.weight2.any()
    assert model.weight1.any()
    assert model.state_dict(keep_vars=True)["weight2"] is model.weight2
