"""The operations as PyTorch sees them: opcheck, fakes, symbolic token counts, torch.export."""

from __future__ import annotations

import io

import pytest
import torch
from test_ops import OPS, calls, experts, random
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

OTHERS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
FP8 = (  # test_schema cannot copy their tensors on CPU
    "nvfp4_quantize",
    "nvfp4_grouped_mm",
    "grouped_swizzle_block_scale",
    "expert_mlp",
    "f16a_nvfp4weight_scaled_grouped_mm",
)


@pytest.mark.parametrize("name", calls())
def test_opcheck(name):
    args, kwargs = calls()[name]
    torch.library.opcheck(
        getattr(OPS, name).default,
        args,
        kwargs,
        test_utils=OTHERS if name in FP8 else ("test_schema", *OTHERS),
    )


@pytest.mark.parametrize(
    "name",
    [
        "nvfp4_grouped_mm",
        "scaled_swiglu",
        "fused_moe_aux_loss",
        "moe_z_loss",
        "combine",
        "group_add",
        "expert_mlp",
    ],
)
def test_opcheck_with_gradients(name):
    args, kwargs = calls()[name]
    args = [
        a.clone().requires_grad_()
        if isinstance(a, Tensor) and a.dtype in (torch.float32, torch.bfloat16)
        else a
        for a in args
    ]
    frozen = [i for i, a in enumerate(args) if isinstance(a, Tensor) and a.dtype == torch.uint8]
    for i in frozen:  # codes, block scales and decode scales stand one after the other
        args[i + 2] = args[i + 2].detach()
    torch.library.opcheck(getattr(OPS, name).default, tuple(args), kwargs, test_utils=OTHERS)


def test_opcheck_on_no_rows():
    gate_up, down = experts(3)
    ids = torch.zeros(0, 2, dtype=torch.int64)
    torch.library.opcheck(
        OPS.expert_mlp.default,
        (random(0, 32), ids, random(0, 2), *gate_up, *down),
        test_utils=OTHERS[1:],
    )


def symbolic(mode: FakeTensorMode, t: Tensor, *dims: int) -> Tensor:
    """A fake of t whose dimensions `dims` have sizes that nobody knows."""
    env = mode.shape_env
    shape = list(t.shape)
    for d in dims:
        s = env.create_symbol(
            t.shape[d] + 1000,
            ConstantSource(f"s{len(env.var_to_range)}"),
            DimDynamic.DYNAMIC,
            constraint_dim=None,
        )
        shape[d] = env.create_symintnode(s, hint=t.shape[d] + 1000)
    with mode:
        return (
            torch.empty(shape, dtype=t.dtype)
            if dims
            else torch.empty_strided(shape, t.stride(), dtype=t.dtype)
        )


ROWS = {
    "nvfp4_quantize": (0,),
    "nvfp4_grouped_mm": (0,),
    "grouped_swizzle_block_scale": (0,),
    "scaled_swiglu": (0, 1),
    "route": (0,),
    "topk_router": (0,),
    "fused_compute_score_for_moe_aux_loss": (0,),
    "fused_moe_aux_loss": (0,),
    "moe_z_loss": (0,),
    "combine": (0, 1, 2),
    "group_add": (0,),
    "expert_mlp": (0, 1, 2),
    "f16a_nvfp4weight_scaled_grouped_mm": (0,),
}


@pytest.mark.parametrize("name", ROWS)
def test_token_counts_stay_symbols(name):
    """No guard says how many tokens there are; outputs show the symbol."""
    args, kwargs = calls()[name]
    mode = FakeTensorMode(shape_env=ShapeEnv())
    same: dict[int, Tensor] = {}
    fakes = []
    for i, a in enumerate(args):
        if i in ROWS[name]:
            a = symbolic(mode, a, 0)
            # as many as the one before
            if (same and name in ("scaled_swiglu", "expert_mlp")) or (i == 2 and name == "combine"):
                first = fakes[-1]
                with mode:
                    a = torch.empty((first.shape[0], *a.shape[1:]), dtype=a.dtype)
            same[i] = a
        elif isinstance(a, Tensor):
            a = symbolic(mode, a)
        fakes.append(a)
    before = len(mode.shape_env.guards)
    with mode:
        made = getattr(OPS, name)(*fakes, **kwargs)
    guards = [str(g.expr) for g in mode.shape_env.guards[before:]]
    assert not [g for g in guards if "Eq(" in g and "Ne(" not in g], guards
    outputs = made if isinstance(made, tuple) else (made,)
    rows = outputs[name == "route"]
    assert not rows.dim() or isinstance(rows.shape[0], torch.SymInt)
    real = getattr(OPS, name)(*args, **kwargs)
    assert [t.dtype for t in outputs] == [
        t.dtype for t in (real if isinstance(real, tuple) else (real,))
    ]
    assert [t.dim() for t in outputs] == [
        t.dim() for t in (real if isinstance(real, tuple) else (real,))
    ]


def small(x, ids, w, *weights):
    ends, row_of, slot_of = OPS.route(ids, 3)
    y = OPS.scaled_swiglu(OPS.nvfp4_grouped_mm(x.index_select(0, row_of), *weights[:3], ends))
    return OPS.combine(OPS.nvfp4_grouped_mm(y, *weights[3:], ends), slot_of, w)


def whole(x, ids, w, *weights):
    return OPS.expert_mlp(x, ids, w, *weights)


def tokens(count: int):
    g = torch.Generator().manual_seed(count)
    return (
        torch.randn(count, 32, generator=g),
        torch.randint(0, 3, (count, 2), generator=g),
        torch.rand(count, 2, generator=g),
    )


@pytest.mark.parametrize(("function", "train"), [(whole, True), (small, False)])
def test_one_graph_for_all_token_counts(function, train):
    torch._dynamo.reset()
    graphs = []

    def count(gm, inputs):
        graphs.append(gm)
        return gm

    weights = [t for part in experts(3) for t in part]
    compiled = torch.compile(function, backend=count, fullgraph=True, dynamic=True)
    for n in (7, 8, 9, 33):
        x, ids, w = tokens(n)
        x.requires_grad_(train)
        assert compiled(x, ids, w, *weights).equal(function(x, ids, w, *weights))
    assert len(graphs) == 1


def test_export():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for i, t in enumerate((*experts(3)[0], *experts(3)[1])):
                self.register_buffer(f"b{i}", t)

        def forward(self, x, ids, w):
            return small(x, ids, w, *(getattr(self, f"b{i}") for i in range(6)))

    dim, model = torch.export.Dim("tokens", min=2, max=4096), Model()
    program = torch.export.export(model, tokens(7), dynamic_shapes=({0: dim}, {0: dim}, {0: dim}))
    assert "fusion_moe" in str(program.graph)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for n in (2, 40):
        assert loaded(*tokens(n)).equal(model(*tokens(n)))


_B, _S = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("sequence", min=2, max=64)


@pytest.mark.parametrize(
    ("dims", "lead"),
    [({0: _B, 1: _S}, (3, 5)), ({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}, (3, 3))],
    ids=["named", "auto"],
)
def test_export_of_a_batch_of_sequences(dims, lead):
    weights = [t for part in experts(3) for t in part]

    class Model(torch.nn.Module):
        def forward(self, x, ids, w):
            return OPS.expert_mlp(x.flatten(0, 1), ids, w, *weights)

    def inputs(*lead):
        return tuple(t.unflatten(0, lead) for t in tokens(lead[0] * lead[1]))

    program = torch.export.export(
        Model(), inputs(*lead), dynamic_shapes=(dims, dims, dims)
    ).module()
    for other in (lead, (7, 2)):
        assert program(*inputs(*other)).equal(Model()(*inputs(*other)))
