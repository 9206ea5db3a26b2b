"""fusion-moe inspect: on every directory that other packages made, and on broken ones."""

import json

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("safetensors")

from files import MADE, change, change_json, copied, raw
from typer.testing import CliRunner

from fusion_moe import options
from fusion_moe.cli.app import app

DIRECTORIES = sorted(path.name for path in MADE.iterdir() if (path / "config.json").exists())


def run(*arguments: str):
    with options.override(cpu_isa="generic"):
        return CliRunner().invoke(app, ["inspect", *arguments])


def found(*arguments: str):
    """The exit code and the JSON."""
    result = run("--json", *arguments)
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.compiler
@pytest.mark.skipif(torch.cuda.is_available(), reason="other kernels run here")
def test_texts(golden, monkeypatch):
    monkeypatch.chdir(MADE)
    texts = []
    for name in DIRECTORIES:
        result = run(name, "--values")
        assert result.exit_code == 0, result.output
        texts += [*result.stdout.splitlines(), ""]
    golden("\n".join(texts))


@pytest.mark.parametrize("name", DIRECTORIES)
def test_counts_by_numpy(name):
    code, shown = found(str(MADE / name), "--values")
    stored = raw(MADE / name)
    nested = sum(".nested_" in name for name in stored)  # beside scales that have them
    assert (code, shown["problems"], shown["tensors"]) == (0, [], len(stored) - nested)
    assert (
        shown["bytes"]
        == sum(array.nbytes for array in stored.values())
        == sum(group["bytes"] for group in shown["groups"])
    )
    experts = {
        group["format"]: group["weights"] for group in shown["groups"] if group["of"] == "experts"
    }
    assert len(experts) == 1
    if (quantizer := name.split("-")[0]) != "bf16":
        by = {"ct": "compressed-tensors", "auto_round": "auto-round", "bnb": "bitsandbytes"}
        assert shown["method"] == by.get(quantizer, quantizer)


def test_a_missing_tokenizer_is_noted(tmp_path):
    folder = copied("modelopt-qwen3_moe", tmp_path)
    code, shown = found(str(folder))
    assert (code, len(shown["notes"])) == (0, 1)
    assert "no tokenizer" in shown["notes"][0]
    (folder / "tokenizer.json").write_text("{}")
    assert found(str(folder))[1]["notes"] == []


def test_a_scale_that_is_nan_is_seen_with_values(tmp_path):
    def spoil(tensors):
        name = next(name for name in tensors if name.endswith("experts.1.up_proj.weight_scale"))
        tensors[name].view(torch.uint8)[0, 0] = 0x7F

    folder = str(change(copied("modelopt-qwen3_moe", tmp_path), spoil))
    assert found(folder)[0] == 0
    code, shown = found(folder, "--values")
    assert code == 1
    assert "experts.1.up_proj.weight_scale" in shown["problems"][0]


def test_what_is_missing_is_a_problem_beside_what_is_there(tmp_path):
    folder = change(
        copied("modelopt-qwen3_moe", tmp_path),
        lambda t: t.pop(next(n for n in t if n.endswith("up_proj.weight_scale"))),
    )
    code, shown = found(str(folder))
    assert (code, len(shown["problems"]), shown["files"]) == (1, 1, 1)
    assert "up_proj.weight_scale" in shown["problems"][0]
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1])
    code, shown = found(str(folder))
    assert (code, shown["files"]) == (1, 0)
    assert "a whole file of safetensors" in shown["problems"][0]
    assert run(str(folder)).stdout.splitlines()[-1].startswith("problem: ")


def test_experts_of_another_number_in_one_tensor_are_a_problem(tmp_path):
    folder = copied("mxfp4-gpt_oss", tmp_path)
    change_json(folder / "config.json", lambda c: c.update(num_local_experts=3))
    code, shown = found(str(folder))
    assert (code, len(shown["problems"])) == (1, 1)
    assert "expected 3 experts, by config.json" in shown["problems"][0]


# for terminals: escape sequences, text from right to left
HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b2J\u202e\ud800\nno problems"


@pytest.mark.parametrize("json_", [True, False])
def test_what_a_terminal_would_obey_is_escaped(json_, tmp_path):
    path = copied("modelopt-qwen3_moe", tmp_path)
    change_json(path / "config.json", lambda c: c.update(architectures=[HOSTILE, 5, [[]]]))
    change(path, lambda tensors: tensors.update({"\x1b[2J.weight_scale": torch.ones(3)}))
    result = run(*["--json"] * json_, str(path))
    assert result.exit_code == 1
    assert all(c.isprintable() or c == "\n" for c in result.stdout)
    assert "\\x1b[2J" in result.stdout if not json_ else json.loads(result.stdout)
    assert "\nno problems" not in result.stdout


@pytest.mark.parametrize("value", [5, "Qwen3", {"a": 1}, [1.5], None, [[[["deep"]]]]])
def test_architectures_that_are_none(value, tmp_path):
    path = copied("modelopt-qwen3_moe", tmp_path)
    change_json(path / "config.json", lambda c: c.update(architectures=value))
    code, shown = found(str(path))
    assert (code, shown["architectures"]) == (0, [])
    assert "no architecture; quantized by modelopt" in run(str(path)).stdout
