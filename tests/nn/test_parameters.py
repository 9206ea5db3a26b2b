"""What strangers do to all parameters of a model alike: codes and scales survive averages, copies
and moves, and other arithmetic of them is refused.
"""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import distributed, nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    get_swa_avg_fn,
    update_bn,
)

from fusion_moe import encodings, options
from fusion_moe.encodings.convert import quantize_weight
from fusion_moe.encodings.encoded import Encoded, EncodedParameter, plain
from fusion_moe.errors import UnsupportedError
from fusion_moe.integrations.serving import Kept
from fusion_moe.nn import Experts, NVFP4GroupedLinear, QuantizedLinear, add_lora_, prepare_

E, H, I = 2, 64, 64
FORMATS = ("nvfp4", "mxfp4", "mxfp8", "fp8", "fp8_tensor", "int4", "int8_32", "nf4")


def experts(name: str = "nvfp4", seed: int = 0) -> Experts:
    torch.manual_seed(seed)
    encoding = encodings.find(name)
    up, down = torch.randn(E, 2 * I, H) / 8, torch.randn(E, H, I) / 8
    return Experts(quantize_weight(up, encoding), quantize_weight(down, encoding))


def model(name: str = "nvfp4", seed: int = 0) -> nn.Module:
    """Experts, a linear layer with the same encoding, and what trains."""
    linear = QuantizedLinear(quantize_weight(torch.randn(H, H) / 8, encodings.find(name)))
    parts = {"experts": experts(name, seed), "linear": linear, "head": nn.Linear(H, 8)}
    return nn.ModuleDict(parts)


def parts_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """The bytes of codes and scales."""
    return {
        name: plain(p).detach().reshape(-1).view(torch.uint8).clone()
        for name, p in module.named_parameters()
        if isinstance(p, EncodedParameter)
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and len(a) > 0 and all(t.equal(b[name]) for name, t in a.items())


def test_codes_and_scales_have_the_type():
    module = NVFP4GroupedLinear.from_float(torch.randn(E, H, H), torch.zeros(E, H))
    kinds = {name: type(p) for name, p in module.named_parameters()}
    assert kinds.pop("bias") is nn.Parameter
    assert set(kinds.values()) == {EncodedParameter}
    module.weight = nn.Parameter(module.weight.data.clone(), requires_grad=False)  # as loaders do
    assert type(module.weight) is EncodedParameter
    assert isinstance(module.weight, nn.Parameter)


AVERAGES = {
    "mean": {},
    "mean of a function": {"avg_fn": get_swa_avg_fn()},
    "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "ema of a function": {"avg_fn": get_ema_avg_fn(0.9)},
    "ema of buffers": {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
}


@pytest.mark.parametrize("how", AVERAGES)
@pytest.mark.parametrize("name", FORMATS)
def test_the_average_of_equal_parts_is_the_part(name, how):
    made = model(name)
    average, before = AveragedModel(made, **AVERAGES[how]), parts_of(made)
    for step in range(3):
        nn.init.constant_(made["head"].weight, float(step))
        average.update_parameters(made)
    assert same(parts_of(average.module), before)
    assert same(parts_of(made), before)
    rates = {"mean": 1.0, "mean of a function": 1.0}
    want = rates.get(how, 0.9 * (0.1 * 1) + 0.1 * 2)  # zeros first, then ones and twos
    torch.testing.assert_close(average.module["head"].weight, torch.full((8, H), want))


def test_adapters_are_averaged():
    made = nn.ModuleDict({"experts": experts()})
    add_lora_(made, rank=2)
    average = AveragedModel(made, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    before = parts_of(made)
    for value in (1.0, 3.0):
        nn.init.constant_(made["experts"].down_lora.B, value)
        average.update_parameters(made)
    assert average.module["experts"].down_lora.B.eq(2).all()
    assert same(parts_of(average.module), before)
    update_bn([], average)


@pytest.mark.parametrize("weights", ["fp8", "both"])
def test_requantized_weights_among_buffers(weights):
    made = nn.ModuleDict({"experts": experts()})
    prepare_(made, weights=weights)
    how = get_ema_multi_avg_fn(0.9)
    average = AveragedModel(made, multi_avg_fn=how, use_buffers=True)
    for _ in range(2):
        average.update_parameters(made)
    x = torch.randn(3, H), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    with options.override(target="reference"), torch.no_grad():
        assert average.module["experts"](*x).equal(made["experts"](*x))
    buffers = made.bfloat16()["experts"].named_buffers()
    assert {type(t) for name, t in buffers if "requantized" in name} == {EncodedParameter}


@pytest.mark.parametrize("name", ["nvfp4", "int4"])
def test_the_average_of_others_is_refused(name):
    made, other = model(name), model(name, seed=1)
    for how in AVERAGES.values():
        average = AveragedModel(made, **how)
        average.update_parameters(made)
        with pytest.raises(UnsupportedError, match=rf"of [a-z_]+ of {name} .*equal"):
            average.update_parameters(other)


@pytest.mark.parametrize("name", FORMATS)
def test_averages_of_state_dicts(name):
    """As tools write that know no parameters, in place and out of place, by one and by lists."""
    made = experts(name)
    before, ours = parts_of(made), made.state_dict()
    average = {key: t.clone() for key, t in ours.items()}
    for key, t in average.items():
        t.copy_(0.9 * t + (1 - 0.9) * ours[key])
        t.lerp_(ours[key], 0.1)
    torch._foreach_lerp_([*average.values()], [*ours.values()], 0.1)
    soup = {key: sum([t, ours[key], ours[key]]) / 3 for key, t in average.items()}
    made.load_state_dict(soup)
    assert all(
        t.equal(before[key]) or ours[key].dtype == torch.float32  # whose average is rounded
        for key, t in parts_of(made).items()
    )
    other = experts(name, seed=1).state_dict()
    with pytest.raises(UnsupportedError, match="add"):
        _ = {key: 0.9 * t + 0.1 * other[key] for key, t in ours.items()}


def test_files_have_plain_tensors():
    made, file = experts("int4"), io.BytesIO()
    torch.save(made.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert {type(t) for t in loaded.values()} == {torch.Tensor}
    file = io.BytesIO()
    torch.save([made, *made.parameters()], file)
    file.seek(0)
    again, *parameters = torch.load(file, weights_only=False)
    assert same(parts_of(again), parts_of(made))
    assert {type(p) for p in parameters} == {EncodedParameter}


STATE = {
    "numbers of bytes": lambda t: t.float().max(),
    "bits": lambda t: t & 15,
    "a value": lambda t: t.view(-1)[-1:].fill_(3),
    "a table": lambda t: torch.arange(256.0)[t.long()] * torch.ones(t.shape),
}


@pytest.mark.parametrize("what", STATE)
def test_who_reads_a_state_dict_reads_bytes(what):
    t = experts("int4").state_dict()["down_proj"].clone()
    assert torch.equal(plain(STATE[what](t)), STATE[what](plain(t)))


REFUSED = {
    "mul_": lambda p: p.data.mul_(0.9),
    "add_": lambda p: p.data.add_(p.data, alpha=-0.1),
    "mul": lambda p: p * torch.rand(p.shape),
    "zero_": lambda p: p.zero_(),
    "normal_": nn.init.normal_,
    "uniform_": nn.init.kaiming_uniform_,
    "norm": lambda p: p.norm(),
    "linalg_vector_norm": lambda p: nn.utils.get_total_norm([p]),
    "abs": lambda p: p.abs().max(),
    "half": lambda p: p.half(),
    "to": lambda p: p.to(torch.float16),
    "copy_": lambda p: p.copy_(torch.zeros(p.shape, dtype=torch.float16)),
    ".data=": lambda p: setattr(p, "data", torch.zeros(p.shape, dtype=torch.float16)),
    "cat": lambda p: nn.utils.parameters_to_vector([p, nn.Parameter(torch.ones(1).half())]),
    "lerp": lambda p: torch.lerp(p, torch.zeros_like(p), 0.5),
    "_foreach_mul_": lambda p: torch._foreach_mul_([torch.ones(1), p], 0.9),
    "__setitem__": lambda p: p.__setitem__(0, 1.5),
    "histc": torch.histc,
    "mul with out": lambda p: torch.mul(p, 0.9, out=p.data),
    "lists by name": lambda p: torch._foreach_mul_(self=[p], scalar=0.9),
}


@pytest.mark.parametrize("what", REFUSED)
def test_arithmetic_is_refused_and_changes_nothing(what):
    for name in ("nvfp4", "int4", "fp8"):
        made = experts(name)
        before = parts_of(made)
        for p in made.parameters():
            with (
                torch.no_grad(),
                pytest.raises(UnsupportedError, match=f"of {name}.*expected copi"),
            ):
                REFUSED[what](p)
        assert same(parts_of(made), before)


def test_the_sentence(golden):
    with pytest.raises(UnsupportedError) as error:
        nn.init.normal_(experts().down_proj)
    golden(f"{error.value}\n")


READS = {
    "finite": lambda p: torch.isfinite(p).all() and not p.isnan().any(),
    "equal": lambda p: torch.equal(p, p.clone()) and torch.allclose(p, p) and bool((p == p).all()),
    "unequal": lambda p: not torch.equal(p, p.flip(0)),
    "sizes": lambda p: p.nbytes == p.numel() * p.element_size() and len(p) == E,
    "text": lambda p: "EncodedParameter" in repr(p),
    "bytes": lambda p: p.view(torch.uint8).numpy().nbytes == p.nbytes,
}


@pytest.mark.parametrize("what", READS)
@pytest.mark.parametrize("name", FORMATS)
def test_reads(name, what):
    assert all(READS[what](p) for p in experts(name).parameters())


COPIES = {
    "deepcopy": copy.deepcopy,
    "half": lambda m: m.half(),
    "to": lambda m: m.to(torch.float64),
    "share_memory": lambda m: m.share_memory(),
    "assigned": lambda m: m.load_state_dict(copy.deepcopy(m).state_dict(), assign=True) and m,
    "without memory": lambda m: m.to("meta").to_empty(device="cpu"),
    "frozen": lambda m: m.requires_grad_(False),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", ["nvfp4", "int4"])
def test_copies_and_moves_keep_the_type(name, how):
    made = experts(name)
    before = parts_of(made)
    after = parts_of(COPIES[how](made))
    assert after.keys() == before.keys()
    assert how == "without memory" or same(after, before)


def test_pickles_can_be_read():
    """torch's own of 8-bit floats cannot: they end in an error when they are loaded."""
    for name in "nvfp4", "mxfp4", "fp8":
        made = model(name)
        again = pickle.loads(pickle.dumps(made))
        assert same(parts_of(again), parts_of(made))
        for key, p in made.experts.named_parameters():
            other = again.experts.get_parameter(key)
            assert (type(other), other.dtype, other.holds) == (type(p), p.dtype, p.holds)


def test_views_and_copies_of_a_parameter():
    p = experts().down_proj
    copies = p.detach(), p.data, p.clone(), p.cpu(), p.view(-1), p[0], p.chunk(2)[1], p.to("cpu")
    assert all(isinstance(t, Encoded) and t.dtype == p.dtype for t in copies)
    assert type(p.as_subclass(torch.Tensor)) is torch.Tensor
    assert p.data.data_ptr() == p.data_ptr()


def test_ranks_send_each_other_bytes():
    """As vLLM does, which moves experts between ranks. Sums of codes stay refused."""
    part, other = experts().gate_up_proj, experts(seed=1).gate_up_proj
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        gathered = [torch.empty_like(plain(part))]
        distributed.all_gather(gathered, part)
        distributed.broadcast(other, 0)
        with pytest.raises(UnsupportedError, match="all_reduce of codes"):
            distributed.all_reduce(part)
    finally:
        distributed.destroy_process_group()
    assert torch.equal(gathered[0], plain(part))


def test_parametrizations_are_refused_and_change_nothing():
    for module, name in ((experts(), "gate_up_proj"), (model()["linear"], "weight")):
        before = parts_of(module)
        for parametrize in (parametrizations.weight_norm, parametrizations.orthogonal):
            with pytest.raises(UnsupportedError, match=rf"{name} of .*, removed or parametrized"):
                parametrize(module, name)
        assert same(parts_of(module), before)


def test_an_engine_takes_parts_off_for_a_while():
    module = experts()
    before, kept = parts_of(module), Kept(module)
    for name in dict(module.named_parameters()):
        delattr(module, name)
    assert kept.restored() is module
    assert same(parts_of(module), before)


def test_optimizers_leave_frozen_parts():
    made = model()
    before = parts_of(made)
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.1)
    made["head"](torch.ones(1, H)).sum().backward()
    assert nn.utils.clip_grad_norm_(made.parameters(), 1.0) > 0
    optimizer.step()
    assert same(parts_of(made), before)
    numbers = torch.zeros(sum(p.numel() for p in made.parameters()))
    with pytest.raises(UnsupportedError, match=r"\.data= with torch.float32 of codes"):
        nn.utils.vector_to_parameters(numbers, made.parameters())
