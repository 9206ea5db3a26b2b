"""fusion-moe convert and quantize: exit codes for every directory that other packages made, and
what was written.
"""

import json

import pytest

pytest.importorskip("typer")
pytest.importorskip("safetensors")

from files import MADE, raw
from typer.testing import CliRunner

from fusion_moe.checkpoints import writing
from fusion_moe.cli.app import app

# each way to store experts; tests/checkpoints/test_convert.py has all directories
DIRECTORIES = (
    "bf16-qwen3_moe",
    "ct-qwen3_moe",
    "ct-qwen3_moe-int4",
    "modelopt-mixtral",
    "mxfp4-gpt_oss",
)
NOT_NVFP4 = ("bf16-qwen3_moe", "ct-qwen3_moe-int4")  # nothing to convert; not exactly


def run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("name", DIRECTORIES)
def test_exit_codes(name, tmp_path):
    codes = [
        run("convert", MADE / name, tmp_path / "modelopt").exit_code,
        run("convert", MADE / name, tmp_path / "dense", "--to", "dense").exit_code,
        run("quantize", MADE / name, tmp_path / "quantized").exit_code,
    ]
    plain = name.startswith("bf16")
    assert codes == [3 if name in NOT_NVFP4 else 0, 3 if plain else 0, 0 if plain else 3]
    assert {path.name for path in tmp_path.iterdir()} == {
        form
        for form, code in zip(("modelopt", "dense", "quantized"), codes, strict=True)
        if code == 0
    }
    for folder in tmp_path.iterdir():
        assert run("inspect", folder).exit_code == 0


def test_what_is_printed_is_what_was_written(tmp_path):
    result = run("convert", "--json", MADE / "ct-qwen3_moe", tmp_path / "out")
    shown = json.loads(result.stdout)
    assert result.exit_code == 0
    assert (shown["method"], shown["algorithm"], shown["tensors"]) == (
        "modelopt",
        "W4A16_NVFP4",
        len(raw(tmp_path / "out")),
    )
    assert shown == json.loads(run("inspect", "--json", tmp_path / "out").stdout)
    assert {group["format"] for group in shown["groups"] if group["of"] == "experts"} == {
        "ModelOpt NVFP4"
    }


def test_dense_in_bfloat16(tmp_path):
    assert (
        run(
            "convert",
            MADE / "modelopt-mixtral",
            tmp_path / "out",
            "--to",
            "dense",
            "--dtype",
            "bfloat16",
        ).exit_code
        == 0
    )
    assert {str(array.dtype) for array in raw(tmp_path / "out").values()} == {"bfloat16"}


def test_a_dtype_of_no_floats_is_refused(tmp_path):
    result = run("convert", MADE / "ct-qwen3_moe", tmp_path / "out", "--dtype", "bfloat16")
    assert result.exit_code != 0
    assert "--dtype bfloat16 with --to modelopt" in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_destination_that_is_there_is_a_problem(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    result = run("convert", MADE / "ct-qwen3_moe", tmp_path)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_ctrl_c_says_what_is_left(tmp_path, monkeypatch):
    def stopped(path, steps):
        raise KeyboardInterrupt

    monkeypatch.setattr(writing, "write_shard", stopped)
    result = run("convert", MADE / "ct-qwen3_moe", tmp_path / "out")
    assert (result.exit_code, result.stdout, list(tmp_path.iterdir())) == (130, "", [])
    said = f"stopped: {tmp_path / 'out'} is not written, and nothing of it is left"
    assert result.stderr == f"fusion-moe: {said}\n"


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("bf16-qwen3_moe", ("quantize",)),
        ("bf16-qwen3_moe", ("quantize", "--to", "int4")),
        ("ct-qwen3_moe", ("convert",)),
        ("mxfp4-gpt_oss", ("convert", "--to", "dense")),
    ],
)
def test_a_dry_run_says_what_inspect_would(name, how, tmp_path):
    """To the byte, and writes nothing."""
    command, *options = how
    dry = run(command, MADE / name, tmp_path / "out", *options, "--dry-run", "--json")
    assert (dry.exit_code, list(tmp_path.iterdir())) == (0, [])
    real = run(command, MADE / name, tmp_path / "out", *options, "--json")
    assert json.loads(dry.stdout) == {**json.loads(real.stdout), "written": False}
    assert run(command, MADE / name, tmp_path / "out", *options, "--dry-run").exit_code == 1
