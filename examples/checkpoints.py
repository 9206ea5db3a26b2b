"""Quantized checkpoints of several families: loads, runs, saves and reloads each, and compares it
with what its bytes mean.

    python examples/checkpoints.py [--only NAME]

The models are tiny and random. If nvidia-modelopt is installed, it writes its three kinds of
directories, and if gguf is, files of six families; all others (without it, ModelOpt's too) come
from tests/checkpoints/made. The reference reads each file with numpy and ml_dtypes, or has gguf
round the weights, and puts the numbers into transformers' plain model; float32 logits and 16
generated tokens are compared. Exits with 1 if a row fails.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from fusion_moe.errors import Error
from fusion_moe.transformers import from_pretrained

ROOT = Path(__file__).resolve().parents[1]
MADE = ROOT / "tests" / "checkpoints" / "made"
sys.path[:0] = [
    str(ROOT / path) for path in ("tests/integrations/transformers", "tests/checkpoints", "tools")
]

from decoded import plain_model, relative, same_parameters  # noqa: E402
from gguf_files import ARCHITECTURES, rounded_model, write_gguf  # noqa: E402
from make_checkpoints import mixed, modelopt  # noqa: E402

TOKENS, LIMIT = 16, 1e-5
GGUF = "MXFP4", "Q8_0"  # of experts, of all else
EXPORTS: dict[str, tuple[str, Any]] = {
    "NVFP4 Qwen3-MoE": ("qwen3_moe", "NVFP4_DEFAULT_CFG"),
    "NVFP4 Mixtral": ("mixtral", "NVFP4_DEFAULT_CFG"),
    "NVFP4 DeepSeek-V3": ("deepseek_v3", "NVFP4_DEFAULT_CFG"),
    "NVFP4 gpt-oss": ("gpt_oss", "NVFP4_DEFAULT_CFG"),
    "NVFP4 Llama-4": ("llama4_text", "NVFP4_DEFAULT_CFG"),
    "NVFP4 Nemotron-H": ("nemotron_h", "NVFP4_DEFAULT_CFG"),
    "NVFP4 Gemma 4": ("gemma4_text", "NVFP4_DEFAULT_CFG"),
    "W4A16_NVFP4 DeepSeek-V3": ("deepseek_v3", "W4A16_NVFP4_CFG"),
    "W4A16_NVFP4 Qwen3.5-MoE": ("qwen3_5_moe_text", "W4A16_NVFP4_CFG"),
    "MIXED_PRECISION Qwen3.5-MoE": ("qwen3_5_moe_text", mixed),
    "MIXED_PRECISION Qwen3-MoE": ("qwen3_moe", mixed),
}  # ModelOpt's quant_algo and the family -> transformers' configuration and ModelOpt's


class Row(NamedTuple):
    """The results for a directory. tokens: whether both models generated the same; saved: what was
    written, and whether it loads equal.
    """

    name: str
    seconds: str
    difference: str
    tokens: str
    saved: str
    problem: str = ""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="directories with this in their names")
    only = parser.parse_args().only
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, write in directories():
            if only in name:
                rows.append(row(name, write, Path(folder)))
                print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    show(rows)
    sys.exit(any(r.problem for r in rows))


def directories() -> Iterator[tuple[str, Callable[[Path], Path]]]:
    """The name of each directory, and a function that makes it in a folder or finds it."""
    if importlib.util.find_spec("modelopt"):
        yield from (
            (f"ModelOpt {name}", lambda out, export=export: exported(out, *export))
            for name, export in EXPORTS.items()
        )
    if importlib.util.find_spec("gguf"):
        yield from (
            (
                f"GGUF MXFP4 {family}",
                lambda out, family=family: write_gguf(out / f"{family}.gguf", family, *GGUF),
            )
            for family in ARCHITECTURES
        )
    for made in sorted(MADE.iterdir()):
        if not made.name.startswith("bf16") and (
            not made.name.startswith("modelopt") or not importlib.util.find_spec("modelopt")
        ):
            yield made.name, lambda out, made=made: made


def exported(out: Path, family: str, config: Any) -> Path:
    """The directory that ModelOpt exports."""
    directory = out / "exported"
    directory.mkdir()
    with quiet():
        modelopt(family, config() if callable(config) else config)(directory)
    return directory


def row(name: str, write: Callable[[Path], Path], folder: Path) -> Row:
    """All results for one directory."""
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        try:
            return measured(name, write(Path(inside)), Path(inside) / "saved")
        except (
            Error,
            RuntimeError,
            ValueError,
            KeyError,
            AttributeError,
            NotImplementedError,
        ) as error:
            return Row(
                name, "", "", "", "", f"{type(error).__name__}: {str(error).splitlines()[0]}"
            )


def measured(name: str, directory: Path, saved: Path) -> Row:
    """Loads, compares, saves and reloads."""
    with quiet():
        start = time.perf_counter()
        model = from_pretrained(directory, dtype=torch.float32)
        seconds = time.perf_counter() - start
        in_gguf = directory.suffix == ".gguf"
        judge = rounded_model(directory.stem, *GGUF) if in_gguf else plain_model(directory)
        prompt = torch.arange(3, 12)[None]
        difference = relative(logits(model, prompt), logits(judge, prompt))
        same_tokens = torch.equal(generated(model, prompt), generated(judge, prompt))
        model.save_pretrained(saved)
        again = from_pretrained(saved, dtype=torch.float32)
        same_again = same_parameters(again, model)
    method = again.config.quantization_config.method
    problem = "" if difference <= LIMIT and same_tokens and same_again else "not the same"
    return Row(
        name,
        f"{seconds:.2f}",
        f"{difference:.0e}",
        yes(same_tokens),
        f"{method}, {'same' if same_again else 'DIFFERENT'}",
        problem,
    )


def logits(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    """[1, T, vocabulary]"""
    with torch.no_grad():
        return model(prompt).logits


def generated(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    """The tokens after a prompt."""
    return model.generate(prompt, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)[
        :, prompt.shape[1] :
    ]


def yes(found: bool) -> str:
    """A result as text for the table."""
    return "equal" if found else "DIFFERENT"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences what other packages print and warn about."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def show(rows: list[Row]) -> None:
    """The table."""
    head = Row(
        "directory", "load s", "logits", f"{TOKENS} tokens", "saved as, loaded again", "problem"
    )
    widths = [max(len(r[i]) for r in (head, *rows)) for i in range(len(head))]
    for r in (head, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(r, widths, strict=True)).rstrip())
    print(
        f"{sum(not r.problem for r in rows)} of {len(rows)} directories load, compute and save "
        "what their bytes mean"
    )


if __name__ == "__main__":
    main()
