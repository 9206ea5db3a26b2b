"""GroupedLinear against a loop in float64: results, gradients, which of them there are, parameters
and what holds them.
"""

from __future__ import annotations

import copy
import io
import pickle
from itertools import product

import pytest
import torch
from bad_calls import messages
from fusions import assert_same_bits
from layers import (
    BOTH,
    COUNTS,
    NEAR,
    ROWS,
    SIZES,
    G,
    K,
    N,
    assert_near,
    gradients,
    layer,
    linear,
    stacked,
    uniform,
    wide,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import prune
from ways import compiled

from fusion_moe import options
from fusion_moe.definitions.tensor_lists import are_neighbours
from fusion_moe.nn import GroupedLinear, Sequential

pytestmark = pytest.mark.usefixtures("meaning")


def rows(dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return uniform(ROWS, K, dtype=dtype, seed=seed)


# What it computes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "scaled"), [(torch.bfloat16, False), (torch.float32, True)])
def test_kernels_against_a_loop(dtype, scaled):
    with options.override(target="auto"):
        compare(dtype, True, False, scaled)


@pytest.mark.parametrize(
    ("dtype", "bias", "single", "scaled"), list(product(NEAR, BOTH, BOTH, BOTH))
)
def test_against_a_loop(dtype, bias, single, scaled):
    compare(dtype, bias, single, scaled)


def compare(dtype: torch.dtype, bias: bool, single: bool, scaled: bool) -> None:
    """Results and all gradients; rows past the last group are NaN, and reach nothing."""
    module = layer(
        G,
        K,
        N,
        bias=bias,
        dtype=dtype,
        single_grouped_weight=single,
        single_grouped_bias=single,
        scale_bias=scaled,
    )
    x, dy, scales = (
        rows(dtype),
        uniform(ROWS, N, dtype=dtype, seed=8),
        uniform(ROWS, low=0.0, high=1.0, seed=9),
    )
    for t in (x, dy, scales):
        t[sum(SIZES) :] = float("nan")
    takes = (scales.requires_grad_(),) if scaled and bias else ()
    y = module(x.requires_grad_(), COUNTS, *takes)
    y.backward(dy)

    inside = sum(SIZES)
    other, weight, factor = wide(x[:inside]), stacked(module, "weight"), wide(scales[:inside])
    offset = stacked(module, "bias") if bias else None
    want = linear(other, weight, offset, SIZES, factor if takes else None)
    want.backward(dy[:inside].double())
    assert y.dtype == dtype
    assert_near(y[:inside], want, dtype)
    assert not y[inside:].any()
    assert_near(x.grad[:inside], other.grad, dtype, 4)
    assert not x.grad[inside:].any()
    for found, grad in zip(gradients(module, "weight"), weight.grad, strict=True):
        assert_near(found, grad, dtype)
    for found, grad in zip(
        gradients(module, "bias") if bias else (), offset.grad if bias else (), strict=True
    ):
        assert_near(found, grad, dtype)
    if takes:
        assert_near(scales.grad[:inside], factor.grad, dtype, 4)
        assert not scales.grad[inside:].any()
    assert not gradients(module, "weight")[1].any()  # a group without rows


@pytest.mark.parametrize(
    "counts",
    [
        COUNTS,
        *map(COUNTS.to, (torch.int32, torch.int16, torch.uint8)),
        COUNTS.view(2, 2),
        list(SIZES),
        SIZES,
    ],
    ids=str,
)
def test_counts_of_any_form(counts):
    module, x = layer(G, K, N), rows()
    want = module(x, offs=COUNTS.cumsum(0, dtype=torch.int32))
    assert_same_bits([module(x, counts)], [want])


def test_leading_dimensions():
    module, x = layer(2, K, N), uniform(2, 3, K)
    y = module(x, torch.tensor([4, 2]))
    assert y.shape == (2, 3, N)
    assert_same_bits([y.flatten(0, 1)], [module(x.flatten(0, 1), torch.tensor([4, 2]))])
    assert module(x[:, :0], torch.tensor([0, 0])).shape == (2, 0, N)


def test_autocast():
    """The result in its dtype; gradients in those of what they belong to."""
    module, x = layer(G, K, N), rows().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x, COUNTS)
    assert y.dtype == torch.bfloat16
    y.backward(torch.ones_like(y))
    assert (x.grad.dtype, module.weight0.grad.dtype, module.bias0.grad.dtype) == (
        torch.float32,
    ) * 3
    half = copy.deepcopy(module).bfloat16()
    assert_same_bits([y], [half(x.detach().bfloat16(), COUNTS)])


# Which gradients there are ------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", list(product(BOTH, repeat=4)))
def test_gradients_are_for_those_that_want_one(wanted):
    """Of x, of the weights of groups 0 and 2, of those of 1 and 3, of the bias of group 2: each as
    when all are wanted, else None.
    """
    of_x, even, odd, of_bias = wanted
    found = []
    for some in BOTH:
        module, x = layer(G, K, N), rows().requires_grad_(of_x or not some)
        for key, p in module.named_parameters() if some else ():
            g = int(key[-1])
            p.requires_grad_(
                (odd if g % 2 else even) if key.startswith("weight") else of_bias and g == 2
            )
        y = module(x, COUNTS)
        assert y.requires_grad == (any(wanted) or not some)
        if y.requires_grad:
            y.backward(uniform(ROWS, N, seed=8))
        found.append([x, *module.parameters()])
    for every, t in zip(*found, strict=True):
        assert (t.grad is not None) == t.requires_grad
        if t.grad is not None:
            assert_same_bits([t.grad], [every.grad])


def test_gradients_of_experts_are_slices_of_one():
    module = layer(G, K, N)
    module(rows(), COUNTS).sum().backward()
    assert len({p.untyped_storage().data_ptr() for p in gradients(module, "weight")}) == 1


# Parameters ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("single", BOTH)
def test_new_parameters(single):
    torch.manual_seed(0)
    module = GroupedLinear(3, 100, 60, single_grouped_weight=single, single_grouped_bias=single)
    names = (
        ["weight", "bias"]
        if single
        else [f"{name}{g}" for name in ("weight", "bias") for g in range(3)]
    )
    assert list(dict(module.named_parameters())) == names
    for weight in module.each("weight"):
        # kaiming-uniform with a = sqrt(5): +-1 / sqrt(K), as torch.nn.Linear
        assert 0.09 < weight.abs().max() <= 100**-0.5
        assert abs(weight.mean()) < 0.01
    assert not any(bias.any() for bias in module.each("bias"))
    nothing = GroupedLinear(3, 100, 60, bias=False, single_grouped_bias=single)
    assert all(getattr(nothing, name) is None for name in names if name.startswith("bias"))
    filled = []
    ones = GroupedLinear(
        3, 10, 6, single_grouped_weight=single, init_method=lambda w: filled.append(w.fill_(1.0))
    )
    assert [w.shape for w in filled] == [(6, 10)] * 3
    assert all(w.eq(1).all() for w in ones.each("weight"))


def neighbours(module: GroupedLinear) -> bool:
    return are_neighbours(module.each("weight"))


def reloaded(module: GroupedLinear) -> GroupedLinear:
    torch.save(module, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


STAYS = {
    "copied": copy.deepcopy,
    "cast": lambda m: m.bfloat16().half().float(),
    "saved": reloaded,
    "assigned": lambda m: m.load_state_dict(separate(m), assign=True) and m,
}


@pytest.mark.parametrize("how", STAYS)
def test_experts_stay_neighbours(how):
    module = layer(G, K, N)
    assert neighbours(module)
    assert neighbours(STAYS[how](module))


def test_what_pickle_gives_back_is_one_buffer():
    """Also for an optimizer that came with the module."""
    module = layer(G, 64, 256)
    module.weight1.tag = "kept"
    other, optimizer = pickle.loads(
        pickle.dumps((module, torch.optim.SGD(module.parameters(), 0.1)))
    )
    assert neighbours(other)
    assert other.weight0.untyped_storage().nbytes() == G * other.weight0.nbytes
    assert all(
        p is q for p, q in zip(optimizer.param_groups[0]["params"], other.parameters(), strict=True)
    )
    assert other.weight1.tag == "kept"
    assert_same_bits(list(other.parameters()), list(module.parameters()))


def separate(module: GroupedLinear) -> dict[str, Tensor]:
    """A state dict whose tensors are neighbours of nothing, as in files."""
    return {key: t.clone() for key, t in module.state_dict().items()}


FROM_META = {
    "to_empty": lambda m, state: m.to_empty(device="cpu").load_state_dict(state),
    "assign": lambda m, state: m.load_state_dict(state, assign=True),
    "assign each": lambda m, state: [
        m.load_state_dict({key: t}, strict=False, assign=True) for key, t in state.items()
    ],
    "set each": lambda m, state: [setattr(m, key, nn.Parameter(t)) for key, t in state.items()],
}


@pytest.mark.parametrize("how", FROM_META)
def test_experts_of_a_module_made_on_meta_become_neighbours(how):
    ours, module = layer(G, K, N), GroupedLinear(G, K, N, device="meta")
    FROM_META[how](module, separate(ours))
    assert neighbours(module)
    assert_same_bits([module(rows(), COUNTS)], [ours(rows(), COUNTS)])
    assert neighbours(nn.utils.skip_init(GroupedLinear, G, K, N))


class Subclass(Tensor):
    """Stands for DTensor."""


def fake(t: Tensor) -> Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(t)


OF_OTHERS = {
    "part of a storage": lambda t: torch.stack([t, t])[1],
    "shared memory": lambda t: t.share_memory_(),
    "a subclass": lambda t: t.as_subclass(Subclass),
    "fake": fake,
}


@pytest.mark.parametrize("how", [*OF_OTHERS, "one for two groups"])
def test_parameters_that_stay_where_they_are(how):
    module = GroupedLinear(G, K, N, bias=False, device="meta")
    state = separate(layer(G, K, N, bias=False))
    if how in OF_OTHERS:
        state = {key: OF_OTHERS[how](t) for key, t in state.items()}
    else:
        state["weight1"] = state["weight0"] = nn.Parameter(state["weight0"])
    module.load_state_dict(state, assign=True)
    storages = [getattr(module, key).untyped_storage()._cdata for key in state]
    assert storages == [t.untyped_storage()._cdata for t in state.values()]


REPARAMETRIZED = {
    "pruned": lambda m, key: prune.l1_unstructured(m, key, 0.5),
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "spectral_norm with a hook": nn.utils.spectral_norm,
}


@pytest.mark.parametrize(("how", "single"), list(product(REPARAMETRIZED, BOTH)))
def test_a_reparametrized_weight(how, single):
    """Whose parameter has another name: it is moved, cast and copied, and trains."""
    module = layer(G, K, N, single_grouped_weight=single).eval()
    REPARAMETRIZED[how](module, "weight" if single else "weight1")
    # torch copies no pruned module
    others = [module] if how == "pruned" else [module, copy.deepcopy(module)]
    want = module(rows(), COUNTS)
    for other in others:
        y = other.double().float()(rows(), COUNTS)
        torch.testing.assert_close(y, want)
        y.sum().backward()
        assert all(p.grad is not None for p in other.parameters())


def test_on_meta():
    """Shapes and dtypes, without memory."""
    y = GroupedLinear(G, K, N, device="meta", dtype=torch.bfloat16)(
        rows(torch.bfloat16).to("meta"), COUNTS.to("meta")
    )
    assert (y.shape, y.dtype, y.is_meta) == ((ROWS, N), torch.bfloat16, True)


@pytest.mark.parametrize("how", ["apart", "a gap", "strides", "an offset", "meta"])
def test_other_parameters(how):
    """In any memory they compute the same, and get their own gradients."""
    ours = layer(G, K, N, bias=False)
    module = GroupedLinear(G, K, N, bias=False, device="meta" if how == "meta" else None)
    buffer = torch.zeros(G + 1, N + 1, K)
    for g, value in enumerate(w.detach() for w in ours.each("weight")):
        t = {
            "apart": value.clone(),
            "a gap": buffer[g, :N],
            "strides": buffer[g, :N].clone().T.contiguous().T,
        }.get(how, buffer.view(-1)[N * K * g + 7 :][: N * K].view(N, K))
        module.register_parameter(f"weight{g}", nn.Parameter(t.copy_(value)))
    results = []
    for m in (module, ours):
        x = rows().requires_grad_()
        y = m(x, COUNTS)
        y.sum().backward()
        results.append([y, x.grad, *gradients(m, "weight")])
    assert_same_bits(*results)
    assert neighbours(module) == (how in ("an offset", "meta"))


@pytest.mark.parametrize(("ours", "theirs"), list(product(BOTH, BOTH)))
def test_state_dicts_of_either_form(ours, theirs):
    """Also with what Transformer Engine keeps there, scales for FP8."""
    module, other = (
        layer(G, K, N, seed=seed, single_grouped_weight=single, single_grouped_bias=single)
        for seed, single in ((1, ours), (50, theirs))
    )
    extra = {"_extra_state": torch.empty(0, dtype=torch.uint8)}
    other.load_state_dict({**module.state_dict(), **extra})
    assert_same_bits([other(rows(), COUNTS)], [module(rows(), COUNTS)])
    assert theirs or neighbours(other)


@pytest.mark.parametrize(("single", "autocast"), list(product(BOTH, BOTH)))
def test_biases_that_the_caller_adds(single, autocast):
    """Neither added nor lost: what the caller does with them reaches their gradients."""
    module = layer(G, K, N, return_bias=True, single_grouped_bias=single)
    bare = layer(G, K, N, bias=False)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, biases = module(rows(), COUNTS)
        assert_same_bits([y], [bare(rows(), COUNTS)])
    assert [(b.shape, b.dtype) for b in biases] == [((N,), y.dtype)] * G
    added, dy = torch.stack(biases).repeat_interleave(COUNTS, 0), uniform(sum(SIZES), N, seed=8)
    added.backward(dy.to(added.dtype))
    want = torch.stack([part.sum(0) for part in dy.split(SIZES)])
    assert_near(torch.stack(gradients(module, "bias")), want, added.dtype, scale=4.0)


def test_return_bias_without_bias():
    x, module = rows(), layer(G, K, N, bias=False, return_bias=True)
    y, biases = module(x, COUNTS, out=torch.zeros(ROWS, N))
    assert biases == []
    assert y.equal(layer(G, K, N, bias=False)(x, COUNTS))


# Memory of the caller -----------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "trained"), list(product((torch.float32, torch.bfloat16), BOTH)))
def test_buffers_of_the_caller(dtype, trained):
    """They hold the result and the gradient of x; rows past the last group keep what was there;
    another step may use them again.
    """
    module = layer(G, K, N, dtype=dtype).requires_grad_(trained)
    buffers = torch.empty(ROWS, N, dtype=dtype), torch.empty(ROWS, K, dtype=dtype)
    inside, dy = sum(SIZES), uniform(ROWS, N, dtype=dtype, seed=8)
    other = rows(dtype).requires_grad_()
    want = module(other, COUNTS)
    want.backward(dy)
    for _ in range(2):
        for buffer in buffers:
            buffer.fill_(7.0)
        x = rows(dtype).requires_grad_().clone()
        y = module(x, COUNTS, out=buffers[0], grad_input=buffers[1])
        found = torch.autograd.grad(y, x, dy)
        assert not buffers[0].requires_grad
        for buffer, t, wanted in zip(buffers, (y, *found), (want, other.grad), strict=True):
            assert t.data_ptr() == buffer.data_ptr()
            assert_same_bits([buffer[:inside]], [wanted[:inside]])
            assert (buffer[inside:] == 7.0).all()
    with torch.no_grad():
        buffers[0].zero_()
        module(x, COUNTS, out=buffers[0])
        assert_same_bits([buffers[0][:inside]], [want[:inside]])


def test_a_leaf_keeps_its_gradient():
    """Of all backwards, though each writes the same buffer."""
    module, buffer = layer(G, K, N), torch.empty(ROWS, K)
    x, other = rows().requires_grad_(), rows().requires_grad_()
    for seed in (8, 9):
        dy = uniform(ROWS, N, seed=seed)
        module(x, COUNTS, grad_input=buffer).backward(dy)
        module(other, COUNTS).backward(dy)
    assert_same_bits([x.grad], [other.grad])


# torch.compile ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("single", "scaled"), [(True, False), (False, True)])
def test_compiled(single, scaled):
    """One graph, for any number of rows, and as eager; parts are joined without a copy."""
    module = layer(
        G, K, N, single_grouped_weight=single, single_grouped_bias=single, scale_bias=scaled
    )
    run = compiled(module)
    for counts in (COUNTS, COUNTS.flip(0) + 1):
        results = []
        for f in (module, run):
            module.zero_grad()
            x = uniform(int(counts.sum()) + 1, K).requires_grad_()
            y = f(x, counts, *([uniform(len(x), seed=5)] if scaled else []))
            y.square().sum().backward()
            results.append([y, x.grad, *(p.grad for p in module.parameters())])
        for found, want in zip(*results, strict=True):
            torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


# What is refused ----------------------------------------------------------------------------------


def test_bad_calls(golden):
    """What was found, what was expected, what to do; nothing is written."""
    module, x = layer(G, K, N), rows()
    ends, out = COUNTS.cumsum(0, dtype=torch.int32), torch.full((ROWS, N), 7.0)
    scaled = layer(G, K, N, scale_bias=True)
    square = layer(G, K, K)
    alone = layer(1, K, K)
    codes = layer(G, K, N, single_grouped_weight=True)
    codes.register_parameter(
        "weight", nn.Parameter(torch.zeros(G, N, K, dtype=torch.uint8), requires_grad=False)
    )
    missing = layer(G, K, N, bias=False)
    missing.register_parameter("weight1", None)
    mixed = layer(G, K, N, bias=False)
    mixed.register_parameter("weight1", nn.Parameter(torch.zeros(N, K).bfloat16()))
    cases = {
        "neither": lambda: module(x),
        "both": lambda: module(x, COUNTS, offs=ends),
        "too few counts": lambda: module(x, COUNTS[:3]),
        "counts in a list": lambda: module(x, [float(n) for n in SIZES]),
        "too few numbers": lambda: module(x, [1, 2]),
        "counts of floats": lambda: module(x, COUNTS.float()),
        "long ends": lambda: module(x, offs=COUNTS.cumsum(0)),
        "a negative count": lambda: module(x, torch.tensor([5, -1, 7, 3])),
        "too many rows": lambda: module(x, COUNTS + 1),
        "counts elsewhere": lambda: module(x, COUNTS.to("meta")),
        "rows of another width": lambda: module(x[:, 1:], COUNTS),
        "rows of integers": lambda: module(x.long(), COUNTS),
        "weights elsewhere": lambda: GroupedLinear(G, K, N, device="meta")(x, COUNTS),
        "no scales": lambda: scaled(x, COUNTS),
        "scales for nothing": lambda: module(x, COUNTS, x[:, 0]),
        "too few scales": lambda: scaled(x, COUNTS, x[1:, 0]),
        "a packed weight": lambda: codes(x, COUNTS),
        "no weight": lambda: missing(x, COUNTS),
        "two dtypes": lambda: mixed(x, COUNTS),
        "out of another shape": lambda: module(x, COUNTS, out=out[1:]),
        "out of another dtype": lambda: module(x, COUNTS, out=out.bfloat16()),
        "out elsewhere": lambda: module(x, COUNTS, out=out.to("meta")),
        "out with strides": lambda: module(x, COUNTS, out=torch.zeros(N, ROWS).T),
        "out that is tracked": lambda: module(x, COUNTS, out=out.clone().requires_grad_()),
        "out over x": lambda: square(x, COUNTS, out=x),
        "out over a weight": lambda: alone(
            x[:1].repeat(K, 1), offs=ends[:1], out=alone.weight0.detach()
        ),
        "grad_input over out": lambda: square(x, COUNTS, out=x + 0, grad_input=x),
        "nothing to do": lambda: layer(G, K, N, delay_wgrad_compute=True).backward_dw(),
        "nothing delayed": lambda: module.backward_dw(),
        "no groups": lambda: GroupedLinear(0, K, N),
        "scales for what is returned": lambda: layer(G, K, N, scale_bias=True, return_bias=True),
        "biases in a sequence": lambda: Sequential(layer(G, K, N, return_bias=True))(x, COUNTS),
        "a half of a column": lambda: GroupedLinear(G, 1.5, N),
        "integers": lambda: GroupedLinear(G, K, N, dtype=torch.int8),
    }
    golden(messages(cases))
    assert (out == 7.0).all()


@pytest.mark.parametrize("single", BOTH)
def test_state_dicts_that_do_not_fit_are_torchs_error(single):
    """Tensors of the other form, which is joined or divided, of other shapes; and what is none."""
    module = GroupedLinear(2, 8, 8, bias=False, single_grouped_weight=single)
    for state in (
        {"weight": torch.ones(())},
        {"weight": None},
        {"weight": torch.ones(3, 8, 8)},
        {"weight": [torch.ones(8, 8)] * 2},
        {"weight0": torch.ones(8, 8), "weight1": torch.ones(8, 7)},
        {"weight0": torch.ones(8, 8), "weight1": None},
    ):
        with pytest.raises(
            RuntimeError,
            match=r"Error\(s\) in loading state_dict for "
            r"GroupedLinear",
        ):
            module.load_state_dict(state)


@pytest.mark.compiler
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_split_sizes_whose_number_a_tracer_does_not_know():
    """Those of torch.bincount."""
    module, x, ids = (
        layer(G, K, N, single_grouped_weight=True),
        uniform(12, K),
        torch.arange(12) // 3,
    )
    call = torch.compile(
        lambda x, ids: module(x, torch.bincount(ids, minlength=G)),
        backend="fusion_moe",
        fullgraph=True,
    )
    torch.testing.assert_close(call(x, ids), module(x, torch.bincount(ids, minlength=G)))
    with pytest.raises(AssertionError, match="5==4"):
        call(x, ids + 1)
