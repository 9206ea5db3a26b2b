"""Calls with known specialization keys, which C++ runs: what Python runs, bit for bit; and what
stays Python's.
"""

from __future__ import annotations

import contextvars
import itertools
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fusion_moe
from fusion_moe import options
from fusion_moe.bodies import eager
from fusion_moe.errors import BuildError, DtypeError, GroupsError, ShapeError, UnsupportedError
from fusion_moe.nn import NVFP4Experts, swiglu
from fusion_moe.runtime import native

pytestmark = pytest.mark.compiler
OPS = torch.ops.fusion_moe


@pytest.fixture(scope="module", autouse=True)
def loaded():
    if not options.current().native_calls:
        pytest.skip("FUSION_MOE_NATIVE_CALLS=0")
    native.load()


class Runs:
    """The calls that Python ran."""

    def __init__(self, monkeypatch):
        self.count, run = 0, eager._Found.run

        def counted(found, tensors):
            self.count += 1
            return run(found, tensors)

        monkeypatch.setattr(eager._Found, "run", counted)

    def of(self, call):
        """What a call returns, and how many Python ran for it."""
        before = self.count
        return call(), self.count - before


@pytest.fixture
def runs(monkeypatch):
    return Runs(monkeypatch)


def layer(seed: int = 0, experts: int = 4) -> NVFP4Experts:
    g = torch.Generator().manual_seed(seed)
    return NVFP4Experts.from_float(
        torch.randn(experts, 64, 32, generator=g), torch.randn(experts, 32, 32, generator=g)
    )


def token(tokens: int = 3, seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x, ids = (
        torch.randn(tokens, 32, generator=g).bfloat16(),
        torch.randint(0, 4, (tokens, 2), generator=g),
    )
    return [x, ids, torch.rand(tokens, 2, generator=g)]


def test_memory_that_was_freed(runs):
    """C++ leaves the error to Python."""
    experts, given = layer(), token()
    with torch.no_grad():
        for _ in range(2):
            experts(*given)
        assert runs.of(lambda: experts(*given))[1] == 0
        held = experts.down_proj.untyped_storage()
        kept = held.clone()
        held.resize_(held.nbytes() - 1)
        with pytest.raises(
            ShapeError,
            match=f"needs {kept.nbytes()} bytes of a storage that has {kept.nbytes() - 1}",
        ):
            experts(*given)
        held.resize_(kept.nbytes())
        held.copy_(kept)
        assert experts(*given).equal(by_python(lambda: layer()(*given)))


def by_python(call):
    with options.override():
        return call()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_second_call_with_a_key(runs, mode):
    with mode():
        for experts in map(layer, range(3)):
            experts(*token(5))
            for given in (token(5, seed) for seed in range(3)):
                call = partial(experts, *given)
                want = by_python(call)
                found, ran = runs.of(call)
                assert found.equal(want)
                assert found.is_inference() == want.is_inference()
                assert ran == 0


def test_what_makes_another_key(runs):
    experts, (x, ids, w) = layer(experts=5), token(6)  # with a key that no other test has
    gate_up, down = list(experts.weight_of("gate_up")), list(experts.weight_of("down"))
    runs_of = {
        "more tokens": lambda: experts(*token(7)),
        "leading dimensions": lambda: experts(x.view(2, 3, 32), ids, w),
        "another dtype": lambda: experts(x.float(), ids, w),
        "another integer": lambda: experts(x, ids.int(), w),
        "an argument": lambda: OPS.fused_experts(
            x, ids, w, gate_up, down, activation=swiglu(limit=0.5), weight_format="nvfp4"
        ),
        "another value": lambda: OPS.fused_experts(
            x, ids, w, gate_up, down, activation=swiglu(limit=0.25), weight_format="nvfp4"
        ),
        "a word": lambda: OPS.fused_experts(
            x, ids, w, gate_up, down, scale_on="input", weight_format="nvfp4"
        ),
        "a bias": lambda: OPS.fused_experts(
            x, ids, w, gate_up, down, torch.ones(5, 64).bfloat16(), weight_format="nvfp4"
        ),
        "fp4": lambda: OPS.fused_experts(
            x,
            ids,
            w,
            [gate_up[0].detach().view(torch.float4_e2m1fn_x2), *gate_up[1:]],
            down,
            weight_format="nvfp4",
        ),
    }
    experts(x, ids, w)
    for name, call in runs_of.items():
        want = by_python(call)
        (first, ran), (second, again) = runs.of(call), runs.of(call)
        assert first.equal(want), name
        assert second.equal(want), name
        assert (ran, again) == (1, 0), name


def test_tensors_that_have_to_be_copied_stay_pythons(runs):
    experts, (x, ids, w) = layer(), token(6)
    want = experts(x, ids, w)
    wide = torch.stack([x, x], 1)[:, 0]
    for _ in range(2):
        found, ran = runs.of(lambda: experts(wide, ids, w))
        assert found.equal(want)
        assert ran == 1


def test_several_results_and_lists(runs):
    ids = torch.tensor([[0, 2], [1, 0], [2, 1]])
    want = by_python(lambda: OPS.route(ids, 3))
    OPS.route(ids, 3)
    found, ran = runs.of(lambda: OPS.route(ids, 3))
    assert all(a.equal(b) for a, b in zip(found, want, strict=True))
    assert ran == 0
    fd = fusion_moe.FusionDefinition()
    x = fd.define_tensor(shape=[-1, 4], dtype="f32")
    fd.add_output(fd.ops.mul(x, 3.0))
    fd.add_output(fd.ops.mul(x, 5.0))
    text, x = str(fd.fusion()), torch.randn(3, 4)
    OPS.run(text, [x], [3])
    found, ran = runs.of(lambda: OPS.run(text, [x], [3]))
    assert [t.tolist() for t in found] == [(3 * x).tolist(), (5 * x).tolist()]
    assert ran == 0
    with pytest.raises(ShapeError):
        OPS.run(text, [x], [4])


def test_errors():
    experts, (x, ids, w) = layer(), token()
    want = experts(x, ids, w)
    with pytest.raises(GroupsError) as by_cxx:
        experts(x, ids + 4, w)
    with pytest.raises(GroupsError) as expected, options.override():
        experts(x, ids + 4, w)
    assert str(by_cxx.value) == str(expected.value)
    with pytest.raises(DtypeError):
        experts(x.double(), ids, w)
    assert experts(x, ids, w).equal(want)


def test_options_in_force(runs):
    """Python's, wherever they are not those of the process, in a context that outlives its block
    too.
    """
    experts, given = layer(), token()
    want = experts(*given)
    assert runs.of(lambda: experts(*given))[1] == 0
    with options.override(target="reference"):
        context = contextvars.copy_context()
        assert runs.of(lambda: experts(*given))[1] == 1
    assert runs.of(lambda: context.run(lambda: experts(*given)))[1] == 1
    found, ran = runs.of(lambda: experts(*given))
    assert found.equal(want)
    assert ran == 0


def test_calls_that_are_noted(runs):
    experts, given = layer(), token()
    want = experts(*given)
    with fusion_moe.preparing() as noted:
        assert not experts(*given).any()
        assert len(noted) == 1
    assert experts(*given).equal(want)


def test_profilers_see_segments():
    experts, given = layer(), token()
    with torch.no_grad():
        want = experts(*given)
        with torch.profiler.profile() as profile:
            found = experts(*given)
    assert found.equal(want)
    names = [event.name for event in profile.events()]
    assert "fusion_moe::fused_experts" in names
    assert any(name.startswith("fusion_moe::0[") for name in names)


def test_gradients(runs):
    experts, (x, ids, w) = layer(), token()

    def gradients():
        given = x.float().requires_grad_(), w.clone().requires_grad_()
        experts(given[0], ids, given[1]).square().sum().backward()
        return [t.grad for t in given]

    want = by_python(gradients)
    gradients()
    found, ran = runs.of(gradients)
    assert all(a.equal(b) for a, b in zip(found, want, strict=True))
    assert ran == 0  # forward and backward are calls of fusion_moe::run
    assert experts(x.float().requires_grad_(), ids, w).requires_grad


def test_tangents_are_refused_with_known_keys_too():
    experts, (x, ids, w) = layer(), token()
    for mode in torch.no_grad, torch.enable_grad:
        with mode(), torch.autograd.forward_ad.dual_level():
            experts(x, ids, w), experts(x, ids, w)
            with pytest.raises(UnsupportedError, match="an argument with a tangent"):
                experts(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)), ids, w)


def test_tracers():
    experts, given = layer(), token()
    experts(*given)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = OPS.fused_experts(
            *(mode.from_tensor(t) for t in given),
            *(list(experts.weight_of(name)) for name in ("gate_up", "down")),
            weight_format="nvfp4",
        )
    assert fake.shape == (3, 32)
    assert type(fake).__name__ == "FakeTensor"
    batch = torch.vmap(lambda x: experts(x, *given[1:]))(given[0][None])
    assert batch[0].equal(experts(*given))


def test_more_keys_than_are_known():
    def call(rows: int) -> torch.Tensor:
        x = torch.arange(4.0 * rows).view(rows, 4)
        return OPS.scaled_swiglu(x)

    want = call(1)
    for rows in range(2, 1050):
        call(rows)
    assert 0 < native.known() <= 1024
    assert call(1).equal(want)


def test_threads():
    """Forms are new in some threads while they are known in others."""
    experts, wrong = layer(), list[int]()
    want = {
        tokens: by_python(lambda tokens=tokens: experts(*token(tokens, tokens)))
        for tokens in range(11, 19)
    }

    def work(first: int) -> None:
        for i in range(100):
            tokens = 11 + (first + i) % 8
            with torch.no_grad():
                if not experts(*token(tokens, tokens)).equal(want[tokens]):
                    wrong.append(tokens)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_workspaces_grow_and_are_kept():
    """By a thread: large calls fault no pages in for them any more."""
    resource = pytest.importorskip("resource")
    experts, faults = layer(), []
    want = {
        tokens: by_python(lambda tokens=tokens: experts(*token(tokens)))
        for tokens in (5, 20_000, 9_000)
    }
    for tokens in 5, 20_000, 5, 9_000, 20_000, 20_000:
        args, before = token(tokens), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        with torch.no_grad():
            assert experts(*args).equal(want[tokens])
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    results = 20_000 * args[0].shape[1] * args[0].element_size() // 4096
    assert faults[-1] <= results + 500


# When it is loaded --------------------------------------------------------------------------------

CALLS = "for _ in range(300):\n    experts(*given)\nprint(native.known())\n"


@pytest.mark.once
@pytest.mark.parametrize("threads", [False, True])
def test_a_process_loads_it_at_the_second_call_or_as_it_prepares(threads):
    """At a call only where no other thread may be in one."""
    waits = "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    code = (
        "import precompiled, threading, torch, fusion_moe\nprecompiled.use()\n"
        "from fusion_moe.runtime import native\n"
        f"from runtime.test_native import layer, token\n{waits if threads else ''}"
        f"experts, given = layer(), token()\n{CALLS}fusion_moe.prepare_(experts)\n{CALLS}"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": ":".join([str(Path(__file__).parents[1]), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert done.stdout.split() == (["0", "1"] if threads else ["1", "1"])


@pytest.fixture
def loads(monkeypatch):
    """What this process would load, as one that has not called anything."""
    loads = list[str]()
    monkeypatch.setattr(native, "_library", None)
    monkeypatch.setattr(native, "_attempts", itertools.count())
    monkeypatch.setattr(native, "_callers", set())
    monkeypatch.setattr(native, "_calls", itertools.count())
    monkeypatch.setattr(native, "_is_lazy", False)
    monkeypatch.setattr(native, "load", lambda: loads.append("loaded"))
    return loads


def test_calls_that_are_recorded_are_to_come(loads):
    with fusion_moe.preparing():
        layer()(*token())
    assert loads == ["loaded"]


def test_a_call_of_a_compiled_graph_comes_again(loads):
    fd = fusion_moe.FusionDefinition()
    fd.add_output(fd.ops.mul(fd.define_tensor(shape=[2], dtype="f32"), 7.0))
    program, x = str(fd.fusion()), torch.ones(2)
    eager._run(program, [x], [])
    assert loads == []
    eager._run(program, [x], [], options.current().key())
    assert loads == ["loaded"]


@pytest.mark.parametrize("built", [False, True])
def test_a_call_that_python_runs_again(loads, monkeypatch, built):
    """Loads what is built, and compiles nothing."""
    monkeypatch.setattr(native, "_is_lazy", True)
    monkeypatch.setattr(native, "is_built", lambda: built)
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    loaded = [native.wanted() or len(loads) for _ in range(4)]  # at the end of each
    assert loaded == ([0, 1, 1, 1] if built else [0, 0, 0, 0])


def test_not_where_another_thread_may_call_what_gets_other_kernels(loads, caplog):
    thread = threading.Thread(target=native.wanted)
    thread.start(), thread.join()
    with caplog.at_level("INFO", "fusion_moe"):
        native.use(), native.use()
    assert loads == []
    assert "other threads call fusion_moe already" in caplog.text


def test_the_option(loads):
    with options.override(native_calls=False):
        native.use()
    assert loads == []
    native.use(), native.use()
    assert loads == ["loaded"]


def test_where_it_does_not_compile_python_runs_calls(loads, monkeypatch, caplog):
    def fails():
        raise BuildError("native does not compile")

    monkeypatch.setattr(native, "load", fails)
    with caplog.at_level("INFO", "fusion_moe"):
        native.use(), native.use()
    assert caplog.messages == ["calls go through Python: native does not compile"]
    assert not native.wanted()
    assert native.known() == 0
