"""torch.compile with our backend: one graph, gradients, dynamic sizes, modes and options, the pass
in plain torch.compile.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator

import pytest
import torch
from cover import few
from moe_models import Block, Experts, H, I, Mlp, O, calls, routing, tokens, weight, writes_between
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config, metrics
from torch._inductor.custom_graph_pass import CustomGraphPass
from users_operations import library

from fusion_moe import compile as pipeline, errors, options, translator
from fusion_moe.frontends import inductor
from fusion_moe.frontends.inductor import compile_graph
from fusion_moe.frontends.inductor.compile_graph import compile_calls, compile_with
from fusion_moe.frontends.inductor.fusion_pass import FusionPass
from fusion_moe.frontends.regions import Found

# float32: Inductor's order of sums in the norm and the router
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(autouse=True)
def alone(tmp_path_factory, monkeypatch) -> Iterator[None]:
    """Graphs of a test are its own, C++ that was compiled is shared; what a test sets in Inductor's
    config goes.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))
    torch._dynamo.reset()
    counters.clear()
    metrics.reset()
    with config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        yield
    config.post_grad_custom_pre_pass = None
    torch._dynamo.reset()


def compiled(f, results: list[Found] | None = None, code: bool = False, **how):
    """f under torch.compile with the pass; what it finds is appended to `results`. code: Inductor
    writes C++ for the rest, which takes long; otherwise that runs call by call.
    """

    def backend(gm, inputs):
        found = None if results is None else results.append
        fusion_pass = FusionPass(options.current(), found)
        if code:
            return compile_with(fusion_pass, gm, inputs, None, {})
        return compile_calls(fusion_pass, gm, inputs)

    return torch.compile(f, backend=backend, fullgraph=True, **how)


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


# -------------------------------------------------------------------------- inference and gradients


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_inference_is_one_graph_with_one_fusion(context):
    model, x, results = Block(), tokens(5), []
    with context():
        got = compiled(model, results, code=True)(x)
        torch.testing.assert_close(got, model(x), **TOLERANCE)
    assert graphs() == 1
    assert (metrics.generated_kernel_count > 0) == compile_graph.has_compiler()
    (found,) = results
    assert [calls(r.nodes) for r in found.regions] == [
        ["fusion_moe.expert_mlp.default", "aten.add.Tensor"]
    ]


def products(found: Found) -> list[str]:
    return [op.kind.name for r in found.regions for op in r.fusion.ops if op.kind.role == "grouped"]


@pytest.mark.parametrize("small", [False, True], ids=["one operation", "small operations"])
def test_gradients_of_tokens_and_router_go_through_fusions(small):
    model, results = Block(small), []
    ours, theirs = (tokens(5).requires_grad_() for _ in range(2))
    run = compiled(model, results, code=small)
    want = model(theirs)
    want.square().sum().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    got = run(ours)
    got.square().sum().backward()
    assert graphs() == 1
    torch.testing.assert_close(got, want, **TOLERANCE)
    torch.testing.assert_close(ours.grad, theirs.grad, **TOLERANCE)
    torch.testing.assert_close([p.grad for p in model.parameters()], wanted, **TOLERANCE)
    forward, backward = results
    assert len(forward.regions) == 1
    programs = [
        r for r in backward.regions for n in r.nodes if str(n.target) == "fusion_moe.run.default"
    ]
    assert programs  # the calls that autograd made are inside of regions, by their operations
    # none of the forward's twice
    assert [products(found) for found in results] == [["grouped_mm"] * 2, ["grouped_mm_t"] * 2]


def test_the_backward_fuses_with_what_stands_around_it():
    """the calls that autograd made are taken apart: the derivative of silu(gate) * up is fused with
    the products around it
    """
    results: list[Found] = []
    compiled(Experts(small=True), results)(tokens(5).requires_grad_()).sum().backward()
    _, backward = results
    (names,) = [
        calls(r.nodes) for r in backward.regions if "fusion_moe.run.default" in calls(r.nodes)
    ]
    assert names.count("fusion_moe.run.default") >= 2
    assert "aten.mul.Tensor" in names


# -------------------------------------------------------------------------------- memory of tensors


def test_inputs_that_are_written_are_read_before_and_after():
    f = writes_between()
    ours, theirs, results = tokens(5), tokens(5), []
    torch.testing.assert_close(compiled(f, results)(ours), f(theirs), **TOLERANCE)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert [len(found.regions) for found in results] == [1]


@pytest.mark.parametrize("strides", ["transposed", "expanded"])
def test_outputs_have_the_strides_of_eager_ones_whatever_the_inputs_have(strides):
    up, down = weight(2 * I, H), weight(H, I)
    ids, w = routing(5)

    def f(x):
        y = O.expert_mlp(x, ids, w, *up, *down)
        return x * y, (x * y).t(), y.reshape(5, 2, H // 2).transpose(1, 2)

    x = {
        "transposed": tokens(5).t().contiguous().t(),
        "expanded": tokens(1).expand(5, H),
    }[strides]
    got, want = compiled(f, code=True)(x), f(x)
    torch.testing.assert_close(got, want, **TOLERANCE)
    assert [t.stride() for t in got] == [t.stride() for t in want]


# -------------------------------------------------------------------------------------------- sizes


def test_all_token_counts_share_one_graph_when_dynamic():
    """but 1 and 0, which torch makes constants: each is a graph of its own"""
    model = Block()
    run = compiled(model, dynamic=True)
    with torch.no_grad():
        for t in (7, 2, 9, 33):
            torch.testing.assert_close(run(tokens(t)), model(tokens(t)), **TOLERANCE)
        assert graphs() == 1
        for t in (1, 0):
            torch.testing.assert_close(run(tokens(t)), model(tokens(t)), **TOLERANCE)
    assert graphs() == 3


def test_marked_dimensions_share_one_graph_and_others_recompile_once():
    model = Block()
    for mark, count in (True, 1), (False, 2):
        counters.clear()
        torch._dynamo.reset()
        run = compiled(model)
        with torch.no_grad():
            for t in (7, 9, 33, 2):
                x = tokens(t)
                if mark:
                    torch._dynamo.mark_dynamic(x, 0)
                torch.testing.assert_close(run(x), model(x), **TOLERANCE)
        assert graphs() == count


def test_gradients_of_dynamic_token_counts():
    model = Block(small=True)
    run = compiled(model, dynamic=True)
    for t in (7, 12):
        x, y = (tokens(t).requires_grad_() for _ in range(2))
        run(x).square().sum().backward()
        model(y).square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad, **TOLERANCE)
    assert graphs() == 1


def test_experts_alone_may_be_dynamic_in_every_dimension():
    """nothing before them says that the hidden size is a constant: the operation does"""
    up, down = weight(2 * I, H), weight(H, I)
    run = compiled(lambda x, ids, w: O.expert_mlp(x, ids, w, *up, *down), dynamic=True)
    for t in (7, 12):
        ids, w = routing(t)
        torch.testing.assert_close(
            run(tokens(t), ids, w), O.expert_mlp(tokens(t), ids, w, *up, *down), **TOLERANCE
        )
    assert graphs() == 1
    for shape in ((2, 3), (5, 4)):  # as many dimensions in ids and w as in x
        ids, w = (t.unflatten(0, shape) for t in routing(math.prod(shape)))
        torch.testing.assert_close(
            run(tokens(*shape), ids, w),
            O.expert_mlp(tokens(*shape), ids, w, *up, *down),
            **TOLERANCE,
        )
    assert graphs() == 2


# -------------------------------------------------------------------------------- modes and options


@pytest.mark.compiler
@pytest.mark.parametrize(
    "mode", few(["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"], 2)
)
def test_modes_are_those_of_inductor(mode):
    model, seen = Mlp(), {}
    compile_fx = compile_graph.compile_fx

    def noted(gm, inputs, *, config_patches):
        seen.update(config_patches)
        return compile_fx(gm, inputs, config_patches=config_patches)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(compile_graph, "compile_fx", noted)
        got = torch.compile(model, backend=inductor.backend, mode=mode, fullgraph=True)(tokens(5))
        torch.testing.assert_close(got, model(tokens(5)), **TOLERANCE)
    own = seen.pop("post_grad_custom_pre_pass")
    assert isinstance(own, FusionPass)
    assert seen == ({} if mode == "default" else torch._inductor.list_mode_options(mode))


def test_options_given_to_compile_hold_when_the_compiled_code_runs(monkeypatch):
    """also in a backward, and whatever is in force then"""
    compiled_under = []
    compile_fusion = pipeline.compile_fusion

    def noted(fusion, to, with_):
        compiled_under.append(with_)
        return compile_fusion(fusion, to, with_)

    monkeypatch.setattr(pipeline, "compile_fusion", noted)
    pipeline._program.cache_clear()
    run = torch.compile(
        Mlp(), backend=inductor.backend, options={"fusion_moe.contract_rounding": False}
    )
    with options.override(contract_rounding=True):
        run(tokens(5).requires_grad_()).sum().backward()
    assert len(compiled_under) >= 2
    assert {o.contract_rounding for o in compiled_under} == {False}


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"options": {"max_fusion_siz": 8}}, errors.OptionError, "unknown option 'max_fusion_siz'"),
        ({"options": {"max_fusion_siz": 8}}, errors.OptionError, "did you mean 'max_fusion_size'?"),
        (
            {"options": {"fusion_moe.contract": True}},
            errors.OptionError,
            "unknown option 'contract'; expected one of target, ",
        ),
        (
            {"options": {"fusionmoe.target": "cpu"}},
            errors.OptionError,
            "did you mean 'fusion_moe.target'?",
        ),
        (
            {"options": {"fusion_moe.contract_rounding": 3}},
            errors.OptionError,
            "option contract_rounding = 3; expected a bool",
        ),
        (
            {"options": {"max_fusion_size": "eight"}},
            errors.OptionError,
            "max_fusion_size, got str should be int",
        ),
        (
            {"options": {"fusion_moe.target": "tpu"}},
            errors.OptionError,
            "target 'tpu'; expected one of auto, cpu, cuda, reference",
        ),
        (
            {"options": {"fusion_moe.target": "sm_100"}},
            errors.UnsupportedError,
            "sm_100 requires a CUDA device with compute capability 10",
        ),
        ({"mode": "max-autotun"}, errors.OptionError, "should be one of: default, "),
    ],
)
def test_what_is_asked_for_wrongly_raises_our_error_and_no_other(how, error, message):
    with pytest.raises(error) as raised, torch.no_grad():
        torch.compile(Experts(), backend=inductor.backend, **how)(tokens(5))
    assert message in str(raised.value)
    assert type(raised.value).__name__ == error.__name__
    assert raised.value.found


# ------------------------------------------------------------------ the pass in plain torch.compile


class Count(CustomGraphPass):
    """A pass of a user that counts graphs, and fusions in them."""

    def __init__(self, name: object = "count"):
        self.name, self.graphs, self.fusions = name, 0, 0

    def __call__(self, graph):
        self.graphs += 1
        self.fusions += sum(n.target is torch.ops.fusion_moe.run.default for n in graph.nodes)

    def uuid(self):
        return self.name


@contextlib.contextmanager
def enabled(before=None):
    config.post_grad_custom_pre_pass = before
    inductor.enable()
    try:
        yield
    finally:
        inductor.disable()


def plain_compile():
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(Mlp(), fullgraph=True)(tokens(5))


@pytest.mark.compiler
def test_enable_opts_plain_compile_in_and_disable_out():
    after = Count()
    config.post_grad_custom_pre_pass = after
    plain_compile()
    assert (after.graphs, after.fusions) == (1, 0)
    inductor.enable()
    inductor.enable()  # is once
    plain_compile()
    assert (after.graphs, after.fusions) == (2, 1)  # it runs after ours, once
    inductor.disable()
    assert config.post_grad_custom_pre_pass is after
    plain_compile()
    assert (after.graphs, after.fusions) == (3, 1)


@pytest.mark.compiler
def test_passes_that_are_set_follow_ours_whatever_they_are():
    seen = []
    several = [Count(), seen.append]
    with enabled(before=several):
        plain_compile()
    assert several[0].fusions == 1
    assert len(seen) == 1
    assert config.post_grad_custom_pre_pass == several
    with enabled(before=several[1]):
        # Inductor caches nothing then, as without us
        assert FusionPass(options.current(), then=several[1:]).uuid() is None
    inductor.disable()
    inductor.disable()
    assert config.post_grad_custom_pre_pass is several[1]


@pytest.mark.compiler
def test_a_pass_that_wants_to_know_about_inference_is_told():
    kind = getattr(torch._inductor.custom_graph_pass, "CustomInferenceAwareGraphPass", None)
    if kind is None:
        pytest.skip("this torch has none")
    told = []

    class Aware(kind):
        def __call__(self, graph, is_inference):
            told.append(is_inference)

        def uuid(self):
            return "aware"

    with enabled(before=Aware()):
        plain_compile()
    assert told == [True]


def test_the_backend_and_enable_together_are_one_pass():
    after = Count()
    with enabled(before=after), torch.no_grad():
        torch.compile(Mlp(), backend=inductor.backend)(tokens(5))
    assert (after.graphs, after.fusions) == (1, 1)
    given = Count()
    with torch.no_grad():
        torch.compile(
            Mlp(), backend=inductor.backend, options={"post_grad_custom_pre_pass": given}
        )(tokens(5))
    assert (given.graphs, given.fusions) == (1, 1)


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.exhaustive
def test_a_wrapper_in_cpp_calls_programs_with_several_results(caplog):
    """Those with one stay calls, since it cannot."""
    x, square = tokens(5), weight(H, H)
    ends = torch.tensor([1, 1, 3, 5], dtype=torch.int32)

    def two(x):
        first = O.nvfp4_grouped_mm(x, *square, ends)
        return first, O.nvfp4_grouped_mm(first.relu(), *square, ends)

    with config.patch(cpp_wrapper=True), torch.no_grad():
        for f, code, fusions in ((two, True, 1), (Mlp(), False, 0)):
            found: list[Found] = []
            torch.testing.assert_close(compiled(f, found, code)(x), f(x), **TOLERANCE)
            assert [len(r.regions) for r in found] == [fusions]
    assert "leave out cpp_wrapper" in caplog.text
    assert any("cpp_wrapper" in n.why for n in found[0].not_fused)


@pytest.mark.once
@pytest.mark.slow
@pytest.mark.compiler
def test_a_package_of_aotinductor_runs_programs(tmp_path):
    model, x, after = Mlp(), tokens(5), Count()
    with enabled(before=after), torch.no_grad():
        exported = torch.export.export(model, (x,))
        path = torch._inductor.aoti_compile_and_package(
            exported, package_path=str(tmp_path / "model.pt2")
        )
        torch.testing.assert_close(
            torch._inductor.aoti_load_package(path)(x), model(x), **TOLERANCE
        )
    assert after.fusions == 1


def test_import_alone_changes_nothing():
    assert config.post_grad_custom_pre_pass is None


def test_a_translator_at_fault_is_a_warning_and_not_an_error(caplog):
    with library("in_inductor") as define:
        twice = define("twice", "(Tensor x) -> Tensor", lambda x: x * 2)
        translator("in_inductor::twice")(lambda fd, x: fd.ops.cast(x, dtype="f64"))
        model = Experts()
        with torch.no_grad(), caplog.at_level(logging.WARNING, "fusion_moe"):
            for t in (5, 6):
                torch._dynamo.reset()
                got = compiled(lambda x: twice(model(x)))(tokens(t))
                torch.testing.assert_close(got, 2 * model(tokens(t)), **TOLERANCE)
    warned = [
        r.getMessage()
        for r in caplog.records
        if "in_inductor" in r.getMessage() and "returned f64" in r.getMessage()
    ]
    assert len(warned) == 2  # for shapes [5, 32] and [6, 32]
    assert "expected f32[5, 32], as its fake returns" in warned[0]


def test_on_a_terminal_the_first_call_says_what_is_compiled(capsys, monkeypatch):
    """How many programs; equal layers share one, and the second call compiles none."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    # on a busy machine it would say that a graph is compiled, before the programs are known
    monkeypatch.setattr("fusion_moe.messages.progress.QUIET_SECONDS", 600)
    monkeypatch.setattr(compile_graph, "has_compiler", lambda: False)  # quickly
    layers, x = torch.nn.Sequential(Block(), Block(seed=1)).requires_grad_(False), tokens(5)
    model = torch.compile(layers, backend="fusion_moe")
    for _ in range(2):
        model(x)
    assert capsys.readouterr().err.splitlines() == ["compiling 1 program and the graph around..."]
