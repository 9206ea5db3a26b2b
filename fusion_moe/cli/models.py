"""Models of transformers, as commands load them."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import CheckpointError, Error, UnsupportedError, in_one_line, need_one_of
from ..messages import GGUF, amount, exists, install

_NAME = re.compile(r"[\w.-]+/[\w.-]+")  # of a model on the Hub
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt"]  # of one that are downloaded
_OTHERS = "transformers", "torch", "torchao", "thunder"  # that warn of what users cannot change
_TOKENIZERS = "token*", "tekken*", "vocab*", "*.tiktoken", "*.model"  # files of one
Device = Annotated[str, typer.Option(help="cpu or cuda. [default: a GPU where there is one]")]


def local(model: Path) -> Path:
    """A directory or a file as it is; for the name of a model on the Hub its directory in the cache
    of huggingface_hub, downloaded first where it is not complete. CheckpointError if that fails.
    """
    if exists(model) or not _NAME.fullmatch(str(model)):
        return model
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError, HfHubHTTPError, LocalEntryNotFoundError

    which: dict[str, Any] = {"repo_id": str(model), "allow_patterns": [*_FILES, *_TOKENIZERS]}
    which["ignore_patterns"] = ["*/*"]  # the same weights in other forms
    try:
        with suppress(DryRunError):  # offline, what the cache has is taken
            files = snapshot_download(**which, dry_run=True)
            if size := sum(f.file_size for f in files if f.will_download):
                print(f"{model}: {amount(size, 'B')} to download", file=sys.stderr)
        return Path(snapshot_download(**which))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"no such directory, and not from the Hub: {in_one_line(error)}",
            expected="a directory, or the name of a model on the Hub",
            todo="huggingface.co has the names; hf auth login for a model that needs it",
            where=str(model),
        ) from error


def check_device(asked: str, where: str) -> None:
    """OptionError unless it is one, or "" for the best."""
    need_one_of("--device", asked or "cpu", ("cpu", "cuda"), where=where)


def device_of(asked: str, where: str) -> str:
    """A device, "" for the best. UnsupportedError for a GPU that is not there."""
    from ..env import has_cuda

    best = "cuda" if has_cuda() else "cpu"
    if asked == "cuda" != best:
        raise UnsupportedError(
            "no GPU that runs kernels", todo="fusion-moe doctor says why", where=where
        )
    return asked or best


@contextmanager
def a_model(path: Path, what: str = "a model of transformers") -> Iterator[None]:
    """What transformers raises while it reads one becomes an UnsupportedError."""
    try:
        yield
    except Error:
        raise
    except Exception as error:  # of a wrong configuration transformers and torch raise any kind
        actual = in_one_line(error)
        if not isinstance(error, (ValueError, OSError, ImportError)):
            actual = f"{type(error).__name__}: {actual}"
        todo = install("models") if "accelerate" in actual else ""
        raise UnsupportedError(actual, expected=what, todo=todo, where=str(path)) from error


def has_tokenizer(path: Path) -> bool:
    """Whether a directory has files of one; a file of GGUF has one inside."""
    return path.is_file() or any(each for name in _TOKENIZERS for each in path.glob(name))


def check_tokenizer(path: Path) -> None:
    """CheckpointError for a directory without one, in whose place transformers would make an empty
    one.
    """
    if not has_tokenizer(path):
        raise CheckpointError(
            "no tokenizer",
            expected="tokenizer.json, or another file of one",
            todo="copy it from the original model",
            where=str(path),
        )


def tokenizer_of(path: Path) -> Any:
    """The tokenizer of a directory, or of a file of GGUF. Raises as `check_tokenizer`."""
    check_tokenizer(path)
    from transformers import AutoTokenizer

    with a_model(path, "a tokenizer of transformers"):
        if path.suffix == GGUF:
            return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        return AutoTokenizer.from_pretrained(path)


@contextmanager
def quietly() -> Iterator[None]:
    """For work with transformers: it shows no progress of its own, and others no warnings.
    UnsupportedError where it is not installed.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # of torch's profiler, which logs its start
    try:
        from transformers.utils import logging as messages
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"{error.name} is not installed", todo=install("models")) from None
    loggers = [logging.getLogger(name) for name in _OTHERS]
    before, bars = [logger.level for logger in loggers], messages.is_progress_bar_enabled()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    messages.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=rf"({'|'.join(_OTHERS)})\b")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
        if bars:
            messages.enable_progress_bar()
