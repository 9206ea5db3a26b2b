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
from fusions import assert_same_bits
from hypothesis import given
from hypothesis import strategies as st
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
from routings import Partition, partitions
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import prune
from ways import compiled

from fusion_moe import options
from fusion_moe.definitions.tensor_lists import are_neighbours
from fusion_moe.errors import (
    DeviceError,
    DtypeError,
    GroupsError,
    OptionError,
    ShapeError,
    UnsupportedError,
)
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


@given(partitions(), st.booleans())
def test_any_partition(partition: Partition, single):
    groups = len(partition.sizes)
    module, x = (
        layer(groups, 6, 4, single_grouped_weight=single),
        uniform(partition.rows, 6).requires_grad_(),
    )
    dy = uniform(partition.rows, 4, seed=3)
    counts = torch.tensor(partition.sizes)
    y = module(x, counts)
    y.backward(dy)
    other, weight, bias = wide(x), stacked(module, "weight"), stacked(module, "bias")
    want = linear(other, weight, bias, partition.sizes)
    want.backward(dy.double())
    assert_near(y, want, torch.float32)
    assert_near(x.grad, other.grad, torch.float32)
    assert_near(torch.stack(gradients(module, "weight")), weight.grad, torch.float32, 10)
    assert_near(torch.stack(gradients(module, "bias")), bias.grad, torch.float32, 10)
    assert_same_bits([module(x, offs=partition.ends)], [y])


def test_single_and_discrete_are_equal_and_repeats_too():
    found = []
    for single, _ in product(BOTH, range(3)):
        module, x = (
            layer(G, K, N, bias=False, single_grouped_weight=single, dtype=torch.bfloat16),
            rows(torch.bfloat16).requires_grad_(),
        )
        with torch.no_grad():
            for g, w in enumerate(module.each("weight")):
                w.copy_(uniform(N, K, seed=g))
        y = module(x, COUNTS)
        y.backward(torch.ones_like(y))
        found.append([y, x.grad, *gradients(module, "weight")])
    for other in found[1:]:
        assert_same_bits(other, found[0])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8])
def test_counts_of_any_integer_dtype_and_shape(dtype):
    module, x = layer(G, K, N), rows()
    want = module(x, offs=COUNTS.cumsum(0, dtype=torch.int32))
    assert_same_bits(
        [module(x, COUNTS.to(dtype)), module(x, COUNTS.to(dtype).view(2, 2))], [want, want]
    )


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
    every, module = layer(G, K, N), layer(G, K, N)
    of_x, even, odd, of_bias = wanted
    for key, p in module.named_parameters():
        g = int(key[-1])
        p.requires_grad_(
            (odd if g % 2 else even) if key.startswith("weight") else of_bias and g == 2
        )
    x, full, dy = rows().requires_grad_(of_x), rows().requires_grad_(), uniform(ROWS, N, seed=8)
    y, want = module(x, COUNTS), every(full, COUNTS)
    assert y.requires_grad == any(wanted)
    want.backward(dy)
    if any(wanted):
        y.backward(dy)
    for p, other in [(x, full), *zip(module.parameters(), every.parameters(), strict=True)]:
        assert (p.grad is not None) == p.requires_grad
        if p.grad is not None:
            assert_same_bits([p.grad], [other.grad])


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


def neighbours(module: GroupedLinear) -> bool:
    first = module.weight0.data_ptr()
    return all(
        p.data_ptr() == first + g * p.nbytes
        for g, p in enumerate(getattr(module, f"weight{g}") for g in range(G))
    )


def test_experts_stay_neighbours():
    module = layer(G, K, N)
    pickled = io.BytesIO()
    torch.save(module, pickled)
    pickled.seek(0)
    for other in (
        module,
        copy.deepcopy(module),
        module.bfloat16(),
        module.float(),
        torch.load(pickled, weights_only=False),
    ):
        assert neighbours(other)
    ids = [id(p) for p in module.parameters()]
    assert ids == [id(p) for p in module.half().parameters()]


def test_what_pickle_gives_back_is_one_buffer():
    """Also for an optimizer that came with the module."""
    module = layer(G, 64, 256)
    module.weight1.tag = "kept"
    other, optimizer = pickle.loads(
        pickle.dumps((module, torch.optim.SGD(module.parameters(), 0.1)))
    )
    assert all(are_neighbours(other.each(name)) for name in ("weight", "bias"))
    assert other.weight0.untyped_storage().nbytes() == G * other.weight0.nbytes
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [
        id(p) for p in other.parameters()
    ]
    assert other.weight1.tag == "kept"
    assert_same_bits(list(other.parameters()), list(module.parameters()))


def separate(module: GroupedLinear) -> dict[str, Tensor]:
    """A state dict whose tensors are neighbours of nothing, as in files."""
    return {key: t.clone() for key, t in module.state_dict().items()}


def set_each(module: GroupedLinear, state: dict[str, Tensor]) -> None:
    for key, t in state.items():
        setattr(module, key, nn.Parameter(t))


def assign_each(module: GroupedLinear, state: dict[str, Tensor]) -> None:
    for key, t in state.items():
        module.load_state_dict({key: t}, strict=False, assign=True)


FROM_META = {
    "to_empty": lambda m, state: m.to_empty(device="cpu").load_state_dict(state),
    "assign": lambda m, state: m.load_state_dict(state, assign=True),
    "assign each": assign_each,
    "set each": set_each,
}


@pytest.mark.parametrize("how", FROM_META)
def test_experts_of_a_module_made_on_meta_become_neighbours(how):
    ours, module = layer(G, K, N), GroupedLinear(G, K, N, device="meta")
    FROM_META[how](module, separate(ours))
    assert neighbours(module)
    assert_same_bits([module(rows(), COUNTS)], [ours(rows(), COUNTS)])
    assert neighbours(nn.utils.skip_init(GroupedLinear, G, K, N))


def test_an_assigned_state_dict_becomes_neighbours():
    ours, module = layer(G, K, N), layer(G, K, N, seed=9)
    module.load_state_dict(separate(ours), assign=True)
    assert neighbours(module)
    assert_same_bits(list(module.parameters()), list(ours.parameters()))


class Subclass(Tensor):
    """Stands for DTensor."""


@pytest.mark.parametrize(
    "how", ["part of a storage", "shared memory", "one for two groups", "a subclass", "fake"]
)
def test_parameters_that_stay_where_they_are(how):
    module, state = (
        GroupedLinear(G, K, N, bias=False, device="meta"),
        separate(layer(G, K, N, bias=False)),
    )
    if how == "part of a storage":
        state = {key: torch.stack([t, t])[1] for key, t in state.items()}
    elif how == "shared memory":
        state = {key: t.share_memory_() for key, t in state.items()}
    elif how == "one for two groups":
        state["weight1"] = state["weight0"] = nn.Parameter(state["weight0"])
    elif how == "a subclass":
        state = {key: t.as_subclass(Subclass) for key, t in state.items()}
    else:
        with FakeTensorMode() as mode:
            state = {key: mode.from_tensor(t) for key, t in state.items()}
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
    values, buffer = [w.detach() for w in ours.each("weight")], torch.zeros(G + 1, N + 1, K)
    for g, value in enumerate(values):
        t = {
            "apart": value.clone(),
            "a gap": buffer[g, :N],
            "strides": buffer[g, :N].clone().T.contiguous().T,
        }.get(how, buffer.view(-1)[N * K * g + 7 :][: N * K].view(N, K))
        module.register_parameter(f"weight{g}", nn.Parameter(t.copy_(value)))
    x, other = rows().requires_grad_(), rows().requires_grad_()
    y, want = module(x, COUNTS), ours(other, COUNTS)
    y.sum().backward()
    want.sum().backward()
    assert_same_bits(
        [y, x.grad, *gradients(module, "weight")], [want, other.grad, *gradients(ours, "weight")]
    )
    assert how == "an offset" or how == "meta" or not neighbours(module)


def test_a_step_of_an_optimizer_is_seen():
    module, x = layer(G, K, N), rows()
    optimizer, before = torch.optim.SGD(module.parameters(), 0.1), module(x, COUNTS)
    before.square().sum().backward()
    optimizer.step()
    after = module(x, COUNTS)
    assert after.square().sum() < before.square().sum()
    assert_near(
        after,
        linear(x.double(), stacked(module, "weight"), stacked(module, "bias"), SIZES),
        torch.float32,
    )


@pytest.mark.parametrize(("ours", "theirs"), list(product(BOTH, BOTH)))
def test_state_dicts_of_either_form(tmp_path, ours, theirs):
    forms = [
        {"single_grouped_weight": single, "single_grouped_bias": single}
        for single in (ours, theirs)
    ]
    module, other = layer(G, K, N, **forms[0]), layer(G, K, N, seed=50, **forms[1])
    torch.save({"model": nn.Sequential(module).state_dict()}, tmp_path / "state.pt")
    nn.Sequential(other).load_state_dict(torch.load(tmp_path / "state.pt")["model"])
    assert_same_bits([other(rows(), COUNTS)], [module(rows(), COUNTS)])
    assert theirs or neighbours(other)


@pytest.mark.parametrize(("single", "autocast"), list(product(BOTH, BOTH)))
def test_biases_that_the_caller_adds(single, autocast):
    """Neither added nor lost: what the caller does with them reaches their gradients."""
    form: dict[str, bool] = {"single_grouped_bias": single}
    module, whole = layer(G, K, N, return_bias=True, **form), layer(G, K, N, **form)
    bare = GroupedLinear(G, K, N, bias=False)
    bare.load_state_dict(
        {key: t for key, t in whole.state_dict().items() if key.startswith("weight")}
    )
    inside = sum(SIZES)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, biases = module(rows(), COUNTS)
        assert_same_bits([y], [bare(rows(), COUNTS)])
    assert [(b.shape, b.dtype) for b in biases] == [((N,), y.dtype)] * G
    added = y[:inside] + torch.stack(biases).repeat_interleave(COUNTS, 0)
    if not autocast:
        torch.testing.assert_close(added, whole(rows(), COUNTS)[:inside])
    dy = uniform(inside, N, seed=8)
    added.backward(dy.to(added.dtype))
    want = torch.stack([part.sum(0) for part in dy.split(SIZES)])
    assert_near(torch.stack(gradients(module, "bias")), want, added.dtype, scale=4.0)


def test_what_return_bias_goes_with():
    x, module = rows(), layer(G, K, N, bias=False, return_bias=True)
    y, biases = module(x, COUNTS, out=torch.zeros(ROWS, N))
    assert biases == []
    assert y.equal(layer(G, K, N, bias=False)(x, COUNTS))
    assert "return_bias=True" in repr(module)
    with pytest.raises(OptionError, match="scale_bias and return_bias"):
        GroupedLinear(G, K, N, scale_bias=True, return_bias=True)
    with pytest.raises(OptionError, match="a GroupedLinear with return_bias.*call it outside"):
        Sequential(module)(x, COUNTS)


# Memory of the caller -----------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "trained"), list(product((torch.float32, torch.bfloat16), BOTH)))
def test_buffers_of_the_caller(dtype, trained):
    """They hold the result and the gradient of x; rows past the last group keep what was there;
    another step may use them again.
    """
    module = layer(G, K, N, dtype=dtype).requires_grad_(trained)
    out, grad_input = torch.empty(ROWS, N, dtype=dtype), torch.empty(ROWS, K, dtype=dtype)
    for _ in range(2):
        out.fill_(7.0)
        grad_input.fill_(7.0)
        x, other, dy = (
            rows(dtype).requires_grad_().clone(),
            rows(dtype).requires_grad_(),
            uniform(ROWS, N, dtype=dtype, seed=8),
        )
        y = module(x, COUNTS, out=out, grad_input=grad_input)
        want = module(other, COUNTS)
        assert y.data_ptr() == out.data_ptr()
        assert not out.requires_grad
        (found,) = torch.autograd.grad(y, x, dy)
        want.backward(dy)
        inside = sum(SIZES)
        assert found.data_ptr() == grad_input.data_ptr()
        assert_same_bits([out[:inside], grad_input[:inside]], [want[:inside], other.grad[:inside]])
        assert (out[inside:] == 7.0).all()
        assert (grad_input[inside:] == 7.0).all()
    with torch.no_grad():
        out.zero_()
        assert module(x, COUNTS, out=out).data_ptr() == out.data_ptr()
        assert_same_bits([out[:inside]], [want[:inside]])


def test_a_leaf_keeps_its_gradient():
    """Of all backwards, though each writes the same buffer."""
    module, x, other, buffer = (
        layer(G, K, N),
        rows().requires_grad_(),
        rows().requires_grad_(),
        torch.empty(ROWS, K),
    )
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
        "a half of a column": lambda: GroupedLinear(G, 1.5, N),
        "integers": lambda: GroupedLinear(G, K, N, dtype=torch.int8),
    }
    said = []
    for what, do in cases.items():
        with pytest.raises(
            (ShapeError, DtypeError, DeviceError, GroupsError, OptionError, UnsupportedError)
        ) as caught:
            do()
        said.append(f"{what}\n    {caught.value}")
    assert (out == 7.0).all()
    golden("\n".join(said))


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


@pytest.mark.parametrize("given", [list(SIZES), SIZES], ids=["list", "tuple"])
def test_split_sizes_as_numbers(given):
    module, x = layer(G, K, N), uniform(ROWS, K)
    assert module(x, given).equal(module(x, COUNTS))
    for wrong, error, why in (
        ([1, 2], ShapeError, r"split_sizes \[2\]"),
        ([-1, 1, 1, 1], GroupsError, "= -1"),
        ([1.0] * 4, DtypeError, "list"),
    ):
        with pytest.raises(error, match=why):
            module(x, wrong)


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


def test_extra_state_of_transformer_engine():
    """It has scales for FP8."""
    module, other = layer(G, K, N, seed=5), layer(G, K, N)
    other.load_state_dict(
        {**module.state_dict(), "_extra_state": torch.empty(0, dtype=torch.uint8)}
    )
    assert other.weight0.equal(module.weight0)
