"""A named prefix and a request form one prompt that begins with exactly the prefix's tokens.

Both are tokenised separately and then joined. Special tokens that the tokenizer puts before a text
appear once, before the prefix. A tokenizer that begins every text with a space also puts one where
the two are joined.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from kvroute.contract.generation import TokenIds
from kvroute.router.api.declaration import ChatMessage
from kvroute.router.api.errors import ApiError, context_length_exceeded, invalid
from kvroute.router.prompts.tokenizer import Prompts
from kvroute.store.named_prefix import Prefix

REMEMBERED = 1_000  # rendered prefixes in the cache


class PrefixComposer:
    """Joins prefixes and requests by one model's tokenizer and chat template."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._texts = lru_cache(REMEMBERED)(self._text)

    async def beginning(
        self, source: Mapping[str, Any], *, max_model_len: int | None = None
    ) -> TokenIds:
        """Return the tokens of a prefix.

        Raises:
            ApiError: it is empty, too long, or cannot be continued.
        """
        if "prompt" in source:
            token_ids = await self._prompts.beginning(source["prompt"], max_model_len=max_model_len)
            param = "prompt"
        else:
            text = self._checked_text(_messages(source))
            self._prompts.check_length("messages", text, max_model_len)
            token_ids = await self._prompts.rendered(text)
            param = "messages"
        _check_room(param, len(token_ids), max_model_len)
        return token_ids

    async def chat(
        self,
        body: Mapping[str, Any],
        prefix: Prefix | None,
        content_format: str,
        *,
        max_model_len: int,
    ) -> TokenIds:
        """Return the tokens of the prefix and a chat's body, up to the assistant's turn.

        Raises:
            OnlyReplicaError: only a replica can render the body.
        """
        before = () if prefix is None else prefix.source.get("messages", ())
        text = await self._prompts.chat_text(body, content_format, before=before)
        self._prompts.check_length("messages", text, max_model_len)
        if not before or prefix is None:
            rest = await self._prompts.rendered(text)
            return self.behind(prefix, rest) if prefix else rest
        return _joined(prefix, await self._prompts.rendered(self._behind(prefix, text)))

    def token_strings(self, token_ids: TokenIds) -> list[str]:
        """Return the vocabulary's string for each token."""
        return self._prompts.token_strings(token_ids)

    def behind(self, prefix: Prefix, prompt: TokenIds) -> TokenIds:
        """Return a prefix of text and a rendered prompt as one prompt."""
        return _joined(prefix, self._prompts.without_opening(prompt))

    async def completions(
        self,
        prompts: Sequence[str] | Sequence[TokenIds],
        prefix: Prefix | None,
        *,
        max_model_len: int,
    ) -> list[TokenIds]:
        """Return the tokens of the prefix and each prompt; all prompts are texts or all are ids."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if texts and prefix is not None:
            rests = await self._prompts.rests(texts, max_model_len)
        elif texts:
            rests = await self._prompts.texts(texts, max_model_len=max_model_len)
        else:
            rests = [self._prompts.ids(ids) for ids in prompts if not isinstance(ids, str)]
        return rests if prefix is None else [_joined(prefix, rest) for rest in rests]

    def _behind(self, prefix: Prefix, whole: str) -> str:
        """Return the part of the rendered text that follows the prefix's messages."""
        beginning = self._texts(_key(_messages(prefix.source)))
        if not whole.startswith(beginning):
            raise invalid(
                "messages",
                f"the chat template does not leave prefix {prefix.label!r} as it is before these "
                "messages; put its messages into the request instead",
            )
        return whole[len(beginning) :]

    def _checked_text(self, messages: Sequence[ChatMessage]) -> str:
        """Return the rendered messages.

        Raises:
            ApiError: they are rendered differently when other messages follow.
        """
        text = self._prompts.render(messages, is_turn=False)
        wholes = [whole for more in FOLLOWERS if (whole := self._try_render([*messages, *more]))]
        if not wholes or not all(whole.startswith(text) for whole in wholes):
            raise invalid(
                "messages",
                "the model's chat template renders these messages in another way when others "
                "follow, so nothing can follow them as a prefix; declare the text as a prompt",
            )
        return text

    def _try_render(self, messages: Sequence[ChatMessage]) -> str | None:
        try:
            return self._prompts.render(messages)
        except ApiError:
            return None  # the template requires another role there

    def _text(self, messages: tuple[tuple[str, str], ...]) -> str:
        pairs = [{"role": role, "content": content} for role, content in messages]
        return self._prompts.render(_messages({"messages": pairs}), is_turn=False)


def _joined(prefix: Prefix, rest: TokenIds) -> TokenIds:
    return np.concatenate([prefix.token_ids, rest])


def _check_room(param: str, tokens: int, max_model_len: int | None) -> None:
    if not tokens:
        raise invalid(param, f"{param} has no tokens; expected some text")
    if max_model_len is not None and tokens >= max_model_len:
        raise context_length_exceeded(
            param,
            f"This model's maximum context length is {max_model_len} tokens. However, this prefix "
            f"has {tokens}, which leaves no room for a request. Please reduce its length.",
        )


def _follower(*roles: str) -> list[ChatMessage]:
    return [ChatMessage.model_validate({"role": role, "content": "a"}) for role in roles]


FOLLOWERS = [_follower("user"), _follower("assistant", "user"), _follower("user", "assistant")]


def _messages(source: Mapping[str, Any]) -> list[ChatMessage]:
    return [ChatMessage.model_validate(message) for message in source["messages"]]


def _key(messages: Sequence[ChatMessage]) -> tuple[tuple[str, str], ...]:
    return tuple((message.role, message.content) for message in messages)
