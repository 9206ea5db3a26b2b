"""What ranks check, each in a process of its own: cases.py FOLDER DEVICE RANKS[:[-]CASE,...] ...

One group of processes after another, all cases if none is named, all others after a -. Each process
writes FOLDER/GROUP.RANK.json, the traceback of each case, "" for those that pass.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import precompiled
import torch
import torch._dynamo  # once for all ranks
import torch._inductor.compile_fx
import torch.distributed as dist
from experts import experts as experts_on_cpu, float_weights
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint as recompute
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

import fusion_moe
import fusion_moe.transformers as ours
from fusion_moe.checkpoints import Directory
from fusion_moe.distributed import clip_grad_norm_, parallelize_, symmetric
from fusion_moe.distributed.collectives import all_reduce
from fusion_moe.encodings import ENCODINGS, MXFP4, NVFP4, Quantized, quantize
from fusion_moe.errors import OptionError, RankError, ShapeError, UnsupportedError
from fusion_moe.frontends.inductor import compile_graph
from fusion_moe.lora.files import load_lora_, save_lora
from fusion_moe.nn import (
    Experts,
    GroupedLinear,
    QuantizedLinear,
    add_lora_,
    swiglu,
    update_weights_,
)
from fusion_moe.nn.local import gathered, local
from fusion_moe.recorder import Run
from fusion_moe.recorder.data import of_json

E, H, I, T, K = 7, 64, 160, 13, 3  # neither 2 nor 4 divides E, nor the blocks of I
TIMEOUT_S, SHORT_S = 600, 5
DEVICE = sys.argv[2]  # "cpu", over gloo, or "cuda", over NCCL, where kernels compute in bf16
ON = {"device": DEVICE, "dtype": torch.float32 if DEVICE == "cpu" else torch.bfloat16}
# before, it makes parameters that want a gradient of all that it divides
FSDP2_TAKES_INTEGERS = torch.__version__ >= "2.13"
LIMIT = 1e-5 if DEVICE == "cpu" else 2e-2  # relative Frobenius error
# in proportion to gradients: without eps, steps are as long for gradients that are only roundings
STEP = {"lr": 1.0, "eps": 0.1}
Case = Callable[[DeviceMesh], None]
CASES: dict[str, Case] = {}
LOST: dict[str, Case] = {}  # of a group of its own each
RANKS: list[dist.Store] = []  # where those of a group count themselves


def case(f: Case, among: dict[str, Case] = CASES) -> Case:
    among[f.__name__] = f
    return f


def lost(f: Case) -> Case:
    return case(f, LOST)


def inputs(tokens: int = T, slots: int = K) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids and w, the same on all ranks."""
    g = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, E, generator=g).topk(slots).indices.to(DEVICE)
    return (
        torch.randn(tokens, H, generator=g).to(**ON),
        ids,
        torch.rand(tokens, slots, generator=g).to(**ON),
    )


def experts(*shape: int) -> nn.Module:
    return experts_on_cpu(*shape).to(DEVICE)


def float_experts() -> nn.Module:
    """Those of transformers, which train."""
    config = Qwen3MoeConfig(
        hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=K
    )
    config._experts_implementation = "fusion_moe"
    module = Qwen3MoeExperts(config)
    with torch.no_grad():
        for p, values in zip(
            (module.gate_up_proj, module.down_proj), float_weights(E, H, I), strict=True
        ):
            p.copy_(values)
    return module.to(**ON)


def divided(
    module: nn.Module, mesh: DeviceMesh, plan: str, tokens: str = "replicated", **options: Any
) -> Any:
    made = deepcopy(module)
    assert parallelize_(made, mesh, plan=plan, tokens=tokens, **options) == [""]
    return made


def assert_alike(found: Any, want: Any) -> None:
    """But for the order in which float32 numbers are added, and on CUDA for roundings to bf16."""
    for a, b in zip(found, want, strict=True):
        assert (a - b).norm() <= LIMIT * b.norm(), (a - b).norm() / b.norm()


def assert_equal(found: Tensor, want: Tensor) -> None:
    """In each bit where both computations are the same; on CUDA kernels are chosen by sizes."""
    assert found.equal(want) if DEVICE == "cpu" else found.shape == want.shape
    assert_alike([found], [want])


def forward_and_backward(
    module: Callable[..., Tensor], given: Sequence[Tensor] = ()
) -> list[Tensor]:
    """The result, and the gradients of tokens and router weights."""
    x, ids, w = given or inputs()
    y = module(x.requires_grad_(), ids, w.requires_grad_())
    y.square().sum().backward()
    return [y, x.grad, w.grad]


@case
def whole_experts(mesh):
    """Each rank keeps its share; the sum is what one process computes, bit for bit where only one
    rank adds to a token.
    """
    whole = experts(E, H, I)
    module = divided(whole, mesh, "ep")
    first, end = ranges(mesh.size())[mesh.get_local_rank()]
    assert (module.first_expert, len(module.down_proj)) == (first, end - first)
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in module.parameters())
    assert_equal(module(*inputs(slots=1)), whole(*inputs(slots=1)))
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
        assert_equal(module(x, one, w), whole(x, one, w))
    assert module(x[:0], ids[:0], w[:0]).shape == (0, H)
    for nobody in (-1, E):
        assert not module(x, torch.full_like(ids, nobody), w).any()


def adapted_experts() -> nn.Module:
    """Encoded experts with adapters that add something."""
    torch.manual_seed(3)  # ranks have the same adapters
    whole = experts(E, H, I)
    fusion_moe.nn.add_lora_(whole, rank=4)
    for name, p in whole.named_parameters():
        if name.endswith(".B"):
            nn.init.normal_(p, std=0.1)
    return whole


@case
def gradients_of_what_trains(mesh):
    """Of tokens, router weights, and a rank's own experts or adapters: those of one process."""
    for whole in float_experts(), adapted_experts():
        module = divided(whole, mesh, "ep")
        assert_alike(*(forward_and_backward(m) for m in (module, whole)))
        assert_same_gradients(module, whole, mesh)


@case
def with_kernels(mesh):
    """The others run in plain torch on CPUs: to compile kernels for all takes longer."""
    with fusion_moe.options.override(target="auto"):
        whole_experts(mesh)


def variants() -> list[Experts]:
    """Experts as plan "tp" meets them: two scales a matrix, gate and up interleaved with biases,
    blocks of 32, scales of rows, of halves.
    """
    gate_up, down = float_weights(E, H, I)
    bias = {"gate_up_bias": torch.randn(E, 2 * I), "down_bias": torch.randn(E, H)}
    mxfp4 = (quantize(w, encoding=MXFP4) for w in (gate_up, down))
    turns = experts_on_cpu(E, H, I)
    interleaved = Experts(
        turns.weight_of("gate_up").with_(decode_scale=turns.gate_up_decode_scale[:, 1]),
        turns.weight_of("down"),
        activation=swiglu(interleave=1),
        **bias,
    )
    halves = Experts(
        turns.weight_of("gate_up"), turns.weight_of("down"), activation=swiglu(interleave=1)
    )  # each with a scale, of whose rows ranks have others
    made = (
        turns,
        interleaved,
        Experts(*mxfp4, activation=swiglu(interleave=8)),
        Experts(*scales_of_rows(gate_up, down)),
        halves,
    )
    return [module.to(DEVICE) for module in made]


def scales_of_rows(gate_up: Tensor, down: Tensor) -> Any:
    """NVFP4 with a decode scale of each row."""
    for w in gate_up, down:
        codes, block_scale, decode_scale = torch.ops.fusion_moe.nvfp4_quantize(w[:, :, None])
        yield Quantized(codes[:, :, 0], block_scale[:, :, 0], decode_scale, encoding=NVFP4)


def assert_same_gradients(module: nn.Module, whole: nn.Module, mesh: DeviceMesh) -> None:
    """Of what trains: a rank's part of those of one process."""
    own = slice(*ranges(mesh.size())[mesh.get_local_rank()])
    found = [p.grad.to_local() for p in module.parameters() if p.requires_grad]
    assert found
    assert_alike(found, [p.grad[own] for p in whole.parameters() if p.requires_grad])


@case
def features(mesh):
    """Rows of gate and up, columns of down: the sum over ranks is what one process computes."""
    torch.manual_seed(0)
    for whole in variants():
        module = divided(whole, mesh, "tp")
        assert module.first_expert is None
        assert module.nbytes < whole.nbytes * (1 / mesh.size() + 0.25)
        assert_alike(*(forward_and_backward(m) for m in (module, whole)))


@case
def new_weights(mesh):
    """Of all experts or of a rank's, in the order of the float module; a bias that one rank has."""
    gate_up, down = float_weights(E, H, I, seed=7)
    new = {"gate_up_proj": gate_up.mT, "down_proj": down.mT}
    whole = experts(E, H, I)
    whole.transposed = True
    of_all, of_rank = (divided(whole, mesh, "ep") for _ in range(2))
    update_weights_(whole, new)
    update_weights_(of_all, new)
    update_weights_(of_rank, {name: t[slice(*of_ranks(of_rank))] for name, t in new.items()})
    for module in of_all, of_rank:
        assert_equal(module(*inputs(slots=1)), whole(*inputs(slots=1)))
    features = divided(whole, mesh, "tp")
    refuses(
        UnsupportedError,
        "down_proj, numbers of features that are divided",
        lambda: update_weights_(features, {"down_proj": down.mT}),
    )
    biased = variants()[1]
    module, bias = divided(biased, mesh, "tp"), {"down_proj_bias": torch.ones(E, H)}
    for each in module, biased:
        update_weights_(each, bias)
    assert_alike(module(*inputs()), biased(*inputs()))


def of_ranks(module: Experts) -> tuple[int, int]:
    return module.first_expert, module.first_expert + len(module.down_proj)


def two_dimensions(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks of a mesh, two of them along "ep"."""
    along = min(2, mesh.size())
    return init_device_mesh(DEVICE, (along, mesh.size() // along), mesh_dim_names=("ep", "tp"))


def of_rank(mesh: DeviceMesh, tensors: Sequence[Tensor]) -> list[Tensor]:
    """A rank's own tokens, of as many for each."""
    return [t.chunk(mesh.size())[mesh.get_rank()].clone() for t in tensors]


def sharded(
    mesh: DeviceMesh, plan: str, whole: nn.Module, divided_mesh: DeviceMesh, **options: Any
) -> Any:
    """A module with tokens of its own on each rank, whose results and gradients are a part of one
    process's.
    """
    given = inputs(4 * mesh.size())
    module = divided(whole, divided_mesh, plan, "sharded", **options)
    assert_alike(
        forward_and_backward(module, of_rank(mesh, given)),
        of_rank(mesh, forward_and_backward(whole, given)),
    )
    return module


@case
def tokens_of_a_rank(mesh):
    """Sharded tokens: of floats the gradients of a rank's experts are those of all tokens."""
    sharded(mesh, "ep", experts(E, H, I), mesh)
    sharded(mesh, "tp", experts(E, H, I), mesh)
    whole = float_experts()
    module = sharded(mesh, "ep", whole, mesh)
    assert_same_gradients(module, whole, mesh)
    x, ids, w = inputs()
    assert module(x[:0], ids[:0], w[:0]).shape == (0, H)


@case
def tokens_sent_to_experts(mesh):
    """All-to-all: as if all ranks had all tokens, of floats, of adapters, and with features divided
    too.
    """
    send = {"dispatch": "all_to_all"}
    sharded(mesh, "ep", experts(E, H, I), mesh, **send)
    for whole in float_experts(), adapted_experts():
        assert_same_gradients(sharded(mesh, "ep", whole, mesh, **send), whole, mesh)
    both = two_dimensions(mesh)
    sharded(mesh, "ep_tp", experts(E, H, I), both, **send)

    whole = experts(E, H, I)
    module = divided(whole, mesh, "ep", "sharded", **send)
    all_x, all_ids, all_w = inputs(4 * mesh.size())
    x, ids, w = of_rank(mesh, [all_x, all_ids, all_w])
    one = torch.full_like(all_ids, E - 1)
    for those in all_ids[:, :1], one[:, :1], one:  # one rank adds to a token
        v = all_w[:, : those.shape[1]]
        assert_equal(
            module(x, *of_rank(mesh, [those, v])), *of_rank(mesh, [whole(all_x, those, v)])
        )
    assert module(x.view(2, -1, H), ids, top_k_weights=w).equal(module(x, ids, w).view(2, -1, H))
    assert deepcopy(module)(x, ids, w).equal(module(x, ids, w))
    for nobody in (-1, E, 2**40):
        assert not module(x, torch.full_like(ids, nobody), w).any()
    assert module(x[:0], ids[:0], w[:0]).shape == (0, H)
    assert not module.dropped
    assert "dropped" not in module.state_dict()


@case
def numbers_of_tokens_that_differ(mesh):
    """A capacity in tokens: the first rank has none, each other one more than the one before; then
    all of them go to the last expert.
    """
    ranks, rank = mesh.size(), mesh.get_rank()
    mine = slice(rank * (rank - 1) // 2, rank * (rank + 1) // 2)
    for whole in float_experts(), adapted_experts():
        module = divided(whole, mesh, "ep", "sharded", dispatch="all_to_all", capacity=ranks)
        x, ids, w = inputs(ranks * (ranks - 1) // 2)
        for those in ids, torch.full_like(ids, E - 1):
            whole.zero_grad()
            module.zero_grad()
            want = [t[mine] for t in forward_and_backward(whole, [x.clone(), those, w.clone()])]
            found = forward_and_backward(module, [t[mine].clone() for t in (x, those, w)])
            assert found[0].shape == (rank, H)
            assert_alike(found, want)
            assert_same_gradients(module, whole, mesh)
        assert not module.dropped


def on_the_way(whole: nn.Module, mesh: DeviceMesh, given: Sequence[Tensor], **more: Any) -> None:
    """Shared memory gives what all-to-all gives, in each bit, and what one process computes."""
    symmetric, sent = (
        divided(whole, mesh, "ep", "sharded", dispatch=way, **more)
        for way in ("symmetric", "all_to_all")
    )
    found = symmetric(*given)
    assert_equal(found, sent(*given))
    assert_alike([found], [whole(*given)])
    assert deepcopy(symmetric)(*given).equal(found)


@case
@torch.no_grad()
def tokens_through_shared_memory(mesh):
    """Equally many on all ranks, and more in a later call; numbers that differ, by a capacity."""
    rank = mesh.get_rank()
    for whole in experts(E, H, I), adapted_experts():
        for tokens in (5, 1, 0, 40):
            on_the_way(whole, mesh, of_rank(mesh, inputs(tokens * mesh.size())))
        x, ids, w = inputs(3 * mesh.size())
        mine = slice(3 * rank, 3 * rank + (0 if rank == 0 else 3))
        for those in ids, torch.full_like(ids, E - 1), torch.full_like(ids, -1):
            on_the_way(whole, mesh, [t[mine] for t in (x, those, w)], capacity=7)
    whole = experts(E, H, I)
    module = divided(whole, mesh, "ep", "sharded", dispatch="symmetric", float32_sums=True)
    x, ids, w = of_rank(mesh, inputs(4 * mesh.size()))
    for dtype in {ON["dtype"], torch.bfloat16}:
        found, want = module(x.to(dtype), ids, w), whole(x.to(dtype), ids, w)
        assert (found - want).norm() <= (LIMIT if dtype == torch.float32 else 2e-2) * want.norm()
    module = divided(experts(E, H, I), mesh, "ep", "sharded", dispatch="symmetric", capacity=3)
    refuses(ShapeError, "4 tokens; expected at most 3", lambda: module(*inputs(4)))
    x, ids, w = of_rank(mesh, inputs(4 * mesh.size()))
    assert divided(experts(E, H, I), mesh, "ep", "sharded", dispatch="symmetric")(
        x.view(2, -1, H), ids, top_k_weights=w
    ).shape == (2, 2, H)


@case
def kernels_through_shared_memory(mesh):
    """What replaces the reference on CPUs."""
    with fusion_moe.options.override(target="auto"):
        tokens_through_shared_memory(mesh)


def gradients(
    f: Callable[..., Tensor], given: Sequence[Tensor], of: Sequence[Tensor] = ()
) -> list[Tensor]:
    """The result, and for a gradient of it that is drawn for its tokens: those of tokens, router
    weights and, added to what is there, parameters.
    """
    x, ids, w = (t.detach().clone() for t in given)
    y = f(x.requires_grad_(), ids, w.requires_grad_())
    y.backward(upstream(y, given))
    return [y.detach(), x.grad, w.grad, *(local(p.grad) for p in of)]  # type: ignore[list-item]


def upstream(y: Tensor, given: Sequence[Tensor]) -> Tensor:
    """A gradient of y that depends on each token alone, wherever it is."""
    return (3 * given[0].flip(-1)).sin().to(y.dtype)


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def assert_same_as_one(
    found: Sequence[Tensor],
    whole: nn.Module,
    mesh: DeviceMesh,
    given: Sequence[Tensor],
    mine: slice,
) -> None:
    """Of a rank: router weights and what trains in each bit, since an expert gets the same rows in
    the same order; sums over ranks but for their order.
    """
    y, dx, dw, *of = gradients(whole, given, trained(whole))
    own = slice(*ranges(mesh.size())[mesh.get_local_rank()])
    assert_alike(found[:2], [y[mine], dx[mine]])
    for a, b in zip(found[2:], [dw[mine], *(g[own] for g in of)], strict=True):
        assert_equal(a, b)


@case
def gradients_through_shared_memory(mesh):
    """Of floats and of adapters: those of all-to-all in each bit, and of one process; of equally
    many tokens, of numbers that differ, none among them, and of ids of nobody.
    """
    rank, ranks = mesh.get_rank(), mesh.size()
    for whole in float_experts(), adapted_experts():
        given, each = inputs(4 * ranks), slice(4 * rank, 4 * rank + 4)
        ways = [
            divided(whole, mesh, "ep", "sharded", dispatch=w) for w in ("symmetric", "all_to_all")
        ]
        found, sent = (gradients(m, [t[each] for t in given], trained(m)) for m in ways)
        for a, b in zip(found, sent, strict=True):
            assert_equal(a, b)
        whole.zero_grad()
        assert_same_as_one(found, whole, mesh, given, each)
        module = divided(whole, mesh, "ep", "sharded", dispatch="symmetric", capacity=2 * ranks)
        mine = slice(rank * (rank - 1), rank * (rank + 1))  # the first has none
        x, ids, w = inputs(ranks * (ranks - 1))
        for those in ids, torch.full_like(ids, E - 1), torch.full_like(ids, -1):
            whole.zero_grad()
            module.zero_grad()
            found = gradients(module, [t[mine] for t in (x, those, w)], trained(module))
            assert_same_as_one(found, whole, mesh, [x, those, w], mine)


@case
def gradients_by_kernels(mesh):
    """What replaces the reference on CPUs."""
    with fusion_moe.options.override(target="auto"):
        gradients_through_shared_memory(mesh)


@case
def backwards_of_several_calls(mesh):
    """Calls of two layers, whose memory grows before the first backward; gradients are added up,
    recomputed activations give the same ones, and only weights may want some.
    """
    rank, ranks = mesh.get_rank(), mesh.size()
    wholes = [float_experts(), adapted_experts()]
    modules = [divided(m, mesh, "ep", "sharded", dispatch="symmetric") for m in wholes]
    batches = [inputs(t * ranks) for t in (3, 50)]
    mines = [slice(t * rank, t * rank + t) for t in (3, 50)]

    def both(layers: Sequence[nn.Module]) -> Callable[..., Tensor]:
        return lambda x, ids, w: layers[1](layers[0](x, ids, w), ids.flip(-1), w)

    def recomputed(layers: Sequence[nn.Module]) -> Callable[..., Tensor]:
        return lambda *given: recompute(both(layers), *given, use_reentrant=False)

    for f in both, recomputed:
        for m in (*wholes, *modules):
            m.zero_grad()
        found: list[list[Tensor]] = []
        for layers, a_part in (modules, True), (wholes, False):
            given = [
                [t[mine] for t in b] if a_part else [*b]
                for b, mine in zip(batches, mines, strict=True)
            ]
            xs = [g[0].clone().requires_grad_() for g in given]
            ys = [f(layers)(x, *g[1:]) for x, g in zip(xs, given, strict=True)]
            for y, g in reversed([*zip(ys, given, strict=True)]):
                y.backward(upstream(y, g))
            found.append([x.grad for x in xs])  # type: ignore[misc]
        assert_alike(found[0], [g[mine] for g, mine in zip(found[1], mines, strict=True)])
        for module, whole in zip(modules, wholes, strict=True):
            assert_same_gradients(module, whole, mesh)

    whole = wholes[0]
    layers = [divided(whole, mesh, "ep", "sharded", dispatch="symmetric") for _ in range(3)]
    given = of_rank(mesh, inputs(4 * ranks))
    for _ in range(2):
        sum(layer(*given) for layer in layers).sum().backward()
    whole.zero_grad()
    (2 * whole(*inputs(4 * ranks))).sum().backward()
    for layer in layers:
        assert_same_gradients(layer, whole, mesh)


@case
def gradients_beside_sums_in_float32(mesh):
    """Sent in 16 bits all the same."""
    whole = float_experts().to(torch.bfloat16)
    module = divided(whole, mesh, "ep", "sharded", dispatch="symmetric", float32_sums=True)
    given = [t.bfloat16() if t.is_floating_point() else t for t in inputs(4 * mesh.size())]
    found = gradients(module, of_rank(mesh, given), trained(module))
    want = gradients(whole, given, trained(whole))
    own = slice(*ranges(mesh.size())[mesh.get_local_rank()])
    for a, b in zip(found, [*of_rank(mesh, want[:3]), *(g[own] for g in want[3:])], strict=True):
        assert (a - b).float().norm() <= 2e-2 * b.float().norm()


@case
def what_goes_through_collectives(mesh):
    """Experts that are more than one operation: it is said once."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fusion_moe").addHandler(handler)
    whole = float_experts()
    whole.has_post_expert_norm, whole.post_expert_norm = True, nn.Identity()
    try:
        sharded(mesh, "ep", whole, mesh, dispatch="symmetric")
    finally:
        logging.getLogger("fusion_moe").removeHandler(handler)
    (told,) = ([message] for message in told if "symmetric" in message)
    assert "a Qwen3MoeExperts is more than one operation" in told[0]


@case
@torch.no_grad()
def ranks_that_share_no_memory(mesh):
    """On another node, or refused by the system: they go through collectives, all of them."""

    def refused(*_: Any) -> Any:
        raise RuntimeError("no memory is shared here")

    how: list[tuple[str, Any]] = [("_in_a_file", refused), ("_on_gpus", refused)]
    if mesh.size() > 1:
        how.append(("_place", lambda _: (str(mesh.get_rank()), "", None)))
    for name, instead in how:
        where: Any = symmetric if name == "_place" else symmetric.GroupMemory
        original = getattr(where, name)
        mine = init_device_mesh(DEVICE, (mesh.size(),), mesh_dim_names=(name.strip("_"),))
        setattr(where, name, instead)
        symmetric.GroupMemory._of_groups.clear()
        try:
            whole = experts(E, H, I)
            module = divided(whole, mine, "ep", "sharded", dispatch="symmetric")
            assert (mine.get_group().group_name in symmetric.GroupMemory._of_groups) == (
                name not in ("_place", {"cpu": "_in_a_file", "cuda": "_on_gpus"}[DEVICE])
            )
            given = of_rank(mesh, inputs(4 * mesh.size()))
            assert_alike([module(*given)], [whole(*given)])
        finally:
            setattr(where, name, original)
            symmetric.GroupMemory._of_groups.clear()


@case
@torch.no_grad()
def compiled_with_shared_memory(mesh):
    """One graph, in which tokens are sent by the operation itself; two layers, two modules."""
    with fusion_moe.options.override(target="auto"):
        given = of_rank(mesh, inputs(4 * mesh.size()))
        for whole in experts(E, H, I), adapted_experts():
            module = divided(whole, mesh, "ep", "sharded", dispatch="symmetric")
            want = module(*given)
            torch._dynamo.reset()
            f = torch.compile(module, backend="aot_eager", fullgraph=True)
            assert f(*given).equal(want)
            assert f(*given).equal(module(*given))


@case
def compiled_gradients_through_shared_memory(mesh):
    """One graph for each pass, in which tokens are sent by the operations themselves."""
    floats = [float_experts] if torch.__version__ >= "2.13" else []  # as in `compiled`
    given = of_rank(mesh, inputs(4 * mesh.size()))
    for made, backend in zip((adapted_experts, *floats), ("aot_eager", "fusion_moe"), strict=False):
        module = divided(made(), mesh, "ep", "sharded", dispatch="symmetric")
        torch._dynamo.reset()
        outcomes = []
        for f in module, torch.compile(module, backend=backend, fullgraph=True):
            module.zero_grad()
            outcomes.append([t.clone() for t in gradients(f, given, trained(module))])
        assert_alike(*outcomes)


@case
@torch.no_grad()
def replays_of_shared_memory(mesh):
    """CUDA graphs of two layers, replayed with other tokens, by ranks that are late now and then;
    on CPUs calls.
    """
    graphs = DEVICE == "cuda"
    with fusion_moe.options.override(target="auto" if graphs else "reference"):
        replays(mesh, graphs)


def replays(mesh: DeviceMesh, graphs: bool) -> None:
    layers = [divided(experts(E, H, I), mesh, "ep", "sharded", dispatch="symmetric")] * 2
    layers[1] = divided(experts(E, H, I), mesh, "ep", "sharded", dispatch="symmetric")
    whole, tokens = experts(E, H, I), 3
    given = [t.clone() for t in of_rank(mesh, inputs(tokens * mesh.size()))]

    def call() -> Tensor:
        x, ids, w = given
        return layers[1](layers[0](x, ids, w), ids.flip(0), w)

    made = call()
    if graphs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = call()
    g = torch.Generator().manual_seed(mesh.get_rank())
    for turn in range(10_000 if graphs else 20):
        if turn % 100 == 0:
            more = of_rank(mesh, inputs((tokens + turn) * mesh.size()))
            for t, new in zip(given, more, strict=True):
                t.copy_(new[:tokens])
        if torch.rand((), generator=g) < 0.05:
            if graphs:
                torch.cuda._sleep(int(torch.randint(10**6, (), generator=g)))
            else:
                time.sleep(1e-3)
        if graphs:
            graph.replay()
        else:
            made = call()
        if turn % 1000 == 999 or not graphs:
            x, ids, w = given
            assert_alike([made], [whole(whole(x, ids, w), ids.flip(0), w)])
    fusion_moe.synchronize()


@case
def ranks_that_disagree(mesh):
    """On what they divide: all are told before any is sent, of layers before any is called."""
    rank = mesh.get_rank()
    module = divided(experts(E, H, I), mesh, "ep", "sharded", dispatch="symmetric")
    x, ids, w = inputs(2000 + rank)
    if mesh.size() > 1:
        with torch.no_grad():
            refuses(OptionError, "calls with 2001 tokens", lambda: module(x, ids, w))
        memory = symmetric.GroupMemory.of_group(mesh.get_group(), torch.device(DEVICE))
        refuses(OptionError, "8 experts of 64 features", lambda: memory.layer(E + rank, H))


@case
def models_that_differ(mesh):
    """Between ranks: refused on each, before anything is divided."""
    last = mesh.size() - 1
    for sizes in ((E - 1, H, I), (E, 2 * H, I)) if last else ():
        module = experts(*sizes) if mesh.get_local_rank() == last else experts(E, H, I)
        said = f"on rank {last} of the mesh; expected {E} experts of {H} features"
        refuses(ShapeError, said, partial(parallelize_, module, mesh))
        assert len(module.down_proj) == (sizes[0] if mesh.get_local_rank() == last else E)
        assert not hasattr(module, "is_divided")


@case
def more_tokens_than_the_capacity(mesh):
    """The last ones do without the experts of that rank alone, forward and backward."""
    whole = experts(E, H, I)
    tokens = 8
    x, ids, w = inputs(tokens)
    ids[:, 0] = 0
    for capacity, kept in (3, 3), (0.3, 3), (0.5, 4), (1, 1), (tokens + 1, tokens):
        module = divided(whole, mesh, "ep", "sharded", dispatch="all_to_all", capacity=capacity)
        goes = [((ids >= first) & (ids < end)).any(1) for first, end in ranges(mesh.size())]
        lost = torch.zeros_like(ids, dtype=torch.bool)
        for (first, end), those in zip(ranges(mesh.size()), goes, strict=True):
            late = those & (those.cumsum(0) > kept)
            lost |= late[:, None] & (ids >= first) & (ids < end)
        found, want = (
            forward_and_backward(m, [x.clone(), ids, v.clone()])
            for m, v in ((module, w), (whole, w.masked_fill(lost, 0)))
        )
        assert_alike(found[:2], want[:2])
        assert_alike(found[2:], [want[2].masked_fill(lost, 0)])
        assert module.dropped == sum((those.sum() - kept).clamp(min=0) for those in goes)


@case
def recorded(mesh):
    """Each rank records its own experts; all ranks together, the rows of all tokens."""
    module = nn.ModuleDict({"experts": divided(experts(E, H, I), mesh, "ep")})
    x, ids, w = inputs()
    with torch.no_grad(), fusion_moe.record(module, profile=()) as run:
        module["experts"](x, ids, w)
    found: list[str] = [""] * mesh.size()
    dist.all_gather_object(found, run.data.to_json())
    ranks = [Run(data=of_json(text, "")) for text in found]
    merged = Run.merged(*ranks).data
    assert [layer.rank for layer in merged.layers] == [*range(mesh.size())]
    rows = [n for layer in merged.layers for n in layer.rows]
    assert rows == torch.bincount(ids.flatten().cpu(), minlength=E).tolist()
    assert merged.rows == ids.numel()


def ranges(ranks: int) -> list[tuple[int, int]]:
    """The experts of each rank."""
    each = -(-E // ranks)
    return [(rank * each, min((rank + 1) * each, E)) for rank in range(ranks)]


@case
def experts_and_features(mesh):
    """Experts along one dimension of a mesh, their features along the other."""
    whole = experts(E, H, I)
    along = min(2, mesh.size())
    for shape in {(mesh.size() // along, along), (along, mesh.size() // along)}:
        both = init_device_mesh(DEVICE, shape, mesh_dim_names=("ep", "tp"))
        module = divided(whole, both, "ep_tp")
        assert len(module.down_proj) in (E // shape[0], E // shape[0] + 1)
        assert module.nbytes < whole.nbytes * (1 / mesh.size() + 0.25)
        assert_alike(*(forward_and_backward(m) for m in (module, whole)))
        sharded(mesh, "ep_tp", whole, both)


@case
def compiled(mesh):
    """In one graph, whose collectives are operations of torch, forward and backward."""
    # whose tracer takes a module as an argument
    floats = float_experts if torch.__version__ >= "2.13" else adapted_experts
    sent = {"dispatch": "all_to_all", "capacity": 0.9}
    assert_compiled(mesh, floats(), "fusion_moe", "sharded", **sent)


@case
def compiled_by_others(mesh):
    """The same by backends of torch."""
    assert_compiled(mesh, adapted_experts(), "aot_eager", "replicated")
    assert_compiled(mesh, experts(E, H, I), "inductor", "sharded")


def assert_compiled(
    mesh: DeviceMesh, whole: nn.Module, backend: str, tokens: str, **options: Any
) -> None:
    module, outcomes = divided(whole, mesh, "ep", tokens, **options), []
    for f in module, torch.compile(module, backend=backend, fullgraph=True):
        found = forward_and_backward(f)
        outcomes.append([*found, *(local(p.grad) for p in module.parameters() if p.requires_grad)])
        module.zero_grad()
    assert_alike(*outcomes)


@case
def compiled_for_any_routing(mesh):
    """One graph, for other tokens and another number of them."""
    module = divided(experts(E, H, I), mesh, "ep", "sharded", dispatch="all_to_all")
    torch._dynamo.reset()
    f = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (13, 29):
            x, ids, w = inputs(tokens)
            for those in ids, torch.full_like(ids, E - 1):
                assert_alike([f(x, those, w)], [module(x, those, w)])


def emptied(module: nn.Module) -> Any:
    """A copy whose weights are all zeros."""
    made = deepcopy(module)
    for p in made.parameters():
        p.data = torch.zeros_like(p)
    return made


def saved(module: nn.Module, mesh: DeviceMesh, name: str) -> Path:
    """Where torch.distributed.checkpoint wrote a module."""
    path = Path(sys.argv[1], f"{name}_{mesh.size()}")
    checkpoint.save(get_model_state_dict(module), checkpoint_id=path)
    return path


def loaded(module: Any, path: Path) -> Any:
    """The module with the weights that torch.distributed.checkpoint reads."""
    state = get_model_state_dict(module)
    checkpoint.load(state, checkpoint_id=path)
    set_model_state_dict(module, state)
    return module


def assert_same_weights(found: nn.Module, want: nn.Module) -> None:
    for (name, a), (_, b) in zip(found.named_parameters(), want.named_parameters(), strict=True):
        assert type(a) is type(b), name
        assert local(a).flatten().view(torch.uint8).equal(local(b).flatten().view(torch.uint8)), (
            name
        )


@case
def checkpoints(mesh):
    """What one number of ranks saved another loads, for any plan, and so does one process."""
    torch.manual_seed(0)
    both = two_dimensions(mesh)
    first, second, *more = variants()
    pairs = [
        (first, ("ep", mesh), ("ep_tp", both)),
        (first, ("ep_tp", both), ("ep", both["ep"])),
        (second, ("tp", mesh), ("ep", mesh)),
    ]
    pairs += [(whole, ("tp", mesh), ("tp", both["tp"])) for whole in more]
    pairs += [
        (whole, ("ep", mesh), ("ep", both["ep"])) for whole in (float_experts(), adapted_experts())
    ]
    for i, (whole, (plan, here), (other_plan, there)) in enumerate(pairs):
        module = divided(whole, here, plan)
        module(*inputs())  # kernels reorder weights, state dicts have them as they were
        path = saved(module, mesh, f"pair{i}")
        assert_same_weights(loaded(emptied(whole), path), whole)
        assert_same_weights(
            loaded(divided(emptied(whole), there, other_plan), path),
            divided(whole, there, other_plan),
        )
        again = loaded(divided(emptied(whole), here, plan), saved(whole, mesh, f"whole{i}"))
        assert again(*inputs()).equal(module(*inputs()))


@case
def whole_states(mesh):
    """State dicts of all experts, of a rank's own, and those that torch gathers."""
    whole = adapted_experts()
    module = divided(whole, mesh, "ep")
    # gloo gathers no floats of 8 bits
    trained = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    state = get_model_state_dict(module, options=trained)
    assert all(state[name].equal(t) for name, t in whole.state_dict().items() if "lora" in name)
    set_model_state_dict(
        made := divided(emptied(whole), mesh, "ep"),
        whole.state_dict(),
        options=StateDictOptions(full_state_dict=True),
    )
    assert_same_weights(made, module)
    # gloo sends none either, but their bytes
    sent = {
        name: t.view(torch.uint8) if t.dtype.itemsize == 1 else t
        for name, t in (whole.state_dict() if mesh.get_rank() == 0 else {}).items()
    }
    set_model_state_dict(
        made := divided(emptied(whole), mesh, "ep"),
        sent,
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    assert_same_weights(made, module)
    frozen = {name: t for name, t in whole.state_dict().items() if "lora" not in name}
    own = {name: local(t) for name, t in module.state_dict().items() if "lora" not in name}
    for given in frozen, own:
        made = divided(emptied(whole), mesh, "ep")
        assert made.load_state_dict(given, strict=False).missing_keys == [
            name for name in whole.state_dict() if "lora" in name
        ]
        assert all(
            local(made.state_dict()[name]).view(torch.uint8).equal(t.view(torch.uint8))
            for name, t in own.items()
        )
    features = divided(experts(E, H, I), mesh, "tp").state_dict()["gate_up_proj"]
    assert features.shape == (E, 2 * I, H // 2)
    assert len(features.pieces) == min(2, mesh.size())  # of one rank, rows that follow one another
    refuses(UnsupportedError, "features that are divided between ranks", lambda: features + 1)


@case
def adapters_in_a_file(mesh):
    """`save_lora` of divided experts writes those of all ranks, once."""
    whole = adapted_experts()
    path = save_lora(Layer(divided(whole, mesh, "ep")), Path(sys.argv[1], f"lora{mesh.size()}"))
    dist.barrier()
    found = Layer(experts(E, H, I))
    assert load_lora_(found, path) == ["experts.gate_up", "experts.down"]
    assert_same_weights(found.experts, whole)
    for added in False, True:  # beside experts that are divided already
        made = divided(experts(E, H, I), mesh, "ep")
        if added:
            fusion_moe.nn.add_lora_(made, rank=4)
            loaded(made, saved(whole, mesh, "lora"))
        else:
            load_lora_(Layer(made), path)
        assert_same_weights(made, divided(whole, mesh, "ep"))
    features = divided(experts(E, H, I), mesh, "tp")
    refuses(
        UnsupportedError,
        "a part of each expert's features",
        lambda: fusion_moe.nn.add_lora_(features),
    )


class Layer(nn.Module):
    """A router and experts."""

    def __init__(self, experts: nn.Module):
        super().__init__()
        self.router, self.experts = nn.Linear(H, E, bias=False), experts

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.router(x).softmax(-1).topk(K)
        return x + self.experts(x, ids, w)


def layer(module: nn.Module) -> Layer:
    torch.manual_seed(5)  # ranks have the same router
    return Layer(module).to(DEVICE).to(ON["dtype"])


@case
def training(mesh):
    """Steps of an optimizer with clipped gradients: the rest of the model in FSDP2's shards, or on
    every rank.
    """
    x, ranks = inputs(4 * mesh.size())[0], mesh.size()
    for whole, sharded_rest in (
        (float_experts(), True),
        (adapted_experts(), True),
        (float_experts(), False),
    ):
        alone = layer(whole)
        model = deepcopy(alone)
        parallelize_(model, mesh, tokens="sharded", dispatch="all_to_all")
        if sharded_rest:
            fully_shard(model, mesh=mesh, ignored_params=set(model.experts.parameters()))
        norms, optimizers = [], []
        for m, given in (alone, x), (model, x.chunk(ranks)[mesh.get_rank()]):
            trained = [p for p in m.parameters() if p.requires_grad]
            groups = [
                {"params": [p for p in trained if isinstance(p, DTensor) == kind]}
                for kind in (True, False)
            ]
            optimizers.append(torch.optim.AdamW(groups, **STEP))
            for _ in range(2):
                m(given).square().sum().backward()
                if m is model:
                    average(model, mesh, sharded_rest)
                clip = torch.nn.utils.clip_grad_norm_ if sharded_rest else clip_grad_norm_
                norms.append(gathered(clip(trained, 1.0)))
                optimizers[-1].step()
                optimizers[-1].zero_grad()
        assert_alike(norms[2:], norms[:2])
        found = [gathered(p.detach()) for p in model.parameters() if p.requires_grad]
        assert_alike(found, [p.detach() for p in alone.parameters() if p.requires_grad])

        for p, state in optimizers[1].state.items():  # which checkpoints keep as the parameters
            assert isinstance(state["exp_avg"], DTensor) == isinstance(p, DTensor)


@case
def residuals_in_place(mesh):
    """FSDP2 around each layer, whose result is written in place: the gradients of one process."""

    class Residual(GroupedLinear):
        def forward(self, x):
            y = super().forward(x, torch.tensor([8, 8], device=DEVICE))
            y += x
            return y

    for single, shape in (False, (16, 32)), (True, (2, 8, 32)):
        torch.manual_seed(0)
        how = {"bias": False, "single_grouped_weight": single, **ON}
        alone = nn.Sequential(*(Residual(2, 32, 32, **how) for _ in range(2)))
        model, x = deepcopy(alone), torch.randn(shape).to(**ON)
        for part in (*model, model):
            fully_shard(part, mesh=mesh)
        for m in (alone, model):
            m(x).square().sum().backward()
        assert_alike(
            [gathered(p.grad) for p in model.parameters()], [p.grad for p in alone.parameters()]
        )


def adapted(encoding: str, seed: int) -> nn.Sequential:
    """Experts with adapters that are not zero, in a model."""
    g = torch.Generator().manual_seed(seed)
    shapes = (4, 64, 64), (4, 64, 32)
    made = nn.Sequential(
        Experts(
            *(
                quantize(torch.randn(s, generator=g) / 8, encoding=ENCODINGS[encoding])
                for s in shapes
            )
        ).to(DEVICE)
    )
    add_lora_(made, rank=4)
    with torch.no_grad():
        for p in made.parameters():
            if p.requires_grad:
                p.copy_(torch.randn(p.shape, generator=g) / 8)
    return made


class OfExperts(nn.Module):
    """What a wrapper takes; of `model`, the first module is called."""

    def __init__(self, model: nn.Sequential):
        super().__init__()
        self.model = model

    def forward(self, *given: Tensor) -> Tensor:
        return self.model[0](*given)


def in_ddp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return nn.parallel.DistributedDataParallel(
        model, device_ids=[mesh.get_rank()] if DEVICE == "cuda" else None
    )


def encoded(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without adapters."""
    return {name: t for name, t in state.items() if "lora" not in name}


@case
def rounded_weights_that_train(mesh):
    """DDP and FSDP2, with mixed precision and without, take the floats: steps are those of one
    process, and each forward rounds what the step before has made.
    """
    wraps: dict[str, Any] = {
        "ddp": lambda m: in_ddp(m, mesh),
        "fsdp2": lambda m: fully_shard(m, mesh=mesh),
        "bf16": lambda m: fully_shard(
            m, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        ),
    }
    for name, wrap in wraps.items():
        alone = OfExperts(nn.Sequential(float_experts()))
        fusion_moe.nn.qat_(alone, frozen=True)
        model = wrap(deepcopy(alone))
        optimizers = [torch.optim.SGD(m.parameters(), lr=20.0) for m in (alone, model)]
        before = alone.model[0].down_proj.detach().clone()
        for tokens in range(T, T + 3):
            for m, optimizer in zip((alone, model), optimizers, strict=True):
                m(*inputs(tokens)).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        found = [gathered(p.detach()) for p in model.parameters()]
        if name != "bf16":
            assert_alike(found, [p.detach() for p in alone.parameters()])
        assert (found[1] - before).norm() > 0.05 * before.norm()
        given = inputs()
        with torch.no_grad():
            for p, t in zip(alone.parameters(), found, strict=True):
                p.copy_(t)
        if name == "bf16":
            alone.bfloat16()
            given = given[0].bfloat16(), given[1], given[2].bfloat16()
        assert torch.equal(model(*given), alone(*given)), name


@case
def encoded_weights_in_wrappers(mesh):
    """DDP broadcasts them and FSDP2 casts all floats that it takes; state dicts have the dtypes of
    the encoding.
    """
    x, ids, w = inputs(6)
    given = x.bfloat16(), ids % 4, w
    for encoding in "nvfp4", "mxfp4", "int4":
        alone = adapted(encoding, 0)
        want, saved = alone[0](*given), {name: t.clone() for name, t in alone.state_dict().items()}
        want.float().square().sum().backward()
        model = adapted(encoding, mesh.get_rank())
        wrapped = in_ddp(OfExperts(model), mesh)
        y = wrapped(*given)
        y.float().square().sum().backward()
        assert_alike(
            [p.grad for p in model.parameters() if p.requires_grad],
            [p.grad for p in alone.parameters() if p.requires_grad],
        )
        assert_equal(y, want)
        for state, dtype in (
            (saved, torch.float32),
            (adapted(encoding, 5).state_dict(), torch.bfloat16),
            (saved, torch.float32),
        ):
            model.load_state_dict(state)
            found = encoded(model.to(dtype).state_dict())
            assert all(
                t.dtype == saved[name].dtype and t.equal(state[name]) for name, t in found.items()
            )
        assert_equal(wrapped(*given), want)
        for dtype in (None, torch.bfloat16) if FSDP2_TAKES_INTEGERS else ():
            sharded = [OfExperts(adapted(encoding, seed)) for seed in (0, 5)]
            for m in sharded:
                for part in m.model[0], m:
                    fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
            y = sharded[0](*given)
            y.float().square().sum().backward()
            limit = 1e-5 if dtype is None else 2e-2  # adapters are cast
            assert (y.float() - want.float()).norm() <= limit * want.float().norm()
            state = sharded[0].state_dict()
            assert all(
                t.dtype == saved[name.removeprefix("model.")].dtype
                for name, t in encoded(state).items()
            )
            sharded[1].load_state_dict(state)
            assert sharded[1](*given).equal(y)
            own = [p for p in sharded[1].parameters() if not p.requires_grad]
            own += [t for name, t in encoded(state).items() if "decode" not in name]
            for t in own:
                before, other = t.to_local().clone(), t.clone()
                other.to_local().zero_()
                assert ((t + t.clone()) / 2).to_local().equal(before)
                refuses(UnsupportedError, "mul_ of", lambda t=t: t.mul_(0.5))
                refuses(UnsupportedError, "lerp_ of", lambda t=t, u=other: t.lerp_(u, 0.5))
                assert t.to_local().equal(before)


@case
def linear_layers_in_wrappers(mesh):
    """The scale of the matrix, a scalar, is the same on all ranks and whole."""
    g = torch.Generator().manual_seed(0)
    torch.manual_seed(0)  # ranks have the same first layer
    alone = nn.Sequential(
        nn.Linear(64, 64), QuantizedLinear(quantize(torch.randn(96, 64, generator=g) / 8, NVFP4))
    ).to(DEVICE)
    saved = {name: t.clone() for name, t in alone.state_dict().items()}
    model, other, x = deepcopy(alone), deepcopy(alone), torch.randn(5, 64, generator=g).to(DEVICE)
    want = alone(x)
    want.sum().backward()

    def check(wrapped: nn.Module, module: nn.Module, times: int) -> None:
        results = [wrapped(x) for _ in range(times)]
        torch.stack(results).mean(0).sum().backward()
        for y in results:
            assert_equal(y, want)
        assert_alike(
            [gathered(p.grad) for p in module[0].parameters()],
            [p.grad for p in alone[0].parameters()],
        )
        state = module.state_dict()
        assert all((state[n].shape, state[n].dtype) == (t.shape, t.dtype) for n, t in saved.items())

    model[1].weight_scale_2.mul_(mesh.get_rank() + 1)
    # before 2.13, a backward refuses that saved buffers were broadcast since
    check(in_ddp(model, mesh), model, 2 if torch.__version__ >= "2.13" else 1)
    assert all(t.equal(saved[name]) for name, t in model.state_dict().items())
    if FSDP2_TAKES_INTEGERS:
        for part in other[1], other:
            fully_shard(part, mesh=mesh)
        check(other, other, 1)


def average(model: nn.Module, mesh: DeviceMesh, sharded_rest: bool) -> None:
    """The gradients of all tokens: FSDP divides sums by the ranks, and without it nothing adds
    those of the router.
    """
    grad = model.router.weight.grad
    if sharded_rest:
        grad.mul_(mesh.size())
    else:
        dist.all_reduce(grad)


@case
def a_share_from_files(mesh):
    """Each rank reads the bytes of its share of experts alone, and has what it would have kept of
    the whole model.
    """
    if DEVICE != "cpu":
        return  # files are read there
    to_nvfp4 = {"quantization_config": ours.NVFP4Config()}
    features = {"mesh": mesh, "plan": "tp"}
    both = {"mesh": two_dimensions(mesh), "plan": "ep_tp"}
    directories = [
        ("modelopt-qwen3_moe", {}, {}),
        ("ct-gpt_oss", {}, {}),
        ("mxfp4-gpt_oss", {}, {}),
        ("bf16-qwen3_moe", {"experts_implementation": "fusion_moe"}, {}),
        ("bf16-qwen3_moe", to_nvfp4, {}),
        ("mxfp4-gpt_oss", {}, features),
        ("modelopt-gpt_oss", {}, both),
        ("modelopt-llama4_text", {}, features),
        ("ct-gpt_oss", {}, both),
    ]
    tokens = torch.arange(3, 12)[None]
    for name, options, division in directories:
        path = Path(__file__).parents[2] / "checkpoints" / "made" / name
        want = ours.from_pretrained(path, dtype=torch.float32, **options)
        division = {"mesh": mesh, **division}
        names = parallelize_(want, **division)
        read: dict[str, int] = {}
        with counted(read):
            found = ours.from_pretrained(path, dtype=torch.float32, **division, **options)
        assert_same_weights(found, want)
        assert found(tokens).logits.equal(want(tokens).logits)
        stored = {
            n: e
            for n, e in Directory.open(path).tensors.items()
            if ".experts." in n and "_shape" not in n
        }
        weights = {
            n: e.nbytes for n, e in stored.items() if len(e.shape) > 1 and not n.endswith("bias")
        }
        if "plan" not in division and "mxfp4" not in name:  # else mapped whole, and read in part
            assert sum(read.get(n, 0) for n in weights) == sum(weights.values()) // mesh.size()
        assert all(read.get(n, 0) <= e.nbytes for n, e in stored.items())
        assert read.keys() - stored.keys() == Directory.open(path).tensors.keys() - stored.keys()
        assert names == [n for n, m in found.named_modules() if hasattr(m, "is_divided")]
        refuses(UnsupportedError, "divided already", lambda found=found: parallelize_(found, mesh))
        if not options:
            refuses(
                UnsupportedError,
                "divided between ranks, to save",
                lambda found=found: found.save_pretrained(Path(sys.argv[1], "saved")),
            )
    floats = path.with_name("bf16-qwen3_moe")
    refuses(
        UnsupportedError,
        "features of floats",
        lambda: ours.from_pretrained(floats, **features, **to_nvfp4),
    )


@contextmanager
def counted(read: dict[str, int]) -> Iterator[None]:
    """Bytes of what is asked of safetensors, by the names of tensors."""

    class Counted:
        def __init__(self, name: str, source: Any):
            self.name, self.source = name, source

        def __getattr__(self, name: str) -> Any:
            return getattr(self.source, name)

        def __getitem__(self, index: Any) -> Tensor:
            found = self.source[index]
            read[self.name] = read.get(self.name, 0) + found.nbytes
            return found

    def whole(self: Directory, name: str) -> Tensor:
        read[name] = self.tensors[name].nbytes
        return tensor(self, name)

    original, tensor = Directory.slice, Directory.read
    Directory.slice = lambda self, name: Counted(name, original(self, name))
    Directory.read = whole
    try:
        yield
    finally:
        Directory.slice, Directory.read = original, tensor


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
    whole, narrow, few = experts(E, H, I), experts(E, H, 16), experts(1, H, I)
    before = len(whole.down_proj)
    two = init_device_mesh(DEVICE, (1, mesh.size()), mesh_dim_names=("dp", "ep"))
    eager = float_experts()
    eager.config._experts_implementation = "eager"
    sent = {"tokens": "sharded", "dispatch": "all_to_all"}
    bad = [
        ("plan = 'tpp'", whole, {"plan": "tpp"}),
        ("tokens = 'split'", whole, {"tokens": "split"}),
        ("dispatch = 'alltoall'", whole, {"tokens": "sharded", "dispatch": "alltoall"}),
        ("tokens = 'replicated'; expected", whole, {"dispatch": "all_to_all"}),
        ("plan = 'ep_tp'; expected", whole, {**sent, "dispatch": "symmetric", "plan": "ep_tp"}),
        ("float32_sums = True", whole, {**sent, "float32_sums": True}),
        ("it drops none", whole, {**sent, "dispatch": "symmetric", "capacity": 0.5}),
        ("plan = 'tp'; expected", whole, {"plan": "tp", **sent}),
        ("capacity = 2, dispatch = 'all_gather'", whole, {"tokens": "sharded", "capacity": 2}),
        *(
            (f"capacity = {capacity}; expected a number", whole, {**sent, "capacity": capacity})
            for capacity in (0, 0.0, 1.5, -1)
        ),
        ("a NoneType", whole, {"mesh": None}),
        ("a mesh with ndim = 1", whole, {"plan": "ep_tp"}),
        ("a mesh with ndim = 2", whole, {"mesh": two}),
    ]
    unfit = [
        ("no modules of experts", nn.Linear(2, 2), {}),
        ("a Qwen3MoeExperts whose features", float_experts(), {"plan": "tp"}),
        ("experts that transformers computes", eager, {}),
        ("adapters", adapted_experts(), {"plan": "tp"}),
    ]
    if mesh.size() > 1:
        unfit += [
            (f"1 experts for {mesh.size()} ranks", few, {}),
            ("16 intermediate features", narrow, {"plan": "tp"}),
        ]
    for error, some in (OptionError, bad), (UnsupportedError, unfit):
        for part, module, how in some:
            refuses(error, part, partial(parallelize_, module, **{"mesh": mesh, **how}))
    assert len(whole.down_proj) == before
    assert parallelize_(whole, two["ep"]) == [""]
    refuses(UnsupportedError, "divided already", lambda: parallelize_(whole, mesh))


@lost
def dies(mesh):
    """The last rank: the others get an error within the timeout of the process group."""
    without_the_last(mesh, lambda: os._exit(0))


@lost
def hangs(mesh):
    """The last rank: an error too."""
    without_the_last(mesh, lambda: time.sleep(2 * SHORT_S))


@lost
def leaves_the_others(mesh):
    """The last rank: the others are told that it sent nothing, and their next call fails at
    once.
    """
    named(mesh, lambda: os._exit(0))


@lost
def stands_still(mesh):
    """The last rank, without ending."""
    named(mesh, lambda: time.sleep(3 * SHORT_S))


@lost
def leaves_before_the_backward(mesh):
    """The last rank: the others are told so by autograd."""
    with fusion_moe.options.override(target="auto"):
        module = divided(adapted_experts(), mesh, "ep", "sharded", dispatch="symmetric")
        with fusion_moe.preparing():
            gradients(module, inputs(4), trained(module))
        wait_for_all(mesh)
        x, ids, w = inputs(4)
        y = module(x.requires_grad_(), ids, w)
        if mesh.get_local_rank() == mesh.size() - 1:
            return
        says = f"rank {mesh.size() - 1} sent no ids of experts"
        refuses(RankError, says, lambda: (y.sum().backward(), fusion_moe.synchronize()))


@lost
@torch.no_grad()
def layers_in_another_order(mesh):
    """One rank calls them the other way round: each is told so, before it computes anything."""
    with fusion_moe.options.override(target="auto"):
        layers = [
            divided(experts(E, H, I), mesh, "ep", "sharded", dispatch="symmetric") for _ in "ab"
        ]
        with fusion_moe.preparing():
            layers[0](*inputs())
        wait_for_all(mesh)
        for layer in layers:
            layer(*inputs())
        other = 1 - mesh.get_rank()
        refuses(
            RankError,
            f"rank {other} is in another layer",
            lambda: (layers[mesh.get_rank()](*inputs()), fusion_moe.synchronize()),
        )


@torch.no_grad()
def named(mesh: DeviceMesh, leave: Callable[[], None]) -> None:
    with fusion_moe.options.override(target="auto"):
        module = divided(experts(E, H, I), mesh, "ep", "sharded", dispatch="symmetric")
        with fusion_moe.preparing():
            module(*inputs())
        wait_for_all(mesh)
        module(*inputs())
        if mesh.get_local_rank() == mesh.size() - 1:
            leave()
            return
        # kernels of GPUs tell how long they waited, which is no time in later calls
        within = f" {SHORT_S} s" if DEVICE == "cpu" else ""
        for limit in (3 * SHORT_S, SHORT_S):
            began = time.monotonic()
            refuses(
                RankError,
                f"rank {mesh.size() - 1} sent no ids of experts within{within}",
                lambda: (module(*inputs()), fusion_moe.synchronize()),
            )
            assert time.monotonic() - began < limit


def wait_for_all(mesh: DeviceMesh) -> None:
    """For as long as one of them compiles, which the process group would give up: once a case."""
    RANKS[0].add("here", 1)
    while RANKS[0].add("here", 0) < mesh.size():
        time.sleep(0.01)


def without_the_last(mesh: DeviceMesh, leave: Callable[[], None]) -> None:
    x = torch.ones(2)
    all_reduce(x, mesh.get_group().group_name, mesh.size())
    if mesh.get_local_rank() == mesh.size() - 1:
        leave()
        return
    began = time.monotonic()
    try:
        all_reduce(x, mesh.get_group().group_name, mesh.size())
    except RuntimeError as error:
        assert time.monotonic() - began < TIMEOUT_S / 10
        print(error, flush=True)
    else:
        raise AssertionError("no error")


def run(rank: int, ranks: int, folder: Path, group: str, chosen: Sequence[str]) -> None:
    """One process."""
    torch.set_num_threads(1)
    precompiled.use()
    if precompiled.level() != precompiled.O3:
        compile_graph.has_compiler = lambda: False  # as conftest's call_by_call
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    RANKS.append(dist.FileStore(f"{folder}/ranks{group}", ranks))
    dist.init_process_group(
        "gloo" if DEVICE == "cpu" else "nccl",
        init_method=f"file://{folder}/store{group}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=SHORT_S if LOST.keys() & set(chosen) else TIMEOUT_S),
    )
    mesh, outcomes = init_device_mesh(DEVICE, (ranks,)), {}
    for name in chosen:
        began = time.monotonic()
        try:
            (CASES | LOST)[name](mesh)
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
        how = "failed" if outcomes[name] else "passed"
        text = f"rank {rank}: {name} {how}, {time.monotonic() - began:.1f} s\n{outcomes[name]}"
        print(text, end="", flush=True)  # in case that others wait for this one in vain
    (folder / f"{group}.{rank}.json").write_text(json.dumps(outcomes))
    os._exit(0)  # without the others, of which one may be gone


def main(folder: str, _: str, *groups: str) -> None:
    processes = multiprocessing.get_context("fork")  # imports take longer than cases
    for group in groups:
        ranks, _, names = group.partition(":")
        chosen = names.split(",")
        if not names or names.startswith("-"):
            chosen = [name for name in CASES if name not in names[1:].split(",")]
        started = [
            processes.Process(target=run, args=(rank, int(ranks), Path(folder), group, chosen))
            for rank in range(int(ranks))
        ]
        for process in started:
            process.start()
        for process in started:
            process.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
