"""Renders chats with vLLM and with the router, for the same tokenizer and any chat template."""

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer
from vllm.config import ModelConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMValidationError
from vllm.renderers.hf import HfRenderer, resolve_chat_template_content_format
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.tokenizers import cached_tokenizer_from_config

from kvroute.process.vllm_build import installed_version
from kvroute.router.prompts.chat_template import ChatTemplate, OnlyReplicaError
from kvroute.router.prompts.tokenizer import Prompts
from tests.support.chat_bodies import LEFT, Body

Ids = list[int]
# vLLM 0.31 renders the line in which Claude Code names its bill. The router omits it.
KEEPS_BILLING = installed_version().startswith("0.31.")
REFUSALS = (VLLMValidationError, TypeError, ValueError)


class Sides:
    """The renderers of vLLM and of the router, with the same tokenizer."""

    def __init__(self, model: str) -> None:
        self._log = logging.getLogger("vllm")
        self._log_level = self._log.level
        self._log.setLevel(logging.ERROR)  # otherwise vLLM logs each rejected body
        config = _config(model)
        self._loop = asyncio.Runner()
        self._model = config.model_config
        self._renderer = HfRenderer(config, cached_tokenizer_from_config(config.model_config))
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._prompts = Prompts(model)

    def close(self) -> None:
        self._prompts.close()
        self._renderer.shutdown()
        self._loop.close()
        self._log.setLevel(self._log_level)

    @property
    def tokenizers(self) -> list[Any]:
        return [self._renderer.get_tokenizer(), self._tokenizer]

    def online(self, template: str | None, options: Mapping[str, Any]) -> OnlineRenderer:
        return OnlineRenderer(
            self._model,
            self._renderer,
            request_logger=None,
            chat_template=template,
            chat_template_content_format="auto",
            enable_auto_tools=True,
            tool_parser="hermes",
            **options,
        )

    def chat_template(self, template: str | None, options: Mapping[str, Any]) -> ChatTemplate:
        return ChatTemplate(
            self._tokenizer,
            template=template,
            defaults=options.get("default_chat_template_kwargs"),
            with_unused_tools=not options.get("exclude_tools_when_tool_choice_none"),
        )

    def content_format(self, template: str | None) -> str:
        return str(
            resolve_chat_template_content_format(
                template, None, "auto", self._renderer.get_tokenizer(), model_config=self._model
            )
        )

    def run(self, coroutine: Any) -> Any:
        return self._loop.run(coroutine)

    def token_ids(self, rendered: str) -> Ids:
        return list(self.run(self._prompts.rendered(rendered)).tolist())

    def decoded(self, token_ids: Ids) -> str:
        return str(self._tokenizer.decode(token_ids))


class Pair:
    """Both renderers with the same chat template."""

    def __init__(self, sides: Sides, template: str | None, options: Mapping[str, Any]) -> None:
        self._sides = sides
        self._online = sides.online(template, options)
        self._router = sides.chat_template(template, options)
        self._format = sides.content_format(template)

    def by_vllm(self, request: ChatCompletionRequest) -> Ids | None:
        """Return the tokens by vLLM's renderer; None if it rejects the request."""
        try:
            made = self._sides.run(self._online.render_chat(request))
        except REFUSALS:
            return None
        return None if isinstance(made, ErrorResponse) else list(made[1][0]["prompt_token_ids"])

    def by_router(self, body: Body) -> Ids | None:
        """Return the tokens by the router's renderer; None if the template rejects the body.

        Raises:
            OnlyReplicaError: The router leaves the body to a replica.
        """
        try:
            rendered = self._router.text(body, self._format)
        except (TemplateError, TypeError, ValueError):
            return None
        return self._sides.token_ids(rendered)

    def difference(self, given: Body) -> str | None:
        """Return how the two renderings of a body differ; None if they are equal.

        Returns None, too, if vLLM rejects the body during validation: the replica's application
        then rejects it in the same way.
        """
        body = json.dumps({"model": "smollm2", **given})
        try:
            request = ChatCompletionRequest.model_validate_json(body)
        except REFUSALS:
            return None
        expected = self.by_vllm(request)
        try:
            token_ids = self.by_router(json.loads(body))
        except OnlyReplicaError:
            return LEFT if expected is not None else None
        if token_ids == expected or (KEEPS_BILLING and "x-anthropic-billing-header" in body):
            return None
        return f"vLLM: {self._shown(expected)}, router: {self._shown(token_ids)}"

    def _shown(self, token_ids: Ids | None) -> str:
        return "refused" if token_ids is None else repr(self._sides.decoded(token_ids))


def _config(model: str) -> VllmConfig:
    """Return vLLM's configuration without an engine, as `vllm launch render` makes it."""
    args = AsyncEngineArgs(model=model, max_model_len=8192)
    config: ModelConfig = args.create_model_config()
    config.quantization = None
    if not hasattr(args, "create_structured_outputs_config"):  # vLLM 0.31
        return VllmConfig(model_config=config)
    structured = args.create_structured_outputs_config()
    return VllmConfig(model_config=config, structured_outputs_config=structured)
