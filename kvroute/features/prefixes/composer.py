"""Joins a named prefix and a request into one prompt that starts with exactly the prefix's tokens.

Both are tokenised separately, and then their token ids are joined. If the tokenizer puts special
tokens before a text, the prompt has them once, before the prefix. If the tokenizer puts a space
before a text, the prompt has a space also between the prefix and the request.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from kvroute.contract.generation import TokenIds
from kvroute.features.prefixes.named_prefix import Prefix
from kvroute.router.api.chat_message import ChatMessage
from kvroute.router.api.errors import ApiError, context_length_exceeded, invalid
from kvroute.router.prompts.tokenizer import Prompts

CACHED_PREFIXES = 1_000  # prefixes whose rendered text is cached


class PrefixComposer:
    """Joins prefixes and requests with one model's tokenizer and chat template."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._texts = lru_cache(CACHED_PREFIXES)(self._text)

    async def prefix_tokens(
        self, source: Mapping[str, Any], *, max_model_len: int | None = None
    ) -> TokenIds:
        """Return the tokens of a prefix.

        Args:
            source: the field `prompt` or `messages` of the declaration.
            max_model_len: the most tokens of a prompt and its response; None: do not check it.

        Raises:
            ApiError: the prefix is empty or too long, or the chat template refuses its messages or
                renders them differently when a request follows.
        """
        if "prompt" in source:
            token_ids = await self._prompts.prefix_ids(
                source["prompt"], max_model_len=max_model_len
            )
            param = "prompt"
        else:
            text = self._checked_text(_messages(source))
            self._prompts.check_length("messages", text, max_model_len)
            token_ids = await self._prompts.rendered(text)
            param = "messages"
        _check_length(param, len(token_ids), max_model_len)
        return token_ids

    async def chat(
        self,
        body: Mapping[str, Any],
        prefix: Prefix,
        content_format: str | None,
        *,
        max_model_len: int,
    ) -> TokenIds:
        """Return the tokens of the prefix and a chat, up to the start of the assistant's message.

        Args:
            content_format: see ChatTemplate.text.

        Raises:
            OnlyReplicaError: only a replica can render the body.
        """
        before = prefix.source.get("messages", ())
        text = await self._prompts.chat_text(body, content_format, before=before)
        self._prompts.check_length("messages", text, max_model_len)
        if not before:
            return self.after_prefix(prefix, await self._prompts.rendered(text))
        rest = await self._prompts.rendered(self._text_after(prefix, text))
        return _joined(prefix, rest)

    def after_prefix(self, prefix: Prefix, prompt: TokenIds) -> TokenIds:
        """Return one prompt: a prefix that was declared as text, then a rendered prompt."""
        return _joined(prefix, self._prompts.without_opening(prompt))

    async def completions(
        self,
        prompts: Sequence[str] | Sequence[TokenIds],
        prefix: Prefix,
        *,
        max_model_len: int,
    ) -> list[TokenIds]:
        """Return the tokens of each prompt, joined to the prefix.

        Args:
            prompts: either all texts, or all token ids.
        """
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if texts:
            rests = await self._prompts.continuations(texts, max_model_len)
        else:
            rests = [self._prompts.ids(ids) for ids in prompts if not isinstance(ids, str)]
        return [_joined(prefix, rest) for rest in rests]

    def _text_after(self, prefix: Prefix, text: str) -> str:
        """Return the part of a rendered chat that follows the prefix's messages.

        Raises:
            ApiError: the template renders the prefix's messages differently in this chat.
        """
        beginning = self._texts(_key(_messages(prefix.source)))
        if not text.startswith(beginning):
            raise invalid(
                "messages",
                f"the chat template renders the messages of prefix {prefix.label!r} differently "
                "before this request's messages; do not name the prefix, and put its messages into "
                "the request instead",
            )
        return text[len(beginning) :]

    def _checked_text(self, messages: Sequence[ChatMessage]) -> str:
        """Return the rendered messages of a prefix.

        Raises:
            ApiError: the template renders them differently when other messages follow.
        """
        text = self._prompts.render(messages, is_turn=False)
        chats = [chat for more in FOLLOWERS if (chat := self._try_render([*messages, *more]))]
        if not chats or not all(chat.startswith(text) for chat in chats):
            raise invalid(
                "messages",
                "the model's chat template renders these messages differently when other messages "
                "follow, so they cannot be a prefix; declare the text with `prompt` instead",
            )
        return text

    def _try_render(self, messages: Sequence[ChatMessage]) -> str | None:
        try:
            return self._prompts.render(messages)
        except ApiError:
            return None  # the template does not allow these roles in this order

    def _text(self, messages: tuple[tuple[str, str], ...]) -> str:
        pairs = [{"role": role, "content": content} for role, content in messages]
        return self._prompts.render(_messages({"messages": pairs}), is_turn=False)


def _joined(prefix: Prefix, rest: TokenIds) -> TokenIds:
    return np.concatenate([prefix.token_ids, rest])


def _check_length(param: str, tokens: int, max_model_len: int | None) -> None:
    if not tokens:
        raise invalid(param, f"{param} has no tokens; expected some text")
    if max_model_len is not None and tokens >= max_model_len:
        raise context_length_exceeded(
            param,
            f"This model's maximum context length is {max_model_len} tokens. However, this prefix "
            f"has {tokens} tokens, which leaves no room for a request. Please reduce its length.",
        )


def _follower(*roles: str) -> list[ChatMessage]:
    return [ChatMessage.model_validate({"role": role, "content": "a"}) for role in roles]


# Messages that may follow a prefix, to test whether the template renders the prefix differently.
FOLLOWERS = [_follower("user"), _follower("assistant", "user"), _follower("user", "assistant")]


def _messages(source: Mapping[str, Any]) -> list[ChatMessage]:
    return [ChatMessage.model_validate(message) for message in source["messages"]]


def _key(messages: Sequence[ChatMessage]) -> tuple[tuple[str, str], ...]:
    return tuple((message.role, message.content) for message in messages)
