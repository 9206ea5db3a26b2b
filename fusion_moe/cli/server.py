"""transformers' server with bounds: on bodies, on what a request may say, and on how long one is
answered: to the end of the model's context, and only while its client is there.

transformers has no hooks for these: its classes of managers and its function that makes the
application are replaced in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import typer
from fastapi import HTTPException
from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.cli.serve import Serve
from transformers.cli.serving import server, utils

import fusion_moe.transformers  # noqa: F401  (whose quantizers load the model)

from ..errors import Error, in_one_line
from ..integrations.transformers.decoding import check_ids, context_of
from .output import say
from .start import PROBLEMS, end

MOST = 16 * 2**20  # bytes of a request
_CONTEXT = 2**17  # tokens, of a model whose configuration does not say
_BEAMS = 8
_OF_TOKENIZER = {
    *("conversation", "chat_template", "tokenize", "padding", "truncation", "max_length"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
}
_GRACE = 1.0  # seconds for answers that have begun, when the server is stopped
_FIXED = ("/load_model", "/reset")  # for a server of several models

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def serve(directory: Path, options: list[str]) -> NoReturn:
    """Serves until SIGINT or SIGTERM comes, and ends the process. options: of `transformers
    serve`.
    """
    utils.GenerateManager, utils.CBGenerateManager = Sequential, Batched
    server.build_server = _guarded(server.build_server)
    name = f"{directory.parent}:{directory.name}" if directory.is_file() else str(directory)
    command = typer.Typer()
    command.command()(Serve)
    context = typer.main.get_command(command).make_context("fusion-moe serve", [name, *options])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)  # while the model is loaded
    serving = Serve(**{**context.params, "non_blocking": True})
    stopped = list[int]()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda which, _: stopped.append(which))
    while serving._thread.is_alive() and not stopped:
        serving._thread.join(0.2)
    serving.server.should_exit = True
    serving._thread.join(_GRACE)
    if stopped:
        say("stopped")
    os._exit(128 + stopped[0] if stopped else PROBLEMS)


# Requests -----------------------------------------------------------------------------------------


def _is_count(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x > 0


def _within(low: float, high: float) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, (int, float)) and not isinstance(x, bool) and low <= x <= high


def _is_stop(x: Any) -> bool:
    """Few and short texts: each is compared with the whole vocabulary before a token is made."""
    texts = x if isinstance(x, list) else [x]
    return 0 < len(texts) <= 16 and all(isinstance(t, str) and 0 < len(t) <= 256 for t in texts)


def _is_content(x: Any) -> bool:
    """Of a message: nothing, a text, or parts of some types."""
    return x is None or isinstance(x, str) or _is_list(x, lambda part: _has_text(part, "type"))


def _is_message(x: Any) -> bool:
    return _has_text(x, "role") and _is_content(x.get("content"))


def _is_list(x: Any, of: Callable[[Any], bool]) -> bool:
    return isinstance(x, list) and all(map(of, x))


def _has_text(x: Any, name: str) -> bool:
    return isinstance(x, dict) and isinstance(x.get(name), str)


def _is_object(x: Any) -> bool:
    return isinstance(x, dict)


def _is_of_template(x: Any) -> bool:
    """Not arguments of the function that fills in the template, nor another template: a client's
    may loop for ever.
    """
    return _is_object(x) and not x.keys() & _OF_TOKENIZER


def _is_configuration(x: Any) -> bool:
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        return isinstance(json.loads(x), dict)
    return False


_COUNT = _is_count, "a whole number, at least 1"
# fields of requests: whether a value is right, and what would be
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (lambda x: isinstance(x, str), "the name of the model"),
    "prompt": (lambda x: isinstance(x, str) and bool(x), "a text that is not empty"),
    "messages": (
        lambda x: bool(x) and _is_list(x, _is_message),
        "a list of messages with role and content, at least one",
    ),
    "input": (
        lambda x: bool(x) and (isinstance(x, str) or _is_list(x, _is_object)),
        "a text that is not empty, or a list of messages",
    ),
    "tools": (lambda x: _is_list(x, _is_object), "a list of objects"),
    "chat_template_kwargs": (_is_of_template, "an object of what the model's own template reads"),
    "max_tokens": _COUNT,
    "max_completion_tokens": _COUNT,
    "max_output_tokens": _COUNT,
    "n": (lambda x: x == 1, "1"),
    # what transformers leaves out of an answer without a word
    "best_of": (lambda x: x == 1, "1"),
    "echo": (lambda x: x is False, "false"),
    "logprobs": (lambda x: x is False, "none: answers have no log-probabilities"),
    "top_logprobs": (lambda x: x == 0, "none: answers have no log-probabilities"),
    "presence_penalty": (lambda x: x == 0, "0"),
    "response_format": (lambda x: x == {"type": "text"}, 'none, or {"type": "text"}'),
    "tool_choice": (lambda x: x in ("auto", "none"), '"auto" or "none"'),
    "functions": (lambda x: x == [], "none: pass tools"),
    "temperature": (_within(0, 100), "a number from 0 to 100"),
    "top_p": (_within(1e-6, 1), "a number above 0, at most 1"),
    "frequency_penalty": (_within(-0.99, 2), "a number above -1, at most 2"),
    "seed": (lambda x: x == 0 or (_is_count(x) and x < 2**63), "a whole number from 0 to 2^63 - 1"),
    "stream": (lambda x: isinstance(x, bool), "true or false"),
    "stop": (_is_stop, "a text of at most 256 characters, or a list of at most 16"),
    "suffix": (lambda x: isinstance(x, str), "a text"),
    "generation_config": (_is_configuration, "a text, the JSON of an object"),
}
_BIAS = {"logit_bias": (lambda x: x == {}, "none: /v1/chat/completions takes it")}
# paths that generate, and what their requests cannot do without
_NEEDED = {
    "/v1/completions": "prompt",
    "/v1/chat/completions": "messages",
    "/v1/responses": "input",
}


def fault(path: str, body: bytes) -> str:
    """What is wrong with a request, "" if nothing is."""
    try:
        asked = json.loads(body)
        json.dumps(asked, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return f"the body has text that is not Unicode: {error}"
    except (ValueError, RecursionError) as error:
        return f"the body is not JSON: {error}"
    if not isinstance(asked, dict):
        return f"the body is a {type(asked).__name__}; expected an object"
    needed = _NEEDED[path]
    if asked.get(needed) is None:
        return f"no {needed}; expected {_FIELDS[needed][1]}"
    for name, (is_right, expected) in (_FIELDS | (_BIAS if needed == "prompt" else {})).items():
        if (value := asked.get(name)) is not None and not is_right(value):
            shown = json.dumps(value)
            shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
            return f"{name} = {shown}; expected {expected}"
    return ""


class Guard:
    """An ASGI application around another one. Requests that are wrong or too large do not reach
    it, and it is cancelled when a client leaves.
    """

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path, why, status = scope["path"].rstrip("/"), "", 400
        body = await _body(receive)
        if path in _FIXED:
            why, status = "this server has one model, which stays", 403
        elif body is None:
            why, status = f"a body of more than {MOST:,} bytes", 413
        elif path in _NEEDED and scope["method"] == "POST":
            why = fault(path, body)
        if why:
            await _refusal(status, why)(scope, receive, send)
        else:
            await self._while_there(scope, body or b"", receive, send)

    async def _while_there(self, scope: Message, body: bytes, receive: Receive, send: Send) -> None:
        """Runs the application until it has answered, or the client has left."""
        gone, sent = asyncio.Event(), False

        async def replayed() -> Message:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def leaving() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        answer = asyncio.ensure_future(self.app(scope, replayed, send))
        left = asyncio.ensure_future(leaving())
        try:
            await asyncio.wait({answer, left}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.set()
            left.cancel()
            if not answer.done():
                answer.cancel()
        try:
            await answer
        except asyncio.CancelledError:
            if not left.done() or left.cancelled():  # not by the client
                raise


async def _body(receive: Receive) -> bytes | None:
    """A request's body; None for one that is too large, whose rest is not read."""
    parts, size, more = list[bytes](), 0, True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        more = message.get("more_body", False)
        if size > MOST:
            return None
    return b"".join(parts)


def _refusal(status: int, why: str) -> JSONResponse:
    """In OpenAI's form."""
    error = {"message": why, "type": "invalid_request_error", "code": status}
    return JSONResponse({"error": error}, status)


def _guarded(build: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' application, which refuses what raises an error of `_OF_REQUESTS`: a request
    that the model does not take.
    """

    def built(*args: Any, **kwargs: Any) -> Guard:
        app = build(*args, **kwargs)

        async def refuse(request: Any, error: Exception) -> JSONResponse:
            speaks = isinstance(error, (ValueError, TemplateError))
            kind = "" if speaks else f"the request leads to a {type(error).__name__}: "
            return _refusal(400, f"{kind}{in_one_line(error)}")

        async def say_detail(request: Any, error: HTTPException) -> JSONResponse:
            return _refusal(error.status_code, str(error.detail))

        for kind in _OF_REQUESTS:
            app.add_exception_handler(kind, refuse)
        app.add_exception_handler(HTTPException, say_detail)
        return Guard(app)

    return built


# what tokenizers, chat templates and transformers' handlers raise of what they did not expect
_OF_REQUESTS = (
    *(ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError),
    TemplateError,
)


# Generation ---------------------------------------------------------------------------------------


class Bounded:
    """A manager of transformers that generates within the model's context."""

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, **how: Any
    ) -> Any:
        """As in transformers."""
        bound(model, inputs["input_ids"], gen_config)
        return super().generate_streaming(  # type: ignore[misc]
            model, processor, inputs, gen_config, **how
        )

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, **how: Any
    ) -> Any:
        """As in transformers."""
        bound(model, inputs["input_ids"], gen_config)
        return await super().generate_non_streaming(  # type: ignore[misc]
            model, processor, inputs, gen_config, **how
        )


def bound(model: Any, ids: Any, config: Any) -> None:
    """Bounds the tokens that a generation's configuration allows. ids: i64[1, P], or a list of P.
    HTTPException 400 for a prompt that leaves no room, or has ids that the model does not know.
    """
    ids = torch.as_tensor(ids)
    whole = context_of(model) or _CONTEXT
    room = whole - ids.shape[-1]
    if room < 1:
        why = f"a prompt of {ids.shape[-1]:,} tokens"
        raise HTTPException(400, f"{why}; expected 1 to {whole - 1:,}, the model's context")
    try:
        check_ids(model, ids)
    except Error as error:
        raise HTTPException(400, str(error)) from None
    if (config.num_beams or 1) > _BEAMS or (config.num_return_sequences or 1) > 1:
        raise HTTPException(400, f"expected at most {_BEAMS} beams, and one sequence")
    config.max_new_tokens = min(config.max_new_tokens or room, room)


class Batched(Bounded, utils.CBGenerateManager):
    """Requests that are generated together, several in a step."""


class Sequential(Bounded, utils.GenerateManager):
    """One request after another; one whose client has left ends before its next token."""

    async def generate_non_streaming(self, model: Any, *args: Any, **how: Any) -> Any:
        """As in transformers."""
        left = threading.Event()
        running = super().generate_non_streaming(_Leavable(model, left), *args, **how)
        task = asyncio.ensure_future(running)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            left.set()
            raise


class _Leavable:
    """A model whose generation ends once an event is set."""

    def __init__(self, model: Any, left: threading.Event):
        self._model, self._left = model, _Left(left)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, **how: Any) -> Any:
        """As in transformers."""
        self._left.check()
        return self._model.generate(stopping_criteria=StoppingCriteriaList([self._left]), **how)


class _Left(StoppingCriteria):
    def __init__(self, left: threading.Event):
        self._event = left

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.check()
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    def check(self) -> None:
        """Raises what ends a generation of transformers' server."""
        if self._event.is_set():
            raise utils._GenerationCancelled
