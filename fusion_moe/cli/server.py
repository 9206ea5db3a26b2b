"""transformers' server with bounds: on bodies, on what a request may say, and on how long one is
answered: to the end of the model's context, and only while its client is there.

transformers has no hooks for these: its classes of managers and its function that makes the
application are replaced in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import threading
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import typer
from fastapi import HTTPException
from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.cli.serve import Serve
from transformers.cli.serving import server, utils

import fusion_moe.transformers  # noqa: F401  (whose quantizers load the model)

from ..errors import Error, in_one_line
from ..integrations.transformers.decoding import check_ids, context_of
from .output import say
from .start import PROBLEMS, end

MOST = 16 * 2**20  # bytes of a request
_CONTEXT = 2**17  # tokens, of a model whose configuration does not say
_CHARACTERS = 16  # of a token, four times as many as usual: longer texts are not made into tokens
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
    # cuDNN's needs a plan for each count of tokens and keys, and torch drops none
    torch.backends.cuda.enable_cudnn_sdp(False)
    utils.GenerateManager, utils.CBGenerateManager = Sequential, Batched
    server.build_server = _guarded(server.build_server)
    utils.BaseHandler._resolve_model = _bounded(utils.BaseHandler._resolve_model)
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


# where a part of a message has what it is, by its type: a text, or an object with one
_PARTS = {
    **dict.fromkeys(("text", "input_text", "output_text"), ("text", "")),
    **dict.fromkeys(("image_url", "input_image"), ("image_url", "url")),
    "input_audio": ("input_audio", "data"),
    **{kind: (kind, "url") for kind in ("video_url", "audio_url")},
}
_MEDIA = {where for where, below in _PARTS.values() if below}


def _is_part(x: Any) -> bool:
    """Of a message; those of other types transformers leaves out without a word."""
    if not _has_text(x, "type") or x["type"] not in _PARTS:
        return False
    where, below = _PARTS[x["type"]]
    plain = x["type"] not in ("video_url", "audio_url")
    return (plain and _has_text(x, where)) or bool(below and _has_text(x.get(where), below))


def _is_content(x: Any) -> bool:
    """Of a message: nothing, a text, or parts."""
    return x is None or isinstance(x, str) or _is_list(x, _is_part)


def _is_call(x: Any) -> bool:
    """Of a tool: its arguments are an object, or the JSON of something."""
    function: Any = x.get("function") or x if _is_object(x) else None
    if not _is_object(function):
        return False
    arguments = function.get("arguments")
    return _is_object(arguments) or (isinstance(arguments, str) and _is_json(arguments))


def _is_json(x: str) -> bool:
    try:
        json.loads(x)
    except (ValueError, RecursionError):
        return False
    return True


def _is_message(x: Any) -> bool:
    calls = x.get("tool_calls") if _is_object(x) else None
    return (
        _has_text(x, "role")
        and _is_content(x.get("content"))
        and (calls is None or _is_list(calls, _is_call))
    )


def _is_item(x: Any) -> bool:
    """Of the input of /v1/responses: a message, or what a model was asked for or has said."""
    if not _is_object(x) or "role" in x:
        return _is_message(x)
    if x.get("type") == "function_call":
        return "call_id" in x and "name" in x and _is_call(x)
    if x.get("type") == "function_call_output":
        return "call_id" in x and _is_content(x.get("output"))
    if x.get("type") == "reasoning":
        return _is_list(x.get("content") or [], lambda part: _has_text(part, "text"))
    return _is_part(x)


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


# entries of a configuration that are numbers, which transformers takes as they come
_NUMBERS = (
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "num_beams"),
    *("num_return_sequences", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p"),
    *("epsilon_cutoff", "eta_cutoff", "repetition_penalty", "length_penalty", "guidance_scale"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty"),
    *("num_beam_groups", "diversity_penalty", "penalty_alpha", "prefill_chunk_size"),
    *("max_cache_len", "prompt_lookup_num_tokens", "max_matching_ngram_size"),
)


_IDS = ("eos_token_id", "pad_token_id", "bos_token_id", "suppress_tokens")


def _is_configuration(x: Any) -> bool:
    with contextlib.suppress(Exception):  # of wrong entries transformers raises any kind
        entries = {name: value for name, value in json.loads(x).items() if value is not None}
        numbers = [entries[name] for name in _NUMBERS if name in entries]
        for ids in (entries[name] for name in _IDS if name in entries):
            numbers += ids if isinstance(ids, list) else [ids]
        stop = entries.get("stop_strings")
        return (
            all(isinstance(n, (int, float)) for n in numbers)
            and (stop is None or _is_stop(stop))
            and bool(GenerationConfig(**entries))
        )
    return False


_COUNT = _is_count, "a whole number, at least 1"
# fields of requests: whether a value is right, and what would be
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (lambda x: isinstance(x, str), "the name of the model"),
    "prompt": (lambda x: isinstance(x, str) and bool(x), "a text that is not empty"),
    "messages": (
        lambda x: bool(x) and _is_list(x, _is_message),
        "a list of messages with role and content, at least one, in OpenAI's form",
    ),
    "input": (
        lambda x: bool(x) and (isinstance(x, str) or _is_list(x, _is_item)),
        "a text that is not empty, or a list of messages",
    ),
    "tools": (lambda x: _is_list(x, _is_object), "a list of objects"),
    "chat_template_kwargs": (_is_of_template, "an object of what the model's own template reads"),
    "instructions": (lambda x: isinstance(x, str), "a text"),
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
    "generation_config": (_is_configuration, "the JSON of what GenerationConfig takes, as a text"),
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
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": why, "type": kind, "code": status}
    return JSONResponse({"error": error}, status)


def _guarded(build: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' application, which refuses what transformers validates, and what a model's
    template does not take. Any other error is a fault of the server's, and uvicorn logs it.
    """

    def built(*args: Any, **kwargs: Any) -> Guard:
        app = build(*args, **kwargs)

        async def answer(request: Any, error: Exception) -> JSONResponse:
            if _of_request(error):
                return _refusal(400, in_one_line(error))
            what = f"{type(error).__name__}: {in_one_line(error)}"
            logging.getLogger("uvicorn.error").error("fusion-moe serve: %s", what, exc_info=error)
            return _refusal(500, f"{what}; the server's log says where")

        async def say_detail(request: Any, error: HTTPException) -> JSONResponse:
            return _refusal(error.status_code, str(error.detail))

        for kind in _KINDS:
            app.add_exception_handler(kind, answer)
        app.add_exception_handler(HTTPException, say_detail)
        return Guard(app)

    return built


_KINDS = (
    *(ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError, OSError),
    *(AssertionError, ImportError, TemplateError),
)


def _of_request(error: Exception) -> bool:
    """Whether an error is about what a client sent: transformers and tokenizers validate by
    ValueErrors, and what happens in a chat template follows from its messages.
    """
    frames = traceback.walk_tb(error.__traceback__)
    if any(frame.f_code.co_filename == "<template>" for frame, _ in frames):
        return True
    return isinstance(error, (ValueError, TemplateError)) and not isinstance(error, Error)


def _texts(x: Any) -> int:
    """Characters of all texts in a part of a request, but for images and sounds."""
    if isinstance(x, str):
        return len(x)
    if isinstance(x, list):
        return sum(map(_texts, x))
    return sum(_texts(v) for k, v in x.items() if k not in _MEDIA) if isinstance(x, dict) else 0


def _bounded(resolve: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' handlers ask for the model before they make tokens of a request, in the thread
    of all requests: of a text for which the context has no room that may take minutes.
    """

    def resolved(self: Any, body: Message) -> Any:
        result = resolve(self, body)
        given = sum(_texts(body.get(name)) for name in (*_NEEDED.values(), "tools", "instructions"))
        whole = context_of(result[1]) or _CONTEXT
        if given > whole * _CHARACTERS:
            expected = f"at most {whole * _CHARACTERS:,} for the model's {whole:,} tokens"
            raise HTTPException(413, f"a text of {given:,} characters; expected {expected}")
        return result

    return resolved


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
