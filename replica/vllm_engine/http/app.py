"""vLLM's own HTTP application on a replica's engine, without a port.

All routes have vLLM's formats, validation, defaults and errors. If the router has rendered the
prompt, it sends the token ids, and the application uses these instead of rendering the prompt. No
argument of vLLM's handlers can carry them, so they travel in the context of the request's task:

    RequestRun.respond         sets CURRENT to this request, which has the prompt's token ids
        | ASGI: path and body
    vLLM's handler             parses and validates the body
        | render_chat_async, render_cmpl_async
    RouterPrompts              returns a prompt with the token ids of CURRENT
        |
    vLLM's handler             makes the sampling parameters
        | generate(prompt, parameters)
    _Client                    stands in for AsyncLLM, and calls CURRENT.outputs
        |
    RequestRun.outputs         runs the real AsyncLLM.generate, and notes the new tokens
        | output
    vLLM's handler             makes the bytes of the response from it
        | ASGI: status and bytes
    RequestRun.send            collects the bytes; tokens and bytes go to the router together

This module uses private API of vLLM. tests/slow/engines/test_http_app.py checks the behaviour that
it relies on.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.inputs import TokensPrompt
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.reasoning import ReasoningParserManager
from vllm.renderers.hf import (
    HfRenderer,
    resolve_chat_template_content_format,
)
from vllm.sampling_params import SamplingParams
from vllm.tool_parsers import ToolParserManager
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM

from kvroute.contract.generation import Emit, GenerateRequest
from kvroute.contract.http_call import HttpCall, Rendered
from kvroute.replica.vllm_engine.blocks.cache_salt import cache_salt
from kvroute.replica.vllm_engine.compat import (
    load_chat_template,
    make_arg_parser,
    validate_parsed_serve_args,
)
from kvroute.replica.vllm_engine.core.lora import RankAdapters
from kvroute.replica.vllm_engine.core.rank_core import AtRank
from kvroute.replica.vllm_engine.grammar.check import GrammarCheck
from kvroute.replica.vllm_engine.http import (
    fail_fast,
    forced_calls,
    inline_system,
    media,
    missing_parser,
    option_names,
)
from kvroute.replica.vllm_engine.http.chosen_parsers import chosen_tool_parser
from kvroute.replica.vllm_engine.http.request_run import CURRENT, Rendering, RequestRun
from kvroute.replica.vllm_engine.http.requested_adapters import RequestedAdapters
from kvroute.replica.vllm_engine.replaced import IN_APPLICATION, apply

log = logging.getLogger("kvroute.replica")

# Example values of a chat's tools: no tools, and one tool. The content format is determined for
# both.
NO_AND_SOME_TOOLS: tuple[list[Any] | None, ...] = (None, [{}])
# Prefixes of names of loggers. In the messages of these loggers, tracebacks become one line.
HANDLERS = ("vllm.entrypoints", "vllm.parser", "vllm.reasoning", "vllm.tool_parsers")
MAX_LOGGED = 300  # maximum number of characters of a shortened traceback
# Defaults of vLLM's server that kvroute changes: responses contain the number of cached tokens.
DEFAULTS = {"enable_prompt_tokens_details": True}


class HttpApp:
    """Answers requests with vLLM's application."""

    def __init__(
        self,
        app: Any,
        router_prompts: "RouterPrompts",
        adapters: Sequence[RankAdapters],
        *,
        content_format: str,
        tool_parser: str,
        grammars: GrammarCheck,
    ) -> None:
        self.content_format = content_format  # for EngineFacts
        self.tool_parser = tool_parser  # for EngineFacts
        self._router_prompts = router_prompts
        self._app = app
        self._adapters = adapters  # one item for each rank
        self._grammars = grammars

    @classmethod
    async def start(
        cls,
        llm: AsyncLLM,
        front_args: Mapping[str, Any],
        adapters: Sequence[RankAdapters],
        *,
        max_compile_s: float,
        merges_system: bool = False,
    ) -> "HttpApp":
        """Build vLLM's application.

        Args:
            llm: The engine's client.
            front_args: Arguments of vLLM's server, by name.
            adapters: The adapters of each rank.
            max_compile_s: The limit of CPU seconds to compile a grammar.
            merges_system: Whether vLLM moves system messages in the middle of a conversation of
                /v1/messages to the front. False: inline_system.py keeps them in place.
        """
        apply(IN_APPLICATION)
        media.process_once(llm.renderer)
        _shorten_logs()
        router_prompts = RouterPrompts(llm.renderer)
        args = await asyncio.to_thread(_arguments, llm, front_args)
        grammars = GrammarCheck(llm.vllm_config, max_compile_s)
        client: Any = _Client(llm, adapters, grammars)
        tasks = await llm.get_supported_tasks()
        media.check_decoders(tasks)
        with _root_logger_kept():
            app = await asyncio.to_thread(build_app, args, tasks, client.model_config)
        fail_fast.install(app)
        await init_app_state(client, app.state, args, tasks)
        missing_parser.install(app, args.tool_call_parser)
        if messages := getattr(app.state, "anthropic_serving_messages", None):
            inline_system.install(messages, merges=merges_system)
            forced_calls.install(messages)
            # vLLM renders an example prompt to compute this value, and keeps the value. During a
            # request with token ids from the router, the renderer would return these ids instead.
            await messages._get_disabled_thinking_effort()
        # The router has its own middlewares. Here, a middleware that buffers the response would
        # separate its bytes from the tokens that they belong to.
        app.user_middleware.clear()
        app.middleware_stack = app.build_middleware_stack()
        models = app.state.openai_serving_models
        models.lora_requests = RequestedAdapters(args.served_model_name[0])
        for name, adapter in adapters[0].lora_requests.items():
            models.lora_requests[name] = adapter
            models.lora_requests[f"{args.served_model_name[0]}:{name}"] = adapter
        return cls(
            app,
            router_prompts,
            adapters,
            content_format=_content_format(llm, args),
            tool_parser=args.tool_call_parser or "",
            grammars=grammars,
        )

    async def respond(self, request: GenerateRequest, emit: Emit) -> None:
        """Emit the response to a request with a `call`.

        Raises:
            ValueError: The LoRA adapter is unknown or cannot be loaded.
            EngineDeadError: The engine has died.
        """
        assert request.call is not None
        lora = await self._adapters[request.rank].ready(request.variant)
        run = RequestRun(request, request.call, emit, lora)
        await run.respond(self._app)

    def close(self) -> None:
        """End the process that compiles grammars."""
        self._grammars.close()

    def rendering_differences(self, rank: int) -> int:
        """Return the number of the rank's prompts that a router has rendered unlike vLLM."""
        return self._router_prompts.differences[rank]

    async def render(self, call: HttpCall) -> Rendered:
        """Return the prompts of an HTTP request. The engine does not run the request."""
        return await Rendering(call).rendered(self._app)


class _Client:
    """Replaces AsyncLLM in vLLM's handlers of requests."""

    def __init__(
        self, llm: AsyncLLM, adapters: Sequence[RankAdapters], grammars: GrammarCheck
    ) -> None:
        self._llm = llm
        self._adapters = adapters
        self._grammars = grammars

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Return the class of vLLM's client, because some of vLLM's handlers check it."""
        return type(self._llm)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        run = CURRENT.get()
        assert run is not None, "only HTTP requests call this"
        return run.outputs(self._llm, self._grammars, prompt, sampling_params, options)

    async def encode(
        self, prompt: Any, *args: Any, lora_request: LoRARequest | None = None, **options: Any
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """Yield the embeddings, scores or classes of a prompt."""
        run = CURRENT.get()
        assert run is not None, "only HTTP requests call this"
        rank = run.request.rank
        asked = run.request.variant or (lora_request.lora_name if lora_request else "")
        lora = await self._adapters[rank].ready(asked)
        at_rank = AtRank(self._llm, rank)
        options |= {"lora_request": lora, "priority": run.priority}
        outputs = AsyncLLM.encode(at_rank, run.salted(prompt), *args, **options)
        async with run.reporting_a_dead_engine(), aclosing(outputs):
            async for output in outputs:
                yield output


class RouterPrompts:
    """Makes vLLM's renderer return the token ids that the router has rendered.

    This replaces two methods of the renderer. The renderer itself is not replaced, because vLLM
    checks its class, for example to find the chat template.
    """

    def __init__(self, renderer: Any) -> None:
        # Rank -> number of prompts that a router has rendered unlike vLLM.
        self.differences = Counter[int]()
        self._renderer = renderer
        self._render_chat = renderer.render_chat_async
        self._render_completion = renderer.render_cmpl_async
        renderer.render_chat_async = self.chat
        renderer.render_cmpl_async = self.completion

    async def chat(
        self, conversations: Any, chat_params: Any, tok_params: Any = None, **options: Any
    ) -> Any:
        """Replace the renderer's render_chat_async."""
        run = _run_with_tokens()
        if run is None:
            return await self._render_chat(conversations, chat_params, tok_params, **options)
        prompt = await self._prompt(run, tok_params or self._renderer.default_chat_tok_params)
        if run.call.is_checked:
            rendered = await self._render_chat(conversations, chat_params, tok_params, **options)
            prompt = self._compared(prompt, rendered[1][0], run)
        # After this, vLLM reads only the last message of the conversation, and only for `echo`.
        last_messages = [
            [_with_text(message) for message in conversation[-1:]] for conversation in conversations
        ]
        return last_messages, [prompt]

    async def completion(
        self, prompts: Sequence[Any], tok_params: Any = None, **options: Any
    ) -> Any:
        """Replace the renderer's render_cmpl_async."""
        run = _run_with_tokens()
        if run is None:
            rendered = await self._render_completion(prompts, tok_params, **options)
            if isinstance(current := CURRENT.get(), Rendering):
                current.prompts = rendered
            return rendered
        prompt = await self._prompt(run, tok_params or self._renderer.default_cmpl_tok_params)
        if run.call.is_checked:
            (rendered,) = await self._render_completion(prompts, tok_params, **options)
            prompt = self._compared(prompt, rendered, run)
        return [prompt]

    def _compared(self, routed: Any, rendered: Any, run: RequestRun) -> Any:
        """Return the router's prompt if vLLM's is equal; else count this, and return vLLM's."""
        if routed["prompt_token_ids"] == rendered["prompt_token_ids"]:
            return routed
        self.differences[run.request.rank] += 1
        log.error(
            "the router's tokens of request %s differ from vLLM's: %d tokens in the router, %d in "
            "vLLM; vLLM's tokens are used",
            run.request.request_id,
            len(routed["prompt_token_ids"]),
            len(rendered["prompt_token_ids"]),
        )
        return {**rendered, "cache_salt": routed.get("cache_salt")}

    async def _prompt(self, run: RequestRun, tok_params: Any) -> Any:
        """Return vLLM's prompt for the token ids from the router.

        The renderer still checks the length and truncates the prompt. It also decodes the tokens if
        the response needs the prompt's text.
        """
        tokens = TokensPrompt(prompt_token_ids=run.request.prompt_ids.tolist())
        made = await self._renderer.tokenize_prompt_async(tokens, tok_params)
        salt = cache_salt(run.request)
        prompt: Any = tokens_input(
            made["prompt_token_ids"], prompt=made.get("prompt"), cache_salt=salt
        )
        prompt["arrival_time"] = time.time()
        return prompt


def _with_text(message: Any) -> Any:
    """Return the message with its content as one text, because vLLM's handlers expect a text."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    texts = [part.get("text") for part in content if isinstance(part, dict)]
    return {**message, "content": "\n".join(text for text in texts if isinstance(text, str))}


def _content_format(llm: AsyncLLM, args: Any) -> str:
    """Return how the chat template expects the content of messages: "string" or "openai".

    The result is empty in these cases: there is no chat template, vLLM renders chats without it, or
    the formats for chats with and without tools differ.
    """
    is_harmony = llm.model_config.hf_config.model_type == "gpt_oss"
    if is_harmony or not isinstance(llm.renderer, HfRenderer):
        return ""
    formats = {
        resolve_chat_template_content_format(
            load_chat_template(args.chat_template),
            tools,
            args.chat_template_content_format,
            llm.get_tokenizer(),
            model_config=llm.model_config,
        )
        for tools in NO_AND_SOME_TOOLS
    }
    return formats.pop() if len(formats) == 1 else ""


@contextmanager
def _root_logger_kept() -> Iterator[None]:
    """Restore the root logger at the end. vLLM's application imports a package that changes it."""
    root = logging.getLogger()
    level, handlers = root.level, [*root.handlers]
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


def _shorten_logs() -> None:
    """Shorten tracebacks to one line where vLLM's handlers log the errors of clients."""
    for handler in logging.getLogger("vllm").handlers:
        handler.addFilter(_short)


def _short(record: logging.LogRecord) -> bool:
    if record.name.startswith(HANDLERS) and record.exc_info:
        record.msg, record.args = f"{record.getMessage()}: {record.exc_info[1]!r}"[:MAX_LOGGED], ()
        record.exc_info = record.exc_text = None
    return True


def _run_with_tokens() -> RequestRun | None:
    """Return the current request if the router has sent its prompt's token ids, else None."""
    run = CURRENT.get()
    return run if run is not None and run.call.is_rendered else None


def _arguments(llm: AsyncLLM, front_args: Mapping[str, Any]) -> Any:
    """Return the arguments of vLLM's server.

    Raises:
        ValueError: The arguments are wrong.
    """
    parser = make_arg_parser(FlexibleArgumentParser())
    option_names.learn(parser)
    args = parser.parse_args([])
    config = llm.vllm_config
    served = config.model_config.served_model_name
    vars(args).update(
        model=config.model_config.model,
        served_model_name=[served] if isinstance(served, str) else served,
        structured_outputs_config=config.structured_outputs_config,
        reasoning_parser=config.structured_outputs_config.reasoning_parser or None,
        **{**DEFAULTS, **front_args},
    )
    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if plugin := config.structured_outputs_config.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(plugin)
    args.tool_call_parser = chosen_tool_parser(config.model_config, args)
    if args.tool_call_parser:
        args.enable_auto_tool_choice = True
    validate_parsed_serve_args(args)
    return args
