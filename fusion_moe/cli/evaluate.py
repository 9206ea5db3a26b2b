"""fusion-moe eval: how well a model predicts a text, and how far it is from another one."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import OptionError, in_one_line
from ..messages import check_checkpoint
from .models import a_model, check_tokenizer, device_of, quietly, tokenizer_of
from .output import Result, table
from .start import load

if TYPE_CHECKING:
    from rich.console import Console

    from ..integrations.transformers.evaluation import Evaluation


@dataclass(frozen=True)
class Evaluated(Result):
    """What was found of a directory, on a text; against: another one."""

    schema = "fusion_moe.eval/1"
    directory: str
    text: str
    against: str | None
    found: Evaluation

    def to_json(self) -> dict[str, Any]:
        """Sums over tokens, not each of them."""
        results = {key: value for key, value in asdict(self.found).items() if key != "losses"}
        named = {"directory": self.directory, "text": self.text, "against": self.against}
        return {"schema": self.schema, **named, "tokens": self._tokens, **results}

    @property
    def _tokens(self) -> int:
        return sum(map(len, self.found.losses))

    def print(self, console: Console) -> None:
        """Prints perplexities, then what routers chose."""
        result, difference = self.found, self.found.difference
        console.print(f"{self.directory}; {self._tokens:,} tokens of {self.text}", soft_wrap=True)
        rows = [
            ("bits per byte", f"{result.bits_per_byte:.5f}"),
            ("perplexity", f"{result.perplexity:.4f}"),
        ]
        if difference is not None:
            low, high = (f"{100 * end:+.3f}" for end in difference.interval)
            change = f"{100 * difference.perplexity:+.3f} % ({low} to {high})"
            rows += [
                (f"perplexity, change from {self.against}", change),
                ("KL divergence", f"{difference.kl:.3g} nats"),
                ("same likeliest token", f"{100 * difference.same_token:.2f} %"),
            ]
            routers = difference.routers.items()
            rows += [(f"same experts, {name}", f"{100 * share:.2f} %") for name, share in routers]
        console.print("", table(("", ""), rows, right=(1,), header=False), sep="\n")


def evaluate(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A model's directory, with its tokenizer.")
    ],
    text: Annotated[
        Path, typer.Option(metavar="FILE", help="A text; or .jsonl, an object with text in a line.")
    ],
    against: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The model in floats: also compares with it."),
    ] = None,
    window: Annotated[
        int, typer.Option(min=2, help="Tokens that the model reads at once, with half an overlap.")
    ] = 1024,
) -> Evaluated:
    """How well a model predicts a text, and beside another model.

    Bits per byte and perplexity; against another model also the change with the interval that holds
    95 %, the KL divergence of its tokens, and whether routers choose the same experts.

    Runs in bfloat16, on a GPU if there is one.
    """
    for each in (directory, against):
        if each is not None:
            check_checkpoint(each)
    check_tokenizer(directory)
    texts = _texts(text)
    load()
    device = device_of("", "eval")
    with quietly():
        import torch

        from ..integrations.transformers import from_pretrained
        from ..integrations.transformers.evaluation import evaluate as evaluate_model

        tokenizer = tokenizer_of(directory)
        models = []
        for each in (directory, against):
            with a_model(each or directory):
                model = each and from_pretrained(each, dtype=torch.bfloat16)
            models.append(model and model.to(device).eval())
        result = evaluate_model(models[0], tokenizer, texts, models[1], window)
    return Evaluated(str(directory), str(text), None if against is None else str(against), result)


def _texts(file: Path) -> list[str]:
    where = f"--text {file}"
    if not file.is_file():
        raise OptionError("no such file", expected="a text", where=where)
    try:
        whole = file.read_text(encoding="utf-8")
        if file.suffix != ".jsonl":
            return [whole]
        return [str(json.loads(line)["text"]) for line in whole.splitlines() if line.strip()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(
            f"{type(error).__name__}: {in_one_line(error)}",
            expected="a text in UTF-8, or .jsonl with objects that have text",
            where=where,
        ) from None
