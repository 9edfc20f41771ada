"""Runs one HTTP request in vLLM's application, and converts its response to chunks.

The application runs over ASGI in its own task and reads the engine's outputs through `outputs`. A
chunk is one output of the engine with all bytes that the application sends before it requests the
next output. So the tokens and the bytes that a router has received always belong together, and
another replica can continue after them. The application's task itself emits each chunk.
"""

import asyncio
import logging
import random
import secrets
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any

import msgspec
import numpy as np
from fastapi.dependencies.utils import request_body_to_args
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError as VllmDeadError

from kvroute.blocks.fingerprint import Feature
from kvroute.contract.generation import (
    NO_TOKENS,
    Chunk,
    Emit,
    EngineDeadError,
    GenerateRequest,
    client_id,
)
from kvroute.contract.http_call import HttpCall, HttpPart, Rendered
from kvroute.contract.preparation import prepared
from kvroute.replica.vllm_engine.blocks.cache_salt import cache_salt
from kvroute.replica.vllm_engine.blocks.retention_hints import hint_args
from kvroute.replica.vllm_engine.core.continued import can_continue, repeated, rest
from kvroute.replica.vllm_engine.core.priority import priority_of
from kvroute.replica.vllm_engine.grammar.check import GrammarCheck

log = logging.getLogger("kvroute.replica")

# Tokens in a chunk of a response without streaming. If the replica is lost, at most this many
# tokens have to be generated again.
WHOLE_TOKENS = 32
# Maximum number of log-probabilities of a prompt. The event loop computes all of them in one piece;
# each takes 6 us of CPU time.
MAX_PROMPT_LOGPROBS = 131_072
END_S = 5.0  # seconds for the application to end after the client has left; then it is cancelled
OURS = "kvroute_"  # prefix of the keys of extra_args that clients may not set
RESPONSES = "/v1/responses"
ERROR_EVENT = b"event: error"
STARTED = "response already started"  # part of the message of Starlette's RuntimeError

Message = Mapping[str, Any]  # a message of ASGI


class RequestRun:
    """One request; `lora` is vLLM's argument for its LoRA adapter."""

    def __init__(
        self, request: GenerateRequest, call: HttpCall, emit: Emit, lora: Any = None
    ) -> None:
        self.call = call
        self.random = random.Random(request.request_id)  # the same numbers on every replica
        self.request = request
        self.priority = priority_of(request)  # replaces a priority in the body
        self._lora = lora
        self._body: bytes | None = call.body  # None after it was read
        self._has_left = asyncio.Event()  # set when the client has left
        self._emit = emit
        self._failure: Exception | None = None
        self._token_ids: list[int] = []  # tokens that were generated since the last chunk
        self._data: list[bytes] = []  # bytes that were sent since the last chunk
        self._has_emitted = False  # True once a chunk was emitted
        self._status = 0  # status that the next chunk has to contain; 0: none
        self._content_type = ""
        self._prompts = 0  # number of prompts that the application passed to the engine
        self._can_continue = True
        self._counts: tuple[int, int] | None = None  # cached and written tokens of the prompt
        if call.deltas:
            self._counts = call.cached_tokens, call.written_tokens

    async def respond(self, app: Any) -> None:
        """Run the application. Cancelling this call aborts the request at the engine."""
        task = asyncio.create_task(self._run(app))
        try:
            await asyncio.wait([task])
        finally:
            await self._leave(task)
        if self._failure is not None:
            raise self._failure

    # The application's side of ASGI.

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._has_left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = int(message["status"])
            self._content_type = content_type(message)
        elif body := message.get("body"):
            if body.startswith(ERROR_EVENT):  # an event of /v1/messages, with Anthropic's type
                body = body.replace(b'"type":"internal_error"', b'"type":"api_error"')
            self._data.append(body)

    async def _run(self, app: Any) -> None:
        CURRENT.set(self)
        try:
            headers = {"x-request-id": client_id(self.request.request_id)}
            headers |= self.request.trace or {}
            await app(scope(self.call.path, headers), self.receive, self.send)
            self._put(is_last=True)
        except Exception as error:  # the application can raise any exception
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """End with an error response if the client has received nothing; else fail with `error`."""
        if self._failure is not None or self._has_emitted or self.call.deltas:
            self._failure = self._failure or error
            return
        log.warning("vLLM's application failed for %s", self.call.path, exc_info=error)
        is_body = _is_of_validation(error)
        if is_body or self._status < 400:  # else the application itself has made an error response
            message = f"a field of the body has a value of a wrong type: {error}"
            response = create_error_response(message if is_body else _unwrapped(error))
            self._status, self._content_type = response.error.code, "application/json"
            self._data = [response.model_dump_json().encode()]
        self._put(is_last=True)

    async def _leave(self, task: "asyncio.Task[None]") -> None:
        """Report to vLLM's handlers that the client has left, so that they abort the request."""
        self._has_left.set()
        while not task.done():
            await asyncio.wait([task], timeout=END_S)
            task.cancel()

    def _put(self, *, is_last: bool = False) -> None:
        """Emit a chunk with all tokens and bytes since the last one, unless the client has left."""
        if self._failure is not None or self._has_left.is_set():
            return
        tokens, data = tuple(self._token_ids), b"".join(self._data)
        cached_tokens, written_tokens = self._counts or (0, 0)
        part = HttpPart(
            data,
            self._status,
            self._content_type,
            (len(tokens),) if tokens else (),
            written_tokens,
            self._can_continue,
        )
        self._token_ids, self._data, self._status, self._has_emitted = [], [], 0, True
        self._emit(Chunk(tokens, cached_tokens, is_last, part))

    # The engine's side for vLLM's handlers.

    def outputs(
        self,
        llm: AsyncLLM,
        grammars: GrammarCheck,
        prompt: Any,
        params: SamplingParams,
        options: Mapping[str, Any],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Replace AsyncLLM.generate."""
        self._prompts += 1
        is_whole = params.output_kind is RequestOutputKind.FINAL_ONLY
        has_ids = prompt["type"] in ("token", "multimodal")
        # The end of a response of /v1/responses contains the log-probabilities of all its tokens.
        repeats_logprobs = self.call.path == RESPONSES and params.logprobs is not None
        is_kept = not repeats_logprobs and can_continue(params)
        self._can_continue = self._prompts == 1 and has_ids and is_kept
        deltas = _delta_params(params, hint_args(self.request))
        if is_whole:
            deltas.stream_interval = WHOLE_TOKENS
        outputs = self._outputs(llm, grammars, self.salted(prompt), deltas, options)
        return _whole(outputs) if is_whole else outputs

    def salted(self, prompt: Any) -> Any:
        """Return the prompt with the router's salt, which replaces a salt in the body."""
        salt = cache_salt(self.request)
        return {**prompt, "cache_salt": salt} if salt else prompt

    async def _outputs(
        self,
        llm: AsyncLLM,
        grammars: GrammarCheck,
        prompt: Any,
        params: SamplingParams,
        options: Mapping[str, Any],
    ) -> AsyncGenerator[RequestOutput, None]:
        prepared()  # the preparation ends here, because another process checks the grammar
        await grammars.check(params)
        id_ = f"{self.request.request_id}-{self._prompts}"
        ids = prompt["prompt_token_ids"]
        _check_prompt_logprobs(params, len(ids or ()))
        if self.call.deltas and self._prompts == 1:
            answered = self.request.answered_ids.tolist()
            tokenizer = llm.get_tokenizer()
            for output in repeated(answered, self.call.deltas, prompt, params, id_, tokenizer):
                yield self._counted(output)
            self._data, self._status = [], 0  # the client has received these bytes already
            # Offsets of images stay valid, because all images are in the prompt.
            prompt = {**prompt, "prompt_token_ids": [*ids, *answered]}
            params = rest(params, answered)
        ours = {
            "lora_request": self._lora,
            "data_parallel_rank": self.request.rank,
            "priority": self.priority,
        }
        prompt_logprobs = None  # log-probabilities of the prompt's tokens, once there are any
        outputs = llm.generate(prompt, params, id_, **{**options, **ours})
        async with self.reporting_a_dead_engine(), aclosing(outputs):
            with _outside():
                output = await anext(outputs, None)
            while output is not None:
                output.prompt_token_ids = ids
                _check_tokens_fit_grammar(output, params)
                if params.n > 1:
                    # With `echo`, each choice begins with the prompt's log-probabilities. But if
                    # vLLM merges a choice's first output into a later output of another choice, it
                    # loses them.
                    prompt_logprobs = output.prompt_logprobs or prompt_logprobs
                    output.prompt_logprobs = prompt_logprobs
                for choice in output.outputs:
                    self._token_ids += choice.token_ids
                yield self._counted(output)
                if not output.finished:  # the last tokens are in one chunk with the response's end
                    self._put()
                output = await anext(outputs, None)

    @asynccontextmanager
    async def reporting_a_dead_engine(self) -> AsyncIterator[None]:
        """Report the engine's death to the router, which continues at another replica.

        Otherwise the application would answer with an error.
        """
        try:
            yield
        except VllmDeadError as error:
            self._failure = EngineDeadError(str(error))
            raise

    def _counted(self, output: RequestOutput) -> RequestOutput:
        """Return the output with the numbers of cached tokens from the request's first replica."""
        if self._counts is None:
            self._counts = output.num_cached_tokens or 0, output.num_cache_creation_tokens or 0
        output.num_cached_tokens, output.num_cache_creation_tokens = self._counts
        return output


class Rendering(RequestRun):
    """A request that only renders prompts: the application is stopped when it calls the engine."""

    def __init__(self, call: HttpCall) -> None:
        request, self._chunks = GenerateRequest("render-0", NO_TOKENS), list[Chunk]()
        call = msgspec.structs.replace(call, is_rendered=False)
        super().__init__(request, call, self._chunks.append)
        self.prompts: Sequence[Any] = ()  # all prompts of a completion, once vLLM rendered them
        self._first: Any = None  # the first prompt that the application passed to the engine

    async def rendered(self, app: Any) -> Rendered:
        """Run the application until it calls the engine; return the prompts, or its error."""
        await self.respond(app)
        if self._first is None:
            return Rendered(refusal=self._chunks[-1].http)
        first, *more = map(rendered_of, self.prompts or [self._first])
        return msgspec.structs.replace(first, more=tuple(more))

    async def outputs(
        self,
        llm: AsyncLLM,
        grammars: GrammarCheck,
        prompt: Any,
        params: SamplingParams,
        options: Mapping[str, Any],
    ) -> AsyncGenerator[RequestOutput, None]:
        self._first = prompt
        raise asyncio.CancelledError  # no error handler catches this
        yield  # makes this method a generator


def rendered_of(prompt: Mapping[str, Any]) -> Rendered:
    """Return the parts of one of vLLM's prompts that a router needs."""
    if prompt["type"] == "embeds":
        ids = [0] * len(prompt["prompt_embeds"])
        # A random feature, so that the prompt's fingerprints match no other prompt.
        features = [Feature(secrets.token_hex(16), 0, len(ids))]
    else:
        ids, features = prompt["prompt_token_ids"], _features(prompt)
    packed = np.array(ids, "<u4").tobytes()
    return Rendered(packed, is_text=prompt["type"] == "token", features=tuple(features))


def _features(prompt: Mapping[str, Any]) -> list[Feature]:
    if prompt["type"] != "multimodal":
        return []
    features = [
        Feature(identifier, place.offset, place.length)
        for modality, places in prompt["mm_placeholders"].items()
        for identifier, place in zip(prompt["mm_hashes"][modality], places, strict=True)
    ]
    return sorted(features, key=lambda feature: feature.offset)


def _unwrapped(error: Exception) -> Exception:
    """Return the original of an error that Starlette wrapped: the response had begun before it."""
    cause, is_wrapper = error.__cause__, STARTED in str(error)
    return cause if is_wrapper and isinstance(cause, Exception) else error


def _is_of_validation(error: Exception) -> bool:
    """Return whether the error was raised during the validation of the body.

    Some of vLLM's validators expect an object or a list, and raise an error for any other value.
    """
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code is request_body_to_args.__code__ for frame, _ in frames)


# The request of the running task; None outside the application.
CURRENT: ContextVar[RequestRun | None] = ContextVar("CURRENT", default=None)


def scope(path: str, headers: Mapping[str, str]) -> dict[str, Any]:
    """Return the ASGI scope of a POST request with a JSON body."""
    all_headers = {"content-type": "application/json", **headers}
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in all_headers.items()],
        "client": None,
        "server": None,
        "state": {},
    }


def content_type(message: Message) -> str:
    """Return the content type in a message http.response.start."""
    for name, value in message["headers"]:
        if name.lower() == b"content-type":
            return str(value, "latin-1")
    return ""


@contextmanager
def _outside() -> Iterator[None]:
    """Run code outside the request: the engine's own random ids must not use the request's."""
    token = CURRENT.set(None)
    try:
        yield
    finally:
        CURRENT.reset(token)


def _check_prompt_logprobs(params: SamplingParams, tokens: int) -> None:
    if params.prompt_logprobs is None:
        return
    values = tokens * (params.prompt_logprobs + 1)
    if values > MAX_PROMPT_LOGPROBS:
        raise VLLMValidationError(
            f"this request needs {values} log-probabilities of the prompt: prompt_logprobs (with "
            f"echo: logprobs) plus one, times {tokens} tokens. The limit is "
            f"{MAX_PROMPT_LOGPROBS}; lower prompt_logprobs, or send a shorter prompt",
            parameter="prompt_logprobs",
        )


def _check_tokens_fit_grammar(output: RequestOutput, params: SamplingParams) -> None:
    """Reject a request whose limits on tokens exclude all tokens that its grammar allows.

    The engine ends such a request with an error that names no cause.
    """
    limits = {
        "allowed_token_ids": params.allowed_token_ids,
        "bad_words": params.bad_words,
        "logit_bias": params.logit_bias,
    }
    given = [name for name, value in limits.items() if value]
    if not given or params.structured_outputs is None:
        return
    if any(choice.finish_reason == "error" for choice in output.outputs):
        raise VLLMValidationError(
            f"{' and '.join(given)}: the allowed tokens do not fit the schema or grammar of the "
            "answer; allow more tokens, or leave one of these fields out",
            parameter=given[0],
        )


def _delta_params(params: SamplingParams, ours: Mapping[str, Any]) -> SamplingParams:
    """Return a copy of the parameters for streaming; `ours` replaces kvroute's own extra_args."""
    params = params.clone()
    params.output_kind = RequestOutputKind.DELTA
    extra_args = params.extra_args or {}
    theirs = {key: value for key, value in extra_args.items() if not key.startswith(OURS)}
    params.extra_args = {**theirs, **ours} or None
    return params


async def _whole(
    outputs: AsyncGenerator[RequestOutput, None],
) -> AsyncGenerator[RequestOutput, None]:
    """Yield all outputs as one output, like vLLM does with FINAL_ONLY."""
    whole: RequestOutput | None = None
    async with aclosing(outputs):
        async for output in outputs:
            if whole is None:
                whole = output
            else:
                whole.add(output, aggregate=True)
    if whole is not None:
        whole.outputs.sort(key=lambda choice: choice.index)
        yield whole
