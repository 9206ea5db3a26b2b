"""A process of its own: an engine takes the weights of a trainer, which two ranks have in shares
(FSDP2), one parameter at a time by transformers' names. Prints, as JSON, what was generated before
and after, and by a new engine of a directory of the trainer's weights, in the same format.

Arguments: a folder to write to, a format, whether a trainer shares the parameters ("2") or has
all of them ("1"), and whether it sends all experts of a layer together ("whole"), one after the
other ("each"), or some of both, and these in two dtypes ("mixed").
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn

DEMO = Path(__file__).resolve().parents[3] / "examples" / "tiny_qwen3_moe"
PROMPTS = [[3, 9, 27, 20, 5, 11, 30], [8, 4]]


def floats(folder: Path, seed: int) -> Path:
    """The demo in bf16, its head by itself: vLLM on CPUs has a packed copy of a tied one. seed: of
    what its weights are multiplied by.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.bfloat16)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    model.config.tie_word_embeddings = False
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters() if seed else ():
            p.mul_(1 + 0.2 * torch.randn(p.shape, generator=g).bfloat16())
    model.save_pretrained(folder)
    for file in DEMO.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def train(rank: int, ranks: int, directory: Path, rendezvous: str, pipe: Any) -> None:
    """A rank of a trainer: sends whole parameters by name, then None."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    if ranks > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        torch.distributed.init_process_group(
            "gloo", init_method=rendezvous, rank=rank, world_size=ranks
        )
        for layer in model.model.layers:
            fully_shard(layer, mesh=init_device_mesh("cpu", (ranks,)))
    for name, p in model.named_parameters():
        whole = p.full_tensor() if ranks > 1 and hasattr(p, "full_tensor") else p
        if rank == 0:
            pipe.send((name, whole.detach().view(torch.int16).numpy()))
    if rank == 0:
        pipe.send(None)
        pipe.recv()  # all were taken
    if ranks > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def main() -> None:
    from vllm import LLM, SamplingParams

    from fusion_moe.checkpoints import quantize

    folder, encoding, ranks, form = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    old, new = floats(folder / "old", 0), floats(folder / "new", 1)

    def engine(directory: Path) -> Any:
        return LLM(
            str(quantize(directory, folder / f"{directory.name}-{encoding}", to=encoding)),
            quantization="fusion_moe",
            skip_tokenizer_init=True,
            max_num_seqs=4,
            seed=0,
            max_model_len=64,
            enforce_eager=True,
            dtype="bfloat16",
        )

    def generated(llm: Any) -> list[Any]:
        sampling = SamplingParams(
            max_tokens=6, temperature=0, logprobs=0, detokenize=False, ignore_eos=True
        )
        asked = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        return [
            [(token, at[token].logprob) for token, at in zip(o.token_ids, o.logprobs, strict=True)]
            for o in (a.outputs[0] for a in llm.generate(asked, sampling, use_tqdm=False))
        ]

    def addresses(llm: Any) -> list[int]:
        (model,) = llm.collective_rpc("get_model")
        return [p.data_ptr() for name, p in model.named_parameters() if "fusion_moe" in name]

    found: dict[str, Any] = {"new engine": generated(engine(new))}
    llm = engine(old)
    found["before"], where = generated(llm), addresses(llm)
    ours, theirs = mp.Pipe()
    rendezvous = f"file://{folder}/rendezvous"
    trainers = mp.start_processes(  # which end with this process, also after an error
        train, (ranks, new, rendezvous, theirs), ranks, False, daemon=True, start_method="spawn"
    )

    buffer = torch.empty(1 << 16, dtype=torch.bfloat16)  # used again, as NCCL's are

    def alone(name: str, t: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The matrices of all experts one by one, every second in float32 if forms are mixed."""
        before, projection = name.split(".experts.")
        parts = ["down_proj"] if projection == "down_proj" else ["gate_proj", "up_proj"]
        for e, both in enumerate(t):
            for part, matrix in zip(parts, both.chunk(len(parts)), strict=True):
                sent = buffer[: matrix.numel()].view_as(matrix).copy_(matrix)
                sent = sent.float() if form == "mixed" and e % 2 else sent
                yield f"{before}.experts.{e}.{part}.weight", sent

    def parameters() -> Iterator[tuple[str, torch.Tensor]]:
        for name, sent in iter(ours.recv, None):
            t = torch.from_numpy(sent).view(torch.bfloat16)
            whole = form == "whole" or (form == "mixed" and "down_proj" not in name)
            if whole or ".experts." not in name:
                yield name, t
            else:
                yield from alone(name, t)

    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": parameters()})
    llm.reset_prefix_cache()
    ours.send(None)
    found["after"] = generated(llm)
    while not trainers.join():
        pass
    found["addresses stay"] = bool(where) and addresses(llm) == where
    print("FOUND", json.dumps(found))


if __name__ == "__main__":
    main()
