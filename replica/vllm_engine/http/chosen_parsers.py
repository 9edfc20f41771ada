"""Chooses vLLM's parsers of tool calls and reasoning for a model, unless the user has set them."""

import logging
from typing import Any

from transformers import PreTrainedTokenizerBase
from vllm.config import ModelConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.renderers.hf import resolve_chat_template
from vllm.tokenizers import cached_tokenizer_from_config

from kvroute.replica.vllm_engine.compat import load_chat_template
from kvroute.replica.vllm_engine.http.parser_forms import NONE, reasoning_parser, tool_parser

log = logging.getLogger("kvroute.replica")


def choose_reasoning_parser(args: AsyncEngineArgs, chat_template: str | None) -> None:
    """Set the engine's parser of reasoning in `args`.

    The engine needs it at its start, because a grammar applies only after the reasoning.

    Args:
        args: The engine's arguments.
        chat_template: The chat template that the user has set: a file or the template itself.
    """
    if args.reasoning_parser:
        args.reasoning_parser = "" if args.reasoning_parser == NONE else args.reasoning_parser
        return
    config = args.create_model_config()
    parser = reasoning_parser(_template(config, chat_template), config.hf_config.model_type)
    if parser:
        log.info("chose vLLM's reasoning parser %s because of the model's chat template", parser)
        args.reasoning_parser = parser


def chosen_tool_parser(config: ModelConfig, args: Any) -> str | None:
    """Return the parser of tool calls that the user has set, else one that fits the model.

    Args:
        config: The model's configuration.
        args: The arguments of vLLM's server.
    """
    if args.tool_call_parser is not None:
        return None if args.tool_call_parser == NONE else str(args.tool_call_parser)
    template = _template(config, args.chat_template)
    parser = tool_parser(template, config.hf_config.model_type, config.model)
    if parser:
        log.info("chose vLLM's tool call parser %s because of the model's chat template", parser)
    return parser


def _template(config: ModelConfig, user_template: str | None) -> str | None:
    """Return the chat template for requests with tools; None if there is none."""
    if config.skip_tokenizer_init:
        return None
    tokenizer = cached_tokenizer_from_config(config)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return None
    loaded = load_chat_template(user_template)
    template: str | None = resolve_chat_template(tokenizer, loaded, [{}], model_config=config)
    return template
