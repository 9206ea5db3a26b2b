"""What a run did: counts that hooks on routers confirm, in whatever way the model is run, and the
forms that they are shown in.
"""

from __future__ import annotations

import json
import re
import threading
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pages
import precompiled
import pytest
import torch
from bad_calls import messages
from test_html import Read
from torch import nn

import fusion_moe
import fusion_moe.offload
from fusion_moe import options
from fusion_moe.errors import OptionError, UnsupportedError
from fusion_moe.messages.units import duration
from fusion_moe.nn import Experts, NVFP4Config
from fusion_moe.recorder import Run, counts
from fusion_moe.runtime import native, nvrtc, recording

MODEL = Path(__file__).parents[2] / "examples" / "tiny_qwen3_moe"
PROMPT, TOKENS = 11, 24
pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("optimized")]


def loaded(**more):
    ours = pytest.importorskip("fusion_moe.transformers")
    quantized = {"quantization_config": NVFP4Config(), "dtype": torch.bfloat16}
    return ours.from_pretrained(MODEL, **quantized, **more).eval()


@pytest.fixture(scope="module")
def model():
    return loaded()


class Routed:
    """What routers choose, by hooks: how many tokens each expert gets, by the layer's name."""

    def __init__(self, model: nn.Module):
        self.rows: dict[str, torch.Tensor] = {}
        self.hooks = [
            module.register_forward_pre_hook(lambda m, args, n=name: self.count(n, args[1]))
            for name, module in model.named_modules()
            if isinstance(module, Experts)
        ]

    def __enter__(self) -> Routed:
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def count(self, name: str, ids: torch.Tensor) -> None:
        found = torch.bincount(ids.flatten(), minlength=16)
        self.rows[name] = self.rows.get(name, 0) + found

    def agrees_with(self, run: Run) -> bool:
        return {layer.name: layer.rows for layer in run.data.layers} == {
            name: rows.tolist() for name, rows in self.rows.items()
        }


def generate(model: nn.Module, tokens: int = TOKENS) -> torch.Tensor:
    ids = torch.tensor([list(b"def main():")])
    return model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)


@pytest.fixture(scope="module")
def run(model):
    """A run of `generate`, which hooks confirm, and which gives the same tokens as without it."""
    want = generate(model)
    with Routed(model) as routed, fusion_moe.record(model) as run:
        assert generate(model).equal(want)
    assert routed.agrees_with(run)
    return run


def test_each_row_of_each_step_is_counted(run, model):
    k = model.config.num_experts_per_tok
    rows = (PROMPT + TOKENS - 1) * k * len(run.data.layers)
    assert run.data.rows == rows
    assert rows == sum(sum(layer["rows"]) for layer in json.loads(run.data.to_json())["layers"])
    assert len(run.data.begun) == TOKENS
    for layer in run.data.layers:
        assert layer.calls == len(layer.over_time) == TOKENS
        assert torch.tensor(layer.over_time).sum(1).tolist() == [PROMPT * k] + [k] * (TOKENS - 1)
        assert torch.tensor(layer.over_time).sum(0).tolist() == layer.rows


def test_kernels_have_times_over_floors(run):
    assert run.data.profiled == "steps 2 to 3"
    found = run.data.kernels
    assert [k.calls for k in found] == [8] * len(found)  # two steps of four layers
    assert {len(k.layers) for k in found} == {4}
    for kernel in found:
        assert 0 < kernel.shortest <= kernel.seconds <= kernel.longest
        assert kernel.seconds > kernel.reading > 0
        assert kernel.bound in ("reading", "multiplying", "launching")
    product = next(k for k in found if k.ops.startswith("route"))
    # codes and scales of the four experts that a token chooses, of 16, and what is small
    weights = 4 * 256 * (256 // 2 + 256 // 16)
    assert weights < product.bytes_read < weights + 1024
    assert 0 <= run.data.idle < run.data.window


@pytest.mark.parametrize("steps", [range(0), range(100, 102)])
def test_a_run_without_profiled_steps_says_so(model, steps):
    with fusion_moe.record(model, profile=steps) as run:
        generate(model, 2)
    asked = "none: asked for steps 100 to 101, from 0 on, of a run of 2 steps"
    assert run.data.profiled == (asked if steps else "none was asked for")
    assert (run.data.kernels, run.data.spans, run.data.window) == ([], [], 0)
    assert "nothing ran" not in str(run)


def test_calls_of_known_forms_are_counted_without_python(monkeypatch, model):
    """C++ counts all but the first, and, until steps were profiled, that of the layer with which
    steps begin.
    """
    native.load()
    generate(model, 3)
    seen = []
    add = counts.Counts.add
    monkeypatch.setattr(
        counts.Counts, "add", lambda self, ends: (seen.append(self), add(self, ends))
    )
    for profile, by_python in (((), 4), (range(2, 4), 4 + 1 + 2 * 4 + 1)):
        seen.clear()
        with fusion_moe.record(model, profile=profile) as run:
            generate(model, 8)
        assert len(seen) == by_python
        assert {layer.calls for layer in run.data.layers} == {8}
        assert {sum(layer.rows) for layer in run.data.layers} == {(PROMPT + 7) * 4}


@pytest.mark.parametrize("by_python", [True, False])
def test_more_calls_than_are_kept_one_by_one(monkeypatch, model, by_python):
    """The last ones are kept, all are summed."""
    native.load()
    monkeypatch.setattr(counts, "CAPACITY", 5)
    tokens = torch.arange(9)

    def call(n: int) -> None:
        with options.override() if by_python else nullcontext(), torch.inference_mode():
            model(tokens[None, : n + 1], use_cache=False)

    for n in range(9):
        call(n)
    with fusion_moe.record(model, profile=()) as run:
        for n in range(9):
            call(n)
    for layer in run.data.layers:
        assert (layer.calls, sum(layer.rows)) == (9, 4 * 45)
        assert [sum(rows) for rows in layer.over_time] == [4 * n for n in range(5, 10)]


def test_training_counts_the_forward_once(model, monkeypatch):
    """With PEFT, and where the backward computes it again."""
    monkeypatch.setenv(precompiled.LEVEL, "-O0")  # many kernels, each called a few times
    peft = pytest.importorskip("peft")
    names = ["experts.gate_up_proj", "experts.down_proj"]
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=names)
    trained = peft.get_peft_model(loaded(), config).train()
    routed = Routed(trained)
    batch = torch.arange(64).view(2, 32)
    weights = [p for p in trained.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-3)

    def step() -> None:
        trained(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with fusion_moe.record(trained, profile=range(1, 2)) as run:
        for _ in range(3):
            step()
    assert routed.agrees_with(run)
    assert run.data.rows == 3 * 64 * 4 * 4
    assert len(run.data.begun) == 3
    assert any("grouped_mm_t" in k.ops for k in run.data.kernels)  # of the backward

    trained.gradient_checkpointing_enable()
    trained.enable_input_require_grads()
    routed.rows.clear()
    with fusion_moe.record(trained, profile=()) as run:
        step()
    assert sum(rows.sum() for rows in routed.rows.values()) == 2 * run.data.rows
    assert run.data.rows == 64 * 4 * 4


def test_offloaded_experts_are_counted_with_their_hits():
    model = loaded()
    fusion_moe.offload.offload_(model, {"pretended": "4700KB"}, kv_tokens=64, every=4)
    routed = Routed(model)
    generate(model, 4)
    routed.rows.clear()
    before = {n: replace(c) for n, c in fusion_moe.offload.counters(model).items()}
    with fusion_moe.record(model) as run:
        generate(model)
    assert routed.agrees_with(run)
    after = fusion_moe.offload.counters(model)
    for layer in run.data.layers:
        did = after[layer.name] - before[layer.name]
        assert layer.hit_rate == did.hit_rate
        assert (layer.calls, layer.offloaded["loaded"]) == (did.steps, did.loaded)
    assert 0 < run.data.hit_rate < 1
    assert len(run.data.begun) == TOKENS
    assert "of slots hit" in str(run)


@pytest.mark.slow
@pytest.mark.usefixtures("call_by_call")
def test_a_compiled_model_is_counted_and_its_kernels_have_lines():
    model, ids = loaded(num_hidden_layers=2), torch.arange(8)[None]
    compiled = torch.compile(model, backend="fusion_moe")
    with fusion_moe.record(compiled) as run, torch.inference_mode():
        for _ in range(5):
            compiled(ids, use_cache=False)
    assert run.data.rows == 5 * 8 * 4 * 2
    assert [layer.name for layer in run.data.layers] == [
        f"model.layers.{i}.mlp.experts" for i in range(2)
    ]
    assert all(any("self.experts(" in line for line in k.sources) for k in run.data.kernels)
    assert any(s.name.startswith("torch.compile") for s in run.data.stalls)
    assert run.data.of == "Qwen3MoeForCausalLM"


def test_a_server_runs_in_another_thread(model):
    with Routed(model) as routed, fusion_moe.record(model) as run:
        server = threading.Thread(target=generate, args=(model, 6))
        server.start()
        server.join()
    assert routed.agrees_with(run)
    assert run.data.kernels


def test_modes_may_change(model):
    ids = torch.tensor([list(b"def main():")])
    with fusion_moe.record(model) as run:
        for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
            with mode():
                model(ids)
    assert {layer.calls for layer in run.data.layers} == {3}


def test_steps_may_begin_in_several_threads(model):
    """The one that is not to be profiled any more in another thread than the one that is."""
    with fusion_moe.record(model, profile=range(1, 2)) as run:
        for _ in range(3):
            server = threading.Thread(target=generate, args=(model, 1))
            server.start()
            server.join()
    assert run.data.profiled == "step 1"
    assert {k.calls for k in run.data.kernels} == {4}


@pytest.mark.parametrize("inside", [False, True])
def test_another_profiler_keeps_its_events(model, inside):
    from torch.profiler import profile

    other = profile()
    outer, inner = (nullcontext(), other) if inside else (other, nullcontext())
    with outer, fusion_moe.record(model) as run, inner:
        generate(model, 6)
    assert other.events()
    assert run.data.profiled == "none: another profiler ran"
    assert not run.data.kernels


def test_steps_are_marked_where_layers_do_not_say(model):
    with fusion_moe.record(model, profile=range(1, 2)) as run:
        for _ in range(3):
            run.step()
            generate(model, 2)
    assert len(run.data.begun) == 3
    assert {k.calls for k in run.data.kernels} == {4}  # by sizes: a prompt, and a token


def test_refusals_come_before_the_run(model):
    with (
        pytest.raises(UnsupportedError, match="a Linear with no weights of experts"),
        fusion_moe.record(nn.Linear(2, 2)),
    ):
        pass
    with torch.device("meta"):
        elsewhere = Experts.__new__(Experts)
        nn.Module.__init__(elsewhere)
        elsewhere.gate_up_proj = nn.Parameter(torch.empty(2, 3, 4))
    with (
        pytest.raises(UnsupportedError, match="weights that are loaded for each call"),
        fusion_moe.record(elsewhere),
    ):
        pass
    with fusion_moe.record(model) as run:
        with pytest.raises(UnsupportedError, match="a record inside of a record"):
            fusion_moe.record(model).__enter__()
        with pytest.raises(UnsupportedError, match="a run that goes on"):
            run.data  # noqa: B018
    assert recording.active is None


@pytest.mark.parametrize("profile", [3, [1, 3], ["a"], [-1, 0], None])
def test_steps_to_profile_are_in_a_row(model, profile):
    with (
        pytest.raises(OptionError, match=r"profile = .*; expected steps in a row, such as range"),
        fusion_moe.record(model, profile=profile),
    ):
        pass


def test_other_objects_are_refused(run, tmp_path, golden):
    fewer = Run(data=replace(run.data, stepped=2))
    golden(
        messages(
            {
                "a name": lambda: fusion_moe.record("model").__enter__(),
                "a path": lambda: run.compare("b.json"),
                "a list": lambda: Run.merged([run, run]),
                "nothing": Run.merged,
                "fewer steps": lambda: Run.merged(run, fewer),
                "explain's": lambda: fusion_moe.diff(run, run),
                "no folder": lambda: run.save(tmp_path / "no" / "a.html"),
                "no file": lambda: Run.load(tmp_path / "zz.json"),
                "another suffix": lambda: run.save(tmp_path / "run.png"),
                "a run that has ended": run.step,
            }
        )
    )


def test_other_files_are_refused(tmp_path, golden):
    texts = {
        "explain's": '{"schema": "fusion_moe.explain/12"}',
        "Perfetto's": '{"traceEvents": []}',
        "without its tables": '{"schema": "fusion_moe.record/1"}',
        "a list": "[]",
        "no text": "\xff",
    }
    for what, text in texts.items():
        (tmp_path / what).write_bytes(text.encode("latin-1"))
    golden(messages({what: partial(Run.load, tmp_path / what) for what in texts}))


def test_a_block_without_calls_says_so(model):
    with fusion_moe.record(model, profile=range(3, 4)) as run:
        pass
    words = " ".join(str(run).split())
    assert "! no layer of this model was called inside the block" in words
    assert "none: asked for step 3, from 0 on, of a run of 0 steps" in words


def test_a_busy_machine_voids_times(run):
    machine = replace(run.data.machine, repeats=8, preemptions=7, now=1.0, bytes_per_second=1.0)
    quiet = Run(data=replace(run.data, machine=machine))
    busy = Run(data=replace(run.data, machine=replace(machine, preemptions=8)))
    kernel = busy.data.kernels[0]
    spread = f"{duration(kernel.shortest)} to {duration(kernel.longest)}"
    for of, void in ((quiet, False), (busy, True)):
        words, page = " ".join(str(of).split()), _saved(of, ".html")
        said = "times are void: this machine was busy: other programs took the CPU away 8 times"
        assert (said in words, said in page, spread in words, spread in page) == (void,) * 4
        median = f"<strong>{duration(of.data.step)}</strong>"  # the page's largest numbers
        assert (median in page, "the median takes" in words, "nothing ran</span>" in page) == (
            (not void,) * 3
        )
        assert (f" x {kernel.bound}" in words, f" x {kernel.bound}" in page) == (not void,) * 2
        verdicts = {said for *_, said in quiet.compare(of).changes if said}
        assert verdicts == {"times are void" if void else "1x as fast"}
        assert Run.merged(quiet, of).data.void == of.data.void


def test_a_kernel_at_several_sizes_is_told_by_them(run):
    kernel = run.data.kernels[0]
    many = [replace(kernel, sizes={"s0": n}, whole=float(100 - n)) for n in range(1, 15)]
    for kernels, name in ((many, f"{kernel.name}, s0 = 12"), (many[:1], kernel.name)):
        of = Run(data=replace(run.data, kernels=kernels))
        page = _saved(of, ".html")
        assert f"\n  {name}  " in str(of)
        assert f"<b>{name}</b>" in page
        bars = page.count('<div class="took"')
        assert (bars, "the table has all" in page) == (min(len(kernels), 12), len(kernels) > 12)


def test_an_error_inside_ends_the_record(model):
    with pytest.raises(KeyError), fusion_moe.record(model):
        raise KeyError
    assert recording.active is None
    with fusion_moe.record(model) as run:
        generate(model, 2)
    assert run.data.rows


def test_json_comes_back(run, tmp_path):
    path = tmp_path / "run.json"
    run.save(path)
    again = Run.load(path)
    assert again.data.to_json() == run.data.to_json()
    assert str(again) == str(run)


def test_no_text_and_no_token_is_in_any_form(run, tmp_path):
    for name in ("run.json", "run.trace.json", "run.html", "run.txt"):
        run.save(tmp_path / name)
        text = (tmp_path / name).read_text()
        assert "def main" not in text
        assert "100, 101, 102" not in text  # the ids of its first letters


def test_two_runs_compared(run, model):
    with fusion_moe.record(model) as longer:
        generate(model, 2 * TOKENS)
    found = run.compare(longer)
    said = {name: (before, after) for name, before, after, _ in found.changes}
    assert said["rows of experts"] == ("544", "928")
    assert said["rows of a step"] == ("16", "16")  # of a median one, in both
    assert {k.ops for k in run.data.kernels} <= {name.split(": ")[-1] for name in said}
    assert "rows of experts" in str(found)
    assert json.loads(found.to_json())["schema"] == "fusion_moe.compare/1"


def test_ranks_are_merged_under_their_numbers(run):
    both = Run.merged(run, run)
    assert [layer.rank for layer in both.data.layers] == [0] * 4 + [1] * 4
    assert (both.data.rows, both.data.ranks, both.data.depth) == (2 * run.data.rows, 2, 4)
    assert "on 2 ranks" in str(both)
    processes = {e["pid"] for e in events(both)}
    assert processes == {0, 1}


def events(run: Run) -> list[dict]:
    found = json.loads(_saved(run, ".trace.json"))
    assert found["displayTimeUnit"] == "ms"
    return found["traceEvents"]


def _saved(run: Run, suffix: str) -> str:
    return Run.form_of(f"run{suffix}")(run)


def test_trace_events_are_as_their_format_says(run):
    named = {(e["pid"], e["tid"]) for e in events(run) if e["name"] == "thread_name"}
    slices = [e for e in events(run) if e["ph"] == "X"]
    assert {e["ph"] for e in events(run)} == {"M", "X"}
    assert {(e["pid"], e["tid"]) for e in slices} == named
    for e in slices:
        assert all(isinstance(e[key], (int, float)) for key in ("ts", "dur", "pid", "tid"))
        assert e["dur"] >= 0
    tracks = {e["args"]["name"] for e in events(run) if e["name"] == "thread_name"}
    assert {"steps", "kernels", "cpu"} <= tracks
    assert sum(e["cat"] == "kernels" for e in slices) == sum(k.calls for k in run.data.kernels)


def test_the_page_is_one_well_formed_file(run):
    text = _saved(run, ".html")
    read = Read(text)
    assert (read.open, read.unbalanced) == ([], [])
    for _, attributes in read.elements:
        assert (attributes.get("src") or "data:").startswith("data:")
        assert attributes.get("href") in (None, "data:,")
    assert len(read.all("img")) == 8  # of each layer all rows, and over time
    assert all(image["alt"] for image in read.all("img"))
    assert not re.search(r"url\(|@import|https?:", text)


def test_the_page_escapes_names():
    run = pages.harmful_run()
    assert pages.HARM not in _saved(run, ".html")
    assert pages.HARM not in str(Read(_saved(run, ".html")).elements)


def test_the_kernel_that_counts_compiles():
    if missing := nvrtc.why_missing():
        pytest.skip(missing)
    for arch in ("sm_80", "sm_90a"):
        assert counts.cubin(arch).stat().st_size
