"""PEFT's adapters of encoded experts under DDP and FSDP2, or DeepSpeed's ZeRO: run by each rank, on
the CPU or on GPUs.

Two GPUs: pytest -m multi tests/integrations/peft
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import fusion_moe
from fusion_moe.nn.frozen.adaptable import AdaptableModule
from fusion_moe.transformers import from_pretrained

SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 3,
    "num_experts_per_tok": 2,
}

TOKENS = torch.randint(0, 32, (4, 9), generator=torch.Generator().manual_seed(1))


def adapted(seed: int) -> Any:
    """The same model for each seed, other factors."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, initializer_range=0.2))
    fusion_moe.quantize_(model)
    experts = [f"mlp.experts.{name}_proj" for name in ("gate_up", "down")]
    lora = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], target_parameters=experts)
    model = get_peft_model(model, lora)
    g = torch.Generator().manual_seed(seed)
    for p in trained(model):
        p.data.normal_(0, 0.2, generator=g)
    return model


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def sgd(model: Any) -> torch.optim.SGD:
    return torch.optim.SGD(trained(model), lr=0.5)


def steps(model: Any, tokens: Tensor) -> list[Tensor]:
    """The losses of two steps. DeepSpeed's engine has a backward and an optimizer of its own."""
    engine = hasattr(model, "backward")
    optimizer = model if engine else sgd(model)
    found = []
    for _ in range(2):
        loss = model(input_ids=tokens, labels=tokens).loss
        found.append(loss.detach().clone())
        model.backward(loss) if engine else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def ddp(model: Any, device: torch.device) -> Any:
    ids = [device] if device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids)


def fsdp2(model: Any, device: torch.device) -> Any:
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def zero(stage: int, model: Any, device: torch.device) -> Any:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": len(TOKENS) // dist.get_world_size(),
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # at 1 without this line
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=trained(model), optimizer=sgd(model), config=config
    )
    return engine


def check(wrap: Callable[..., Any], checkpointed: bool, device: torch.device) -> None:
    """Each rank trains on its tokens: losses and factors of one process, which has all tokens."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    alone = adapted(0).to(device)
    # DDP gives all ranks the factors of the first; FSDP2 expects them to be the same
    model = adapted(rank if wrap is ddp else 0).to(device)
    if checkpointed:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    want = steps(alone, TOKENS.to(device))
    wrapped = wrap(model, device)
    for loss, whole in zip(steps(wrapped, TOKENS.chunk(ranks)[rank].to(device)), want, strict=True):
        dist.all_reduce(loss)
        assert torch.allclose(loss / ranks, whole, rtol=1e-5), (loss / ranks, whole)
    state, saved = get_peft_model_state_dict(model), get_peft_model_state_dict(alone)
    assert state.keys() == saved.keys()
    for name, t in state.items():
        t = t.full_tensor() if hasattr(t, "full_tensor") else t
        assert (t - saved[name]).norm() <= 1e-4 * saved[name].norm(), name


def check_unsent(folder: str, device: torch.device) -> None:
    """What each rank has read from files stays; factors are those of the first rank."""
    rank = dist.get_rank()
    model = from_pretrained(folder, dtype=torch.float32).to(device)
    lora = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["experts.down_proj"])
    torch.manual_seed(rank)
    model = get_peft_model(model, lora)
    held = next(m for m in model.modules() if isinstance(m, AdaptableModule))
    codes = held.down_proj.data.view(torch.uint8)
    codes += rank
    before = codes.clone()
    ddp(model, device)
    assert torch.equal(codes, before)
    factors = torch.cat([p.detach().flatten() for p in trained(model)])
    first = factors.clone()
    dist.broadcast(first, 0)
    assert torch.equal(factors, first)


WRAPS: dict[str, dict[str, Callable[..., Any]]] = {
    "torch": {"ddp": ddp, "fsdp2": fsdp2},
    "deepspeed": {f"zero{stage}": partial(zero, stage) for stage in (1, 2, 3)},
}


def main(folder: str, device: str, how: str) -> None:
    rank = int(os.environ["RANK"])
    here = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(here)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    for name, wrap in WRAPS[how].items():
        for checkpointed in False, True:
            check(wrap, checkpointed, here)
            print(f"rank {rank} {name} {checkpointed}: agree", flush=True)
    check_unsent(folder, here)
    print(f"rank {rank} unsent: agree", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
