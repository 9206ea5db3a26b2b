"""fusion-moe explain: what of a checkpoint's model is fused, without reading its weights."""

from __future__ import annotations

from dataclasses import dataclass
from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..arch import named
from ..errors import UnsupportedError
from ..messages import check_checkpoint, check_writable, count, install
from .models import a_model, quietly
from .output import Result
from .start import load

if TYPE_CHECKING:
    from rich.console import Console
    from torch import nn

    from ..report import Report

SAVED = ".html", ".json", ".txt"  # forms of a report, by the ends of a file's name

_NEXT = (
    ("--details", "every type, source line and boundary"),
    ("--save report.html", "source, IR and kernels side by side"),
)


@dataclass(frozen=True)
class Explanation(Result):
    """A report as a result of a command. of: what was explained; details: whether all of it is
    printed; saved: a file that has it.
    """

    report: Report
    of: str
    details: bool = False
    saved: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """The report as JSON, schema fusion_moe.explain."""
        return loads(self.report.to_json())

    def print(self, console: Console) -> None:
        """The report's own text, as wide as the console."""
        from ..report.output import coloured, fitting
        from ..report.summary import summary

        text = (
            self.report.details()
            if self.details
            else summary(self.report, fitting(console.width), _NEXT)
        )
        console.print(coloured(f"{self.of}\n\n{text}"), soft_wrap=True)
        if self.saved:
            console.print(f"\nsaved: {self.saved}", soft_wrap=True)


def explain(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A directory with config.json and safetensors.")
    ],
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    tokens: Annotated[
        int,
        typer.Option(min=1, help="Of each sequence: 1 is a step of decoding, more are a prompt."),
    ] = 1,
    target: Annotated[
        str,
        typer.Option(
            help="cpu, cuda, sm_90, sm_100 or reference. [default: what this machine has]"
        ),
    ] = "",
    gpu: Annotated[
        str,
        typer.Option(help="Show the CUDA kernels for this GPU, such as H100, which may be absent."),
    ] = "",
    details: Annotated[bool, typer.Option("--details", help="Print the whole report.")] = False,
    save: Annotated[
        Path | None, typer.Option(help="A file to write: .html, .json or .txt.")
    ] = None,
) -> Explanation:
    """What of a model is fused, what is not, and why.

    From its configuration and headers, on fake tensors; no weight is read.
    """
    check_checkpoint(directory)
    if gpu:
        named(gpu, "--gpu")
    if save:
        check_writable(save, "a report", SAVED)
    load()
    import torch

    from ..env import has_cuda
    from ..report import explain as report_of

    to = target or (None if gpu else ("cuda" if has_cuda() else "cpu"))
    ids = torch.zeros(batch, tokens, dtype=torch.long)
    with quietly(), torch.no_grad():
        model = model_of(directory)
        report = report_of(model, input_ids=ids, use_cache=False, target=to, gpu=gpu or None)
    if save:
        report.save(save)
    of = f"{count(batch, 'sequence')} of {count(tokens, 'token')}"
    if getattr(model.config, "_experts_implementation", "") == "fusion_moe":
        of += ", experts in floats by experts_implementation='fusion_moe'"
    return Explanation(report, of, details, save)


def model_of(path: Path) -> nn.Module:
    """The model of a directory on the meta device, with the modules that its weights are loaded
    into.
    """
    import torch

    from ..checkpoints import Directory, method_of, packing_of
    from ..checkpoints.configurations import own_entries
    from ..nn.config import NVFP4Config

    directory = Directory.open(path)
    method = method_of(directory.quantization, str(path))
    try:
        import fusion_moe.transformers  # noqa: F401  (experts_implementation)

        from ..integrations.transformers.loading import configuration, on_meta
        from ..integrations.transformers.replacements import replace_modules
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"{error.name} is not installed", todo=install("models")) from None
    if not method and torch.__version__ < "2.13":
        expected = "torch 2.13 or newer, which traces experts_implementation='fusion_moe'"
        raise UnsupportedError(
            f"experts in floats, with torch {torch.__version__}", expected=expected, where=str(path)
        )
    with a_model(path):
        config = configuration(path)
        config.quantization_config = None
        model = on_meta(config, str(path))
    if type(model).forward is torch.nn.Module.forward:
        raise UnsupportedError(
            f"a {type(model).__name__}, of several models",
            expected="one that is called with tokens",
            where=str(path),
        )
    if method:
        text = directory.quantization
        config = NVFP4Config(**own_entries(text))
        replace_modules(model, directory.tensors, method, config, packing=packing_of(text))
    else:
        model.set_experts_implementation("fusion_moe")
    return model.eval().requires_grad_(False)
