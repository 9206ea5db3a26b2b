"""Routing that is recorded and replayed: the same experts for the same tokens, in every family of
transformers, whatever runs the model in between.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("transformers")

import numpy as np
import torch
from tiny_qwen3 import qwen3_moe
from torch.utils.checkpoint import checkpoint

import fusion_moe
from fusion_moe import options
from fusion_moe.errors import DtypeError, GroupsError, ShapeError, UnsupportedError
from fusion_moe.integrations.routing.layers import layers_of
from fusion_moe.routing import Routing, record_routing, replay_routing
from fusion_moe.transformers import fuse_routers_
from tests.families.tiny import FAMILIES, logits, tiny

# Llama-4 has no experts interface; a diffusion model draws what it computes; the layers of a looped
# one run several times
LOOPED = "inkling2_loop"
USUAL = "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "glm4_moe", "gemma4", "granitemoe"
ALL = [f for f in FAMILIES if f not in ("llama4", "diffusion_gemma", LOOPED, *USUAL)]
# what chooses without topk among its experts: by a rule of its own, with one more that is skipped
OTHERS = "phimoe", "zaya"
K, LAYERS = 2, 2


def small(**changes: Any) -> Any:
    """Two layers of eight experts."""
    return qwen3_moe(**{"num_experts": 8, "num_hidden_layers": LAYERS} | changes)


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 30, shape, generator=torch.Generator().manual_seed(seed))


def shifted(routing: Routing, by: int = 1) -> Routing:
    """Other experts for each token."""
    calls = {
        name: [((ids + by) % routing.experts[name], w) for ids, w in calls]
        for name, calls in routing.calls.items()
    }
    return Routing(routing.experts, calls)


def same_ids(routing: Routing, other: Routing) -> bool:
    return [*routing.called] == [*other.called] and all(
        torch.equal(routing.rows(name)[0], other.rows(name)[0]) for name in routing.called
    )


def is_changed(model: torch.nn.Module) -> bool:
    """Whether a module still has what a block puts into it."""
    return any("forward" in vars(m) for m in model.modules())


@pytest.mark.parametrize(
    "family", [*USUAL, *(pytest.param(f, marks=pytest.mark.exhaustive) for f in ALL)]
)
def test_every_family(family: str) -> None:
    """What was recorded gives the same bits; other experts are computed, with weights from the
    router's own logits and a gradient to it, or with those recorded, and none.
    """
    if family == "inkling":
        pytest.importorskip("scipy", reason="transformers needs it in this family's forward")
    model = tiny(family)
    model = getattr(model, "thinker", model)

    def logits(routing: Routing | None = None, weights: str = "own") -> torch.Tensor:
        given = tokens(2, 9)
        if routing is None:
            return model(input_ids=given).logits
        with replay_routing(model, routing, weights):
            return model(input_ids=given).logits

    with record_routing(model) as routing:
        want = logits()
    assert len(routing) == 18
    assert torch.equal(logits(routing, "recorded"), want)
    other, routers = shifted(routing), [layer.choosers for layer in layers_of(model)]
    with record_routing(model) as seen:
        found = logits(other, "recorded")
    assert not torch.equal(found, want)
    if family in OTHERS:
        with pytest.raises(UnsupportedError, match="topk.* in its router|choose by topk"):
            logits(other)
        assert not is_changed(model)
        return
    assert torch.equal(logits(routing), want)
    if family == "deepseek_v4":  # by a table of tokens
        assert not any(routers)
        return
    model.zero_grad()
    with record_routing(model) as seen:
        found = logits(other)
    assert same_ids(seen, other)
    found.float().square().mean().backward()
    called = [layer for layer in layers_of(model) if layer.name in routing.called]
    for layer in called:
        assert any(p.grad is not None and p.grad.any() for p in layer.choosers[0].parameters())
    assert not is_changed(model)


def test_groups_do_not_take_weights_away() -> None:
    """DeepSeek-V2 scores experts of groups that it does not choose with 0; DeepSeek-V3 with
    -inf. A given expert has its own score, where others of the batch are left to the router too.
    """
    from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2

    config = v2.DeepseekV2Config(
        hidden_size=32,
        num_experts=8,
        num_experts_per_tok=K,
        n_group=4,
        topk_group=1,
        topk_method="group_limited_greedy",
    )

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = v2.DeepseekV2TopkRouter(config)
            self.experts = fusion_moe.NVFP4Experts.from_float(
                torch.randn(8, 32, 16), torch.randn(8, 16, 16)
            )

        def forward(self, x: torch.Tensor) -> Any:
            return self.gate(x)

    block, x = Block(), torch.randn(3, 32)
    torch.nn.init.normal_(block.gate.weight)
    scores = (x @ block.gate.weight.T).softmax(-1)
    own = block(x)[2]
    far = (own + 2) % 8  # of another group
    for partial in False, True:
        ids = far.clone()
        if partial:
            ids[1] = -1
        with replay_routing(block, Routing({"experts": 8}, {"experts": [(ids, None)]}, partial)):
            _, weights, found = block(x)
        want = torch.where(ids < 0, own, ids)
        assert torch.equal(found, want)
        torch.testing.assert_close(weights, scores.gather(1, want))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    """What the backward computes again has the rows of its own step, though the block is left, and
    another one entered.
    """
    model, given = small().train(), tokens(2, 6)

    def gradients(inside: bool) -> list[torch.Tensor]:
        model.zero_grad()
        with replay_routing(model, other):
            loss = model(input_ids=given, labels=given).loss
            if inside:
                loss.backward()
        if not inside:
            with replay_routing(model, routing):
                loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    with record_routing(model) as routing:
        model(input_ids=given)
    other = shifted(routing)
    want = gradients(True)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for inside in True, False:
        assert all(map(torch.equal, gradients(inside), want))
    with record_routing(model) as seen:
        model(input_ids=given, labels=given).loss.backward()
    assert len(seen) == 12
    assert not is_changed(model)


@pytest.mark.parametrize("reentrant", [False, True])
def test_other_checkpoints_need_their_backward_in_the_block(reentrant: bool) -> None:
    model, given = small(), tokens(1, 6)
    embedded = model.model.embed_tokens(given).detach().requires_grad_()

    def run() -> Any:
        def loss(x: torch.Tensor) -> Any:
            return model(inputs_embeds=x, labels=given).loss

        return checkpoint(loss, embedded, use_reentrant=reentrant)

    with record_routing(model) as routing:
        model(input_ids=given)
    with replay_routing(model, shifted(routing)):
        run().backward()
        got = embedded.grad
        embedded.grad = None
        model(inputs_embeds=embedded, labels=given).loss.backward()
    torch.testing.assert_close(got, embedded.grad)
    with replay_routing(model, routing), torch.no_grad():
        model(input_ids=given)
    refused = pytest.raises(UnsupportedError, match="2 layers with checkpointed .*backward inside")
    with refused, replay_routing(model, routing):
        run()


def test_a_rollout_in_micro_batches_of_another_order() -> None:
    """`generate` with padding, then training steps on its tokens: padded in another order, and
    packed. With order="row" log-probabilities have the bits of one batch.
    """
    model = small()
    prompts, mask = tokens(4, 5), torch.ones(4, 5, dtype=torch.int64)
    mask[1, :2], mask[3, :4] = 0, 0
    with record_routing(model) as recorded, torch.no_grad():
        texts = model.generate(
            input_ids=prompts,
            attention_mask=mask,
            max_new_tokens=4,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
    mask = torch.cat([mask, torch.ones(4, 4, dtype=torch.int64)], 1)
    sequences = [
        part[there[:-1].bool()] for part, there in zip(recorded.sequences(4), mask, strict=True)
    ]
    assert [len(s) for s in sequences] == [8, 6, 8, 4]
    kept = [s.to("cpu", torch.int8) for s in sequences]
    for order in [2, 0], [3, 1]:
        routing = Routing.padded([kept[i] for i in order], mask[order])
        assert routing.partial
        with replay_routing(model, routing), record_routing(model) as seen:
            model(input_ids=texts[order], attention_mask=mask[order])
        for i, part in zip(order, seen.sequences(2), strict=True):
            assert same_ids(part[mask[i].bool()][:-1], sequences[i])
    lengths = mask.sum(1)
    packed = Routing.packed(kept, lengths.tolist())
    assert len(packed) == int(lengths.sum())
    assert same_ids(packed[:8], Routing.concat([packed[torch.arange(8)]]))
    starts = lengths.cumsum(0) - lengths
    for start, s in zip(starts, sequences, strict=True):
        assert same_ids(packed[int(start) : int(start) + len(s)].to(dtype=torch.int64), s)
    both = packed[[3, 1]]
    assert len(both) == 2


def test_bits_of_log_probabilities_do_not_depend_on_the_batch() -> None:
    model, given = small(), tokens(4, 6)
    with options.override(order="row"), torch.no_grad():
        model.set_experts_implementation("fusion_moe")
        with record_routing(model) as routing:
            model(input_ids=given)
        name = routing.called[0]
        experts = model.get_submodule(name)
        x = torch.randn(24, 32)
        ids, w = routing.rows(name)
        want = experts(x, ids, w)
        turn = torch.randperm(24, generator=torch.Generator().manual_seed(1))
        part = routing[turn]
        assert torch.equal(experts(x[turn], *part.rows(name)), want[turn])


def test_compiled_code_sees_it_and_stays() -> None:
    """Compiled before; once more for the block, not for other rows of it."""
    model, given, made = small(), tokens(2, 6), []

    def backend(graph: Any, _: Any) -> Any:
        made.append(graph)
        return graph

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        plain = compiled(input_ids=given).logits
        with record_routing(model) as routing:
            torch.testing.assert_close(model(input_ids=given).logits, plain)
        before = len(made)
        for by in 1, 2, 3:
            other = shifted(routing, by)
            with replay_routing(model, other):
                want = model(input_ids=given).logits
                torch.testing.assert_close(compiled(input_ids=given).logits, want)
            assert not torch.allclose(want, plain)
        assert len(made) == before + 1
        assert torch.equal(compiled(input_ids=given).logits, plain)
        broken = torch.compile(model, backend="eager")
        with record_routing(model) as seen, replay_routing(model, other):
            broken(input_ids=given)
            broken(input_ids=given)
    assert same_ids(seen, Routing.concat([other, other]))


def test_rows_are_put_at_the_same_addresses() -> None:
    model, given = small(), tokens(2, 6)
    with record_routing(model) as routing:
        want = model(input_ids=given).logits
    with replay_routing(model, shifted(routing), "recorded") as replay:
        assert not torch.equal(model(input_ids=given).logits, want)
        replay.copy_(routing)
        assert torch.equal(model(input_ids=given).logits, want)
        with pytest.raises(ShapeError, match=r"\[12, 2\].*expected .*\[3, 2\].*as before"):
            replay.copy_(routing[:3])
        ids = {name: [(torch.full((12, K), -1), torch.ones(12, K))] for name in routing.called}
        with pytest.raises(ShapeError, match="rows without experts"):
            replay.copy_(Routing(routing.experts, ids, True))
        assert torch.equal(model(input_ids=given).logits, want)


@pytest.mark.parametrize("kind", ["nvfp4", "qat", "lora", "peft", "fused routers"])
def test_models_that_are_changed(kind: str) -> None:
    """A routing of the plain model, replayed in what trains, and the other way round."""
    plain, model, given = small(), small(), tokens(2, 6)
    if kind in ("nvfp4", "lora"):
        fusion_moe.quantize_(model)
    if kind == "qat":
        fusion_moe.qat_(model, "nvfp4")
    if kind == "lora":
        fusion_moe.nn.add_lora_(model, rank=2)
    if kind == "fused routers":
        fuse_routers_(model)
    if kind == "peft":
        peft = pytest.importorskip("peft")
        named = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_parameters=named))
    for ours, theirs in (plain, model), (model, plain):
        with record_routing(ours) as routing:
            ours(input_ids=given)
        other = shifted(routing)
        with record_routing(theirs) as seen, replay_routing(theirs, other):
            theirs(input_ids=given).logits.square().mean().backward()
        for name, want in zip(seen.called, other.called, strict=True):
            assert torch.equal(seen.rows(name)[0], other.rows(want)[0])


def test_llama4_once_it_is_quantized() -> None:
    model = tiny("llama4")
    refused = pytest.raises(UnsupportedError, match="no layer of experts in a Llama4For")
    with refused, record_routing(model):
        pass
    fusion_moe.quantize_(model)
    with record_routing(model) as routing:
        want = logits(model, tokens(1, 5))
    for by, equal in (0, True), (1, False):
        with replay_routing(model, shifted(routing, by)):
            assert torch.equal(logits(model, tokens(1, 5)), want) == equal


def test_layers_that_run_several_times() -> None:
    model = tiny(LOOPED)
    with record_routing(model) as routing:
        model(input_ids=tokens(2, 9))
    with pytest.raises(ShapeError, match="expected as many tokens in all layers"):
        len(routing)


def test_vllms_form() -> None:
    """All layers, those without experts too; ids alone."""
    model = tiny("deepseek_v3")  # the first layer is dense
    ids = np.random.default_rng(0).integers(0, 4, (7, LAYERS, K)).astype(np.uint8)
    routing = Routing.from_vllm(ids, model)
    (name,) = routing.called
    assert (name, len(routing)) == ("model.layers.1.mlp.experts", 7)
    found, weights = routing.rows(name)
    assert (found.dtype, weights) == (torch.int16, None)
    assert np.array_equal(found.numpy(), ids[:, 1])
    with replay_routing(model, Routing.packed([routing], [8])), record_routing(model) as seen:
        model(input_ids=tokens(1, 8))
    assert same_ids(seen[:7], routing.to(dtype=torch.int64))
    with pytest.raises(ShapeError, match="ids of 1 layer; expected those of all layers"):
        Routing.from_vllm(ids[:, :1], model)
    with pytest.raises(ShapeError, match=r"\[tokens, layers, k\]"):
        Routing.from_vllm(ids[0], model)
    with pytest.raises(DtypeError, match="expected integers"):
        Routing.from_vllm(ids.astype(np.float32), model)
    for bad in (4, -2, 2**16, 2**40):  # the third is 0 in 16 bits
        wide = ids.astype(np.int64)
        wide[0, 0, 0] = bad  # of a layer without experts: not looked at
        assert torch.equal(Routing.from_vllm(wide, model).rows(name)[0], found)
        wide[3, 1, 1] = bad
        with pytest.raises(GroupsError, match=f"expert {bad}; expected 0 to 3, or -1"):
            Routing.from_vllm(wide, model)
    wide[0, 0, 0], wide[3, 1, 1] = -1, 1
    assert not Routing.from_vllm(wide, model).partial
    assert Routing.from_vllm(ids.astype(np.uint16), model).rows(name)[0].equal(found)


@pytest.mark.parametrize("weights", ["own", "recorded"])
def test_a_row_is_known_as_a_whole_or_not_at_all(weights: str) -> None:
    """Else an expert that is given might be the router's choice for what is not."""
    model, given = small(), tokens(1, 6)
    with record_routing(model) as own:
        model(input_ids=given)
    calls = {}
    for name, [(ids, w)] in own.calls.items():
        ids = ids.flip(1).clone()
        ids[:4, 0] = -1
        calls[name] = [(ids, w.flip(1))]
    with (
        record_routing(model) as seen,
        replay_routing(model, Routing(own.experts, calls, partial=True), weights) as replay,
    ):
        model(input_ids=given)
        replay.copy_(Routing(own.experts, calls, partial=True))
        model(input_ids=given)
    for name in own.experts:
        want = own.rows(name)[0].clone()
        want[4:] = want[4:].flip(1)
        assert seen.rows(name)[0].equal(torch.cat([want, want]))


def test_errors_name_what_is_missing() -> None:
    model, given = small(), tokens(2, 6)
    with record_routing(model) as routing:
        model(input_ids=given)
    first, second = routing.experts
    assert first == "model.layers.0.mlp.experts"
    alone = Routing(routing.experts, {n: [(i, None)] for n, [(i, _)] in routing.calls.items()})
    one = {name: [(ids[:, :1], w[:, :1])] for name, [(ids, w)] in routing.calls.items()}
    high = {name: [(ids + 7, w)] for name, [(ids, w)] in routing.calls.items()}
    halves = routing.sequences(2)
    for wrong, weights, kind, text in (
        (routing[:5], "own", ShapeError, f"{first}: 5 rows of routing for 12 tokens; expected a"),
        (routing[:5], "recorded", ShapeError, f"{first}: 5 rows of routing for 12 tokens"),
        (Routing(routing.experts, one), "own", ShapeError, "1 expert a token; expected 2, as the"),
        (Routing(routing.experts, one), "recorded", ShapeError, "1 expert a token; expected 2"),
        (Routing(routing.experts, high), "own", GroupsError, f"{first}: expert 1.; expected 0 to"),
        (alone, "recorded", ShapeError, f"{first}: a routing without weights"),
        (Routing({first: 8}, {first: routing.calls[first]}), "own", ShapeError, "layers.1.*model"),
        *(
            (other, weights, ShapeError, "layers.1.mlp.experts: 0 rows of routing for 12 tokens")
            for other in [Routing(routing.experts, {**routing.calls, second: []})]
            for weights in ("own", "recorded")
        ),
        (Routing(routing.experts), "own", ShapeError, f"{first}: 0 rows of routing for 12 tokens"),
    ):
        with pytest.raises(kind, match=text), replay_routing(model, wrong, weights):
            model(input_ids=given)
        assert not is_changed(model)
    for call, kind, text in (
        (lambda: Routing.packed(halves, [6, 9]), ShapeError, "sequence 1: 6 rows .* 9 tokens; exp"),
        (lambda: Routing.packed(halves, [6]), ShapeError, "2 sequences; expected 1"),
        (lambda: Routing.concat([routing, alone]), ShapeError, "with weights, and without"),
        (lambda: routing.sequences(5), ShapeError, "a call with 12 rows; expected 5 sequences"),
        (lambda: routing[torch.ones(3).bool()], ShapeError, "a mask of 3 rows; expected 12"),
        (lambda: routing[3], ShapeError, r"rows \[\]; expected one dimension"),
        (lambda: routing[torch.ones(2, 3).long()], ShapeError, r"rows \[2, 3\]"),
        (lambda: Routing.packed([Routing(routing.experts)], [1]), ShapeError, "sequence 0: 0 rows"),
        (lambda: Routing({"a": 300}).to("cpu", torch.int8), DtypeError, "ids to 299 in torch.int8"),
    ):
        with pytest.raises(kind, match=text):
            call()
    ids, w = torch.zeros(3, K, dtype=torch.int64), torch.ones(3, K)
    for calls, kind, text in (
        ([(ids.float(), w)], DtypeError, "ids in torch.float32"),
        ([(ids.bool(), w)], DtypeError, "ids in torch.bool"),
        ([(ids[:, 0], w)], ShapeError, r"ids \[3\], weights \[3, 2\]"),
        ([(ids, w[:1])], ShapeError, r"weights \[1, 2\]; expected both \[rows, k\]"),
        ([(ids, w), (ids[:, :1], w[:, :1])], ShapeError, "one k for all calls, 2"),
    ):
        with pytest.raises(kind, match=text):
            Routing({"a": 8}, {"a": calls}).rows("a")
    with (
        pytest.raises(ValueError, match="weights = 'mine'"),
        replay_routing(model, routing, "mine"),
    ):
        pass


@pytest.mark.parametrize("weights", ["own", "recorded"])
def test_copies_have_their_own_routing(weights):
    """Of a model that replays or records: a target network, or an average, say."""
    model, ids = small(), tokens(2, 5)
    model.gradient_checkpointing_enable()
    want = model(ids).logits
    with record_routing(model) as own:
        model(ids)
        recording = copy.deepcopy(model)
    with replay_routing(model, shifted(own), weights):
        replayed, copy_of = model(ids).logits, copy.deepcopy(model)
        assert torch.equal(copy_of(ids).logits, want)
        assert not torch.equal(replayed, want)
    rows = {name: len(calls) for name, calls in own.calls.items()}
    for other in (recording, copy_of):
        other.train()
        logits = other(ids).logits  # computed again in the backward, by its own experts
        logits.square().mean().backward()
        assert torch.equal(logits, want)
        with replay_routing(other, shifted(own), weights):
            assert torch.equal(other(ids).logits, replayed)
        assert torch.equal(other(ids).logits, want)
    model.train()
    model(ids).logits.square().mean().backward()
    pairs = zip(copy_of.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(p.grad, q.grad) for p, q in pairs if q.grad is not None)
    assert rows == {name: len(calls) for name, calls in own.calls.items()}
