"""fusion-moe run and bench: on the small real model, and on random weights."""

import io
import json
import shutil
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from cover import few

pytest.importorskip("typer")
pytest.importorskip("transformers")

from files import MADE
from huggingface_hub import constants
from rich.console import Console
from transformers import AutoTokenizer
from transformers.integrations import accelerate as of_accelerate
from typer.testing import CliRunner

from fusion_moe.cli.app import app
from fusion_moe.cli.bench import Bench
from fusion_moe.cli.models import a_model, local, quietly
from fusion_moe.errors import CheckpointError, UnsupportedError
from fusion_moe.integrations.transformers.bench import Row, Times, loaded
from fusion_moe.transformers import NVFP4Config, from_pretrained, fuse_routers_

MODEL = Path(__file__).parents[2] / "examples" / "tiny_qwen3_moe"
PROMPT = "def __repr__(self):"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def call(*arguments: object, input: str | None = None):
    result = CliRunner().invoke(app, [str(a) for a in arguments], input=input)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def model():
    kwargs = {"dtype": torch.bfloat16, "quantization_config": NVFP4Config()}
    of = from_pretrained(MODEL, **kwargs).eval()
    fuse_routers_(of)
    return of


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """The small model as huggingface_hub keeps one that it has downloaded; no network."""
    folder = tmp_path / "models--some--tiny"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0123abcd")
    shutil.copytree(MODEL, folder / "snapshots" / "0123abcd")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_run_takes_a_name_of_the_hub(cached, model):
    result = call("run", "some/tiny", PROMPT, "--tokens", 4, "--json")
    assert json.loads(result.stdout)["answers"][0]["text"] == answer(model, PROMPT, 4)
    assert "weights: 6.2 MB of memory" in result.stderr


def test_a_name_that_is_neither_a_directory_nor_on_the_hub(cached):
    with pytest.raises(CheckpointError, match="no such directory, and not from the Hub"):
        local(Path("some/other"))
    assert local(Path("no name")) == Path("no name")


def answer(model, text: str, tokens: int) -> str:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = tokenizer(text, return_tensors="pt").input_ids
    made = model.generate(ids, max_new_tokens=tokens, do_sample=False)[0, ids.shape[1] :]
    return tokenizer.decode(made, skip_special_tokens=True)


def test_run_answers_as_generate_does(model, tmp_path):
    record = tmp_path / "run.txt"
    arguments = ("run", MODEL, PROMPT, "--tokens", 12, "--record", record)
    found = json.loads(call(*arguments, "--json").stdout)
    assert (found["recorded"], record.is_file()) == (str(record), True)
    assert [a["text"] for a in found["answers"]] == [answer(model, PROMPT, 12)]
    assert found["steps"] == "call by call: not on a GPU"
    assert found["experts"][0].startswith("4 layers in nvfp4, ")
    assert found["weights"] < 7e6 < found["peak"]


def test_an_answer_ends_with_the_context(tmp_path):
    """Also in a chat, whatever --length says: what comes after it is noise."""
    for file in MODEL.iterdir():
        if file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
    config = json.loads((MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 12}))
    for arguments in ((PROMPT, "--tokens", 10**20), ("-i", "--length", 10**6, "--tokens", 10**6)):
        found = json.loads(
            call("run", tmp_path, *arguments, "--json", input=f"{PROMPT}\n\n").stdout
        )
        (only,) = found["answers"]
        assert only["read"] + only["written"] == 12
    result = CliRunner().invoke(app, ["run", str(tmp_path), "x " * 12])
    assert result.exit_code == 2
    assert "run: a conversation of 13 tokens; expected fewer than 12\n" in result.stderr


def test_experts_in_eight_bits_stay_so(tmp_path):
    call("quantize", MODEL, tmp_path / "fp8", "--to", "fp8")
    found = json.loads(call("run", tmp_path / "fp8", PROMPT, "--tokens", 2, "--json").stdout)
    assert found["experts"][0].startswith("4 layers in fp8, ")


def test_without_accelerate(monkeypatch):
    """CPUs do not need it; where it is needed, the extra is named."""
    monkeypatch.setattr(of_accelerate, "is_accelerate_available", lambda *_: False)
    assert "answer: 2 tokens" in call("run", MODEL, PROMPT, "--tokens", 2, "--device", "cpu").stdout
    with pytest.raises(UnsupportedError, match=r"pip install '\.\[models\]'"), a_model(MODEL):
        from_pretrained(MODEL, device_map="auto")


def test_part_of_a_gpu():
    """Where there is none, that is said before anything is read."""
    if torch.cuda.is_available():
        pytest.skip("there is one")
    result = CliRunner().invoke(app, ["run", str(MODEL), "x", "--gpu-memory", "2GiB"])
    assert result.exit_code == 3
    assert result.output == (
        "fusion-moe: run --gpu-memory: no GPU that runs kernels; fusion-moe doctor says why\n"
    )


def test_a_chat_reads_all_that_was_said_by_the_template(model, tmp_path):
    for file in MODEL.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    result = call("run", tmp_path, "-i", "--tokens", 6, "--length", 64, input="one\ntwo\n\n")
    one = answer(model, "<user>one", 6)
    two = answer(model, f"<user>one<assistant>{one}<user>two", 6)
    assert one in result.stdout
    assert two in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("run", MODEL), 2, "no prompt"),
        (("run", MODEL, "a", "--device", "tpu"), 2, "--device"),
        (("run", MODEL / "nothing", "a"), 1, "nothing"),
        (("run", MADE / "modelopt-mixtral", "a"), 1, "no tokenizer; expected tokenizer.json"),
        (("bench",), 2, "neither DIR nor --config"),
        (("bench", "--config", "nope"), 2, "expected tiny, qwen3-30b, or a file or directory"),
        (
            ("bench", MODEL, "--mode", "eager,jit"),
            2,
            "--mode jit; expected eager, inductor, fusion",
        ),
        (
            ("bench", MODEL, "--mode", "eager", "--after", "3"),
            2,
            "--after with --mode; expected one",
        ),
    ],
)
def test_wrong_calls_are_a_sentence(arguments, code, said):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert (result.exit_code, result.stdout) == (code, "")
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_bench_of_sizes_alone():
    small = ("--prompt", 12, "--after", 4, "--repeats", 2, "--layers", 2)
    result = call("bench", "--config", "tiny", *small, "--json")
    found, said = json.loads(result.stdout), result.stderr.splitlines()
    assert "timing steps of 1 sequence..." in said
    assert "timing prompts of 12 tokens..." in said
    names = ["NVFP4", "bf16 grouped_mm", "bf16 batched_mm"]
    cells = [(row["of"], row["name"], row["tokens"]) for row in found["rows"]]
    assert cells == [("decode", n, 1) for n in names] + [("prompt", n, 12) for n in names[:2]]
    assert all(0 < r["times"]["low"] <= r["times"]["median"] for r in found["rows"])
    assert found["layers"] == [2, 4]
    # experts: 2 layers of 16 of 3 * 256 * 128 weights, in bf16 and with 4.5 bits, and decode scales
    experts = 2 * 16 * 3 * 256 * 128
    saved = experts * 2 - experts * 4.5 / 8 - 2 * 16 * 3 * 4
    for of, factor in zip(found["weights"], (1, 2), strict=True):
        assert of["bf16"] - of["NVFP4"] == saved * factor


@pytest.mark.parametrize("name", ["modelopt-mixtral", "mxfp4-gpt_oss"])
@torch.no_grad()
def test_beside_a_quantized_directory_stands_the_same_model_in_bf16(name):
    ours, *others = loaded(MADE / name, "cpu")
    ids = torch.arange(3, 12)[None]
    wanted = ours.model(ids).logits
    for other in others:
        other.read(ids)  # by its own experts
        torch.testing.assert_close(other.model(ids).logits, wanted, rtol=0.05, atol=0.05)


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.usefixtures("call_by_call")
@pytest.mark.parametrize("others", few(["thunder", "inductor,thunder,thunderfx"]))
def test_bench_of_all_modes(others):
    """What does not run, as thunder where it is not installed, is a row that says why."""
    modes = "eager", "fusion_moe", *others.split(",")
    small = ("--layers", 1, "--prompt", 6, "--repeats", 2, "--mode", ",".join(modes))
    found = json.loads(call("bench", "--config", "tiny", *small, "--json").stdout)
    rows = {(row["of"], row["mode"]): row for row in found["rows"]}
    assert set(rows) == {(of, mode) for of in ("first token", "between tokens") for mode in modes}
    there = find_spec("thunder") is not None
    for (_, mode), row in rows.items():
        assert row["name"] == ("fusion_moe NVFP4" if mode == "fusion_moe" else f"{mode} bf16")
        runs = "thunder" not in mode or (there and mode == "thunderfx")
        assert bool(row["times"]) == runs, row  # thunder.jit takes no whole model of transformers
        assert bool(row["why"]) != runs
        if "thunder" in mode and not there:
            assert row["why"].startswith("thunder is not installed; expected lightning-thunder")
    assert found["weights"][0]["NVFP4"] < found["weights"][0]["bf16"]


def test_bench_prints_what_does_not_run():
    def row(mode: str, times: Times | None, why: str = "") -> Row:
        return Row("first token", f"{mode} bf16", 1, times, mode, why)

    rows = (
        row("eager", Times(2.0, 2.0, 2.0)),
        row("thunder", None, "thunder is not installed"),
        row("fusion_moe", Times(1.0, 1.0, 1.0)),
    )
    weights = {"NVFP4": 1, "bf16": 2}
    console = Console(record=True, file=io.StringIO(), width=100)
    Bench("of", "where", "how", (1, 1), rows, {}, (weights, weights)).print(console)
    lines = console.export_text().splitlines()
    assert [line for line in lines if "thunder" in line] == [
        next(line for line in lines if line.split()[-2:] == ["bf16", "-"]),
        "thunder bf16: thunder is not installed",
    ]
    assert "first token, 1 sequence: fusion_moe bf16 is 2.00x as fast as eager bf16" in lines


def test_bench_says_when_runs_differ_much():
    """A spread of 25 %, then one of 75 %."""
    for high, said in ((1.25, 0), (1.75, 1)):
        rows = (
            Row("decode", "NVFP4", 1, Times(1.0, 1.0, high)),
            Row("decode", "bf16 grouped_mm", 1, Times(2.0, 2.0, 2.0)),
        )
        weights = {"NVFP4": 1, "bf16": 2}
        console = Console(record=True, file=io.StringIO())
        Bench("of", "where", "how", (1, 1), rows, {}, (weights, weights)).print(console)
        assert console.export_text().count("measure again when nothing else runs here") == said


def test_bench_of_another_format():
    small = ("--prompt", 4, "--after", 4, "--repeats", 2, "--layers", 1, "--batch", 2)
    lines = call("bench", "--config", "tiny", "--to", "int4", *small).stdout.splitlines()
    for of in ("decode, 2 sequences", "prompt, 4 tokens"):
        rows = [line for line in lines if line.startswith(f"{of}  ")]
        assert [line.removeprefix(of).split()[0] for line in rows] == ["INT4", "bf16", "bf16"]
        assert max(line.count("=") for line in rows) == 30


def test_what_others_warn_of_is_not_shown():
    """But what comes from anywhere else is."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with quietly():
            for module in "torch._dynamo.functions", "thunder", "torchvision", "mine":
                warnings.warn_explicit(f"of {module}", UserWarning, "file.py", 1, module)
    assert [str(w.message) for w in shown] == ["of torchvision", "of mine"]
