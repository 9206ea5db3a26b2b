"""PEFT and the Trainer on a small real model whose experts are offloaded: losses and adapters are
those of the same model whose experts are all on the device, bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cover import few

pytest.importorskip("transformers")

from safetensors.torch import load_file

from fusion_moe import NVFP4Config
from fusion_moe.offload import OffloadedExperts, counters
from fusion_moe.offload.pretended import Pretended
from fusion_moe.runtime.host_memory import pages
from fusion_moe.transformers import from_pretrained

pytestmark = [pytest.mark.judges("peft", "accelerate"), pytest.mark.slow, pytest.mark.once]
SMALL = Path(__file__).parents[2] / "examples" / "tiny_qwen3_moe"
G = torch.Generator().manual_seed(0)
DATA = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 999, (8, 48), generator=G)]
LORA = {
    "r": 4,
    "target_modules": ["q_proj", "v_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "task_type": "CAUSAL_LM",
}


def loaded(dtype: torch.dtype = torch.bfloat16, **more: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    model = from_pretrained(SMALL, dtype=dtype, quantization_config=NVFP4Config(), **more)
    torch.manual_seed(3)  # of A
    return get_peft_model(model, LoraConfig(**LORA))


def offloaded(**more: Any) -> Any:
    """Of 16 experts of each of 4 layers, 3 stay on the device."""
    memory = {"pretended": "4MB"} | more.pop("memory", {})
    model = loaded(device_map="auto", max_memory=memory, kv_tokens=64, **more)
    layers = [m for m in model.modules() if isinstance(m, OffloadedExperts)]
    assert [int((m.cache.expert_map >= 0).sum()) for m in layers] == [3] * 4
    return model


def trained(
    model: Any, folder: Path, resume: str | None = None, **how: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of two steps of two batches, and the adapters that the Trainer saved."""
    from transformers import Trainer, TrainingArguments

    usual = {"max_steps": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    usual |= {"learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1}
    usual |= {"report_to": [], "disable_tqdm": True, "use_cpu": True, "bf16": True}
    trainer = Trainer(model, TrainingArguments(str(folder), **usual | how), train_dataset=DATA)
    trainer.train(resume_from_checkpoint=resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    last = folder / f"checkpoint-{trainer.args.max_steps}"
    return losses, load_file(last / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def want(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return trained(loaded(), tmp_path_factory.mktemp("want"))


def assert_same(found: Any, want: Any) -> None:
    assert found[0] == want[0]
    assert found[0][1] < found[0][0]
    assert found[1].keys() == want[1].keys()
    assert all(torch.equal(t, want[1][name]) for name, t in found[1].items())


CHECKPOINTING = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
}


@pytest.mark.parametrize("how", [{}, CHECKPOINTING], ids=["plain", "checkpointing"])
def test_losses_and_adapters_are_those_of_experts_on_the_device(how, want, tmp_path):
    model = offloaded()
    assert_same(trained(model, tmp_path, **how), want)
    # 13 a pass of 8; where passes turn, three layers find theirs, and the fourth one is fetched
    assert [c.copied // 13 for c in counters(model).values()] == [5, 1, 1, 5]


COMPILE = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
REENTRANT = CHECKPOINTING | {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
WAYS = {
    "reentrant": REENTRANT,
    "compile, checkpointing": COMPILE | CHECKPOINTING,
    "compile": COMPILE,
    "no accumulation": {"gradient_accumulation_steps": 1},
    "float16": {"bf16": False, "dtype": torch.float16},
    "float16, checkpointing": CHECKPOINTING | {"bf16": False, "dtype": torch.float16},
}


@pytest.mark.parametrize("way", few(WAYS))
def test_ways_to_train_and_to_go_on_from_a_checkpoint(way, tmp_path):
    how = {"max_steps": 4} | WAYS[way]
    dtype = how.pop("dtype", torch.bfloat16)
    there = trained(loaded(dtype), tmp_path / "there", **how)
    away = trained(offloaded(dtype=dtype), tmp_path / "away", **how)
    assert_same(away, there)
    middle = str(tmp_path / "away" / "checkpoint-2")
    assert_same(trained(offloaded(dtype=dtype), tmp_path / "away", middle, **how), there)


def test_a_copy_that_fails_in_a_step_leaves_the_checkpoint_before_it(want, tmp_path, monkeypatch):
    """Whole: training goes on from there as if nothing had been."""
    own, last = Pretended.fetch, tmp_path / "checkpoint-1"

    def fetch(self: Pretended, wanted: Any, arrival: Any) -> None:
        if last.exists():
            raise OSError("no room on the disk")
        own(self, wanted, arrival)

    with monkeypatch.context() as patch:
        patch.setattr(Pretended, "fetch", fetch)
        with pytest.raises(OSError, match="no room"):
            trained(offloaded(), tmp_path, save_steps=1)
    assert [folder.name for folder in tmp_path.glob("checkpoint-*")] == [last.name]
    assert_same(trained(offloaded(), tmp_path, str(last), save_steps=1), want)


def test_experts_in_files(want, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "PAGE", 4096)
    folder = Path(__file__).parents[2] / "build"
    folder.mkdir(exist_ok=True)
    model = offloaded(memory={"cpu": "2MB"}, offload_folder=folder)
    in_files = [
        bool(m.storage.in_files) for m in model.modules() if isinstance(m, OffloadedExperts)
    ]
    assert in_files[-1]
    assert not in_files[0]
    assert_same(trained(model, tmp_path), want)


def test_fp16(tmp_path):
    x = DATA[0]["input_ids"][None]
    grads = []
    for model in (loaded(torch.float16), offloaded(dtype=torch.float16)):
        model(input_ids=x, labels=x).loss.backward()
        grads.append([p.grad for p in model.parameters() if p.requires_grad])
    assert all(map(torch.equal, *grads))
