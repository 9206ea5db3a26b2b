"""What ranks check, each in a process of its own: python cases.py FOLDER RANKS [silent]

Each writes FOLDER/RANK.json, the traceback of each case, "" for those that pass.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from experts import experts, float_weights
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

import fusion_moe
from fusion_moe.distributed import parallelize_
from fusion_moe.encodings import MXFP4, quantize
from fusion_moe.errors import OptionError, UnsupportedError
from fusion_moe.nn import Experts

E, H, I, T, K = 7, 64, 160, 13, 3  # neither 2 nor 4 divides E, nor the blocks of I
TIMEOUT_S, SHORT_S = 60, 5
Case = Callable[[DeviceMesh], None]
CASES: dict[str, Case] = {}


def case(f: Case) -> Case:
    CASES[f.__name__] = f
    return f


def inputs(tokens: int = T, slots: int = K) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids and w, the same on all ranks."""
    g = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, E, generator=g).topk(slots).indices
    return torch.randn(tokens, H, generator=g), ids, torch.rand(tokens, slots, generator=g)


def float_experts() -> nn.Module:
    """Those of transformers, which train."""
    import fusion_moe.transformers  # noqa: F401

    config = Qwen3MoeConfig(hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=K)
    config._experts_implementation = "fusion_moe"
    module = Qwen3MoeExperts(config)
    with torch.no_grad():
        for p, values in zip((module.gate_up_proj, module.down_proj), float_weights(E, H, I), strict=True):
            p.copy_(values)
    return module


def divided(module: nn.Module, mesh: DeviceMesh, plan: str, tokens: str = "replicated") -> Any:
    made = deepcopy(module)
    assert parallelize_(made, mesh, plan=plan, tokens=tokens) == [""]
    return made


def assert_alike(found: Any, want: Any) -> None:
    """But for the order in which float32 numbers are added."""
    for a, b in zip(found, want, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm(), (a - b).norm() / b.norm()


def forward_and_backward(module: Callable[..., Tensor], given: Sequence[Tensor] = ()) -> list[Tensor]:
    """The result, and the gradients of tokens and router weights."""
    x, ids, w = given or inputs()
    y = module(x.requires_grad_(), ids, w.requires_grad_())
    y.square().sum().backward()
    return [y, x.grad, w.grad]


@case
def whole_experts(mesh):
    """Each rank keeps its share; the sum is what one process computes, bit for bit where only one rank adds to a token."""
    whole = experts(E, H, I)
    module = divided(whole, mesh, "ep")
    rank, ranks = mesh.get_local_rank(), mesh.size()
    first, end = E * rank // ranks, E * (rank + 1) // ranks
    assert (module.first_expert, len(module.down_proj)) == (first, end - first)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in module.parameters())
    assert module(*inputs(slots=1)).equal(whole(*inputs(slots=1)))
    assert_alike(module(*inputs()), whole(*inputs()))
    x, ids, w = inputs()
    assert module(x, top_k_index=ids, top_k_weights=w).equal(module(x, ids, w))


@case
def uneven_tokens(mesh):
    """All tokens to the experts of one rank, no tokens at all, and ids of no expert."""
    whole = experts(E, H, I)
    module = divided(whole, mesh, "ep")
    x, ids, w = inputs()
    for expert in (0, E - 1):
        one = torch.full_like(ids, expert)
        assert module(x, one, w).equal(whole(x, one, w))
    assert module(x[:0], ids[:0], w[:0]).shape == (0, H)
    for nobody in (-1, E):
        assert not module(x, torch.full_like(ids, nobody), w).any()


@case
def gradients_of_floats(mesh):
    """Of tokens, router weights and a rank's own experts: those of one process."""
    whole = float_experts()
    module = divided(whole, mesh, "ep")
    assert_alike(*(forward_and_backward(m) for m in (module, whole)))
    own = slice(module.first_expert, module.first_expert + len(module.down_proj))
    assert_alike([p.grad for p in module.parameters()], [p.grad[own] for p in whole.parameters()])


@case
def adapters(mesh):
    """They go with their experts, and train."""
    torch.manual_seed(3)  # ranks have the same adapters
    whole = experts(E, H, I)
    fusion_moe.nn.add_lora_(whole, rank=4)
    for name, p in whole.named_parameters():
        if name.endswith(".B"):
            nn.init.normal_(p, std=0.1)
    module = divided(whole, mesh, "ep")
    assert_alike(*(forward_and_backward(m) for m in (module, whole)))
    own = slice(module.first_expert, module.first_expert + len(module.down_proj))
    trained = [[p.grad for p in m.parameters() if p.requires_grad] for m in (module, whole)]
    assert_alike(trained[0], [grad[own] for grad in trained[1]])


def variants() -> list[Experts]:
    """Experts as plan "tp" meets them: two scales a matrix, gate and up in turns with biases, blocks of 32, floats."""
    gate_up, down = float_weights(E, H, I)
    bias = {"gate_up_bias": torch.randn(E, 2 * I), "down_bias": torch.randn(E, H)}
    mxfp4 = (quantize(w, encoding=MXFP4) for w in (gate_up, down))
    turns = experts(E, H, I)
    in_turns = Experts(turns.weight_of("gate_up").with_(decode_scale=turns.up_decode_scale), turns.weight_of("down"), interleave=1, **bias)
    return [experts(E, H, I), in_turns, Experts(*mxfp4, interleave=8), Experts(*mxfp4_rows(gate_up, down))]


def mxfp4_rows(gate_up: Tensor, down: Tensor) -> Any:
    """NVFP4 with a decode scale of each row."""
    from fusion_moe.encodings import NVFP4, Quantized

    for w in gate_up, down:
        codes, block_scale, decode_scale = torch.ops.fusion_moe.nvfp4_quantize(w[:, :, None])
        yield Quantized(codes[:, :, 0], block_scale[:, :, 0], decode_scale, encoding=NVFP4)


@case
def features(mesh):
    """Rows of gate and up, columns of down: the sum over ranks is what one process computes."""
    torch.manual_seed(0)
    for whole in variants():
        module = divided(whole, mesh, "tp")
        assert module.first_expert is None
        assert module.nbytes < whole.nbytes * (1 / mesh.size() + 0.25)
        assert_alike(*(forward_and_backward(m) for m in (module, whole)))


def of_rank(mesh: DeviceMesh, tensors: Sequence[Tensor]) -> list[Tensor]:
    """A rank's own tokens, of as many for each."""
    return [t.chunk(mesh.size())[mesh.get_rank()].clone() for t in tensors]


def sharded(mesh: DeviceMesh, plan: str, whole: nn.Module, divided_mesh: DeviceMesh) -> Any:
    """A module with tokens of its own on each rank, whose results and gradients are a part of one process's."""
    given = inputs(4 * mesh.size())
    module = divided(whole, divided_mesh, plan, "sharded")
    assert_alike(forward_and_backward(module, of_rank(mesh, given)), of_rank(mesh, forward_and_backward(whole, given)))
    return module


@case
def tokens_of_a_rank(mesh):
    """Sharded tokens: of floats the gradients of a rank's experts are those of all tokens."""
    sharded(mesh, "ep", experts(E, H, I), mesh)
    sharded(mesh, "tp", experts(E, H, I), mesh)
    whole = float_experts()
    module = sharded(mesh, "ep", whole, mesh)
    own = slice(module.first_expert, module.first_expert + len(module.down_proj))
    assert_alike([p.grad for p in module.parameters()], [p.grad[own] for p in whole.parameters()])
    x, ids, w = inputs()
    assert module(x[:0], ids[:0], w[:0]).shape == (0, H)


@case
def experts_and_features(mesh):
    """Experts along one dimension of a mesh, their features along the other."""
    whole = experts(E, H, I)
    for shape in {(mesh.size() // 2, 2), (2, mesh.size() // 2)}:
        both = init_device_mesh("cpu", shape, mesh_dim_names=("ep", "tp"))
        module = divided(whole, both, "ep_tp")
        assert len(module.down_proj) in (E // shape[0], E // shape[0] + 1)
        assert module.nbytes < whole.nbytes * (1 / mesh.size() + 0.25)
        assert_alike(*(forward_and_backward(m) for m in (module, whole)))
        sharded(mesh, "ep_tp", whole, both)


@case
def compiled(mesh):
    """In one graph, whose collectives are operations of torch, forward and backward."""
    if mesh.size() > 2:
        return  # compiling takes long
    for backend, tokens in ("fusion_moe", "replicated"), ("inductor", "sharded"):
        module, outcomes = divided(experts(E, H, I), mesh, "ep", tokens), []
        for f in module, torch.compile(module, backend=backend, fullgraph=True):
            outcomes.append(forward_and_backward(f))
        assert_alike(*outcomes)


def refuses(error: type[Exception], part: str, f: Callable[[], Any]) -> None:
    try:
        f()
    except error as raised:
        if part not in str(raised):
            raise
    else:
        raise AssertionError(f"nothing refused: {part}")


@case
def refusals(mesh):
    """Nothing is changed by what fails."""
    few, whole = experts(1, H, I), experts(E, H, I)
    before = len(whole.down_proj)
    refuses(UnsupportedError, f"1 experts for {mesh.size()} ranks", lambda: parallelize_(few, mesh))
    refuses(UnsupportedError, "no modules of experts", lambda: parallelize_(nn.Linear(2, 2), mesh))
    refuses(OptionError, "plan = 'tpp'", lambda: parallelize_(whole, mesh, plan="tpp"))
    refuses(OptionError, "tokens = 'split'", lambda: parallelize_(whole, mesh, tokens="split"))
    refuses(OptionError, "a NoneType", lambda: parallelize_(whole, None))
    refuses(OptionError, "a mesh with ndim = 1", lambda: parallelize_(whole, mesh, plan="ep_tp"))
    two = init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("dp", "ep"))
    refuses(OptionError, "a mesh with ndim = 2", lambda: parallelize_(whole, two))
    refuses(UnsupportedError, "a Qwen3MoeExperts whose features", lambda: parallelize_(float_experts(), mesh, plan="tp"))
    eager = float_experts()
    eager.config._experts_implementation = "eager"
    refuses(UnsupportedError, "experts that transformers computes", lambda: parallelize_(eager, mesh))
    adapted = experts(E, H, I)
    fusion_moe.nn.add_lora_(adapted, rank=4)
    refuses(UnsupportedError, "adapters", lambda: parallelize_(adapted, mesh, plan="tp"))
    narrow = experts(E, H, 16)
    refuses(UnsupportedError, "16 intermediate features", lambda: parallelize_(narrow, mesh, plan="tp"))
    assert len(whole.down_proj) == before
    assert parallelize_(whole, two["ep"]) == [""]
    refuses(UnsupportedError, "divided already", lambda: parallelize_(whole, mesh))


def silent(mesh):
    """The last rank dies: the others get an error within the timeout of the process group."""
    module, given = divided(experts(E, H, I), mesh, "ep"), inputs()
    module(*given)
    if mesh.get_local_rank() == mesh.size() - 1:
        os._exit(0)
    began = time.monotonic()
    try:
        module(*given)
    except RuntimeError as error:
        assert time.monotonic() - began < 2 * SHORT_S
        print(error, flush=True)
    else:
        raise AssertionError("no error")


def run(rank: int, ranks: int, folder: str, chosen: Mapping[str, Case], timeout_s: int) -> None:
    """One process: what it finds goes to FOLDER/RANK.json."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timeout)
    mesh, outcomes = init_device_mesh("cpu", (ranks,)), {}
    for name, f in chosen.items():
        try:
            f(mesh)
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
    Path(folder, f"{rank}.json").write_text(json.dumps(outcomes))
    os._exit(0)  # without the others, of which one may be gone


def main(folder: str, ranks: str, name: str = "") -> None:
    chosen, timeout_s = ({name: silent}, SHORT_S) if name else (CASES, TIMEOUT_S)
    fork = multiprocessing.get_context("fork")  # imports take longer than cases
    started = [fork.Process(target=run, args=(rank, int(ranks), folder, chosen, timeout_s)) for rank in range(int(ranks))]
    for process in started:
        process.start()
    for process in started:
        process.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
