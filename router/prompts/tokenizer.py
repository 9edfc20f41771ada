"""Turns text and chats into token ids, with the model's own tokenizer and chat template."""

import asyncio
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from jinja2 import TemplateError

from kvroute.contract.generation import TokenIds
from kvroute.router.api.calls import Call
from kvroute.router.api.chat_message import ChatMessage
from kvroute.router.api.errors import ApiError, context_length_exceeded, invalid
from kvroute.router.prompts.chat_template import ChatTemplate, OnlyReplicaError
from kvroute.router.prompts.escape import Escape
from kvroute.router.prompts.segments import Cutter, SegmentCache
from kvroute.router.prompts.special_tokens import SpecialTokens

# Longest text, in characters, that is tokenised in the event loop, which takes about 2 ms. Longer
# text is tokenised in a worker thread.
INLINE_CHARACTERS = 8_192
INLINE_BYTES = 8_192  # largest body that is escaped in the event loop, which takes up to 9 ms
# Longest chat, in messages, that is rendered in the event loop, which takes about 1 ms.
INLINE_MESSAGES = 64
# Characters in one job of a worker thread. A call with more text has several jobs, so that jobs of
# other calls can run between them.
JOB_CHARACTERS = 65_536
WORKERS = 2  # number of worker threads
NO_ARGS: Mapping[str, Any] = MappingProxyType({})


class Prompts:
    """The tokenizer and chat template of a model folder or hub name.

    If a text contains the name of a special token, such as <|im_end|>, it becomes that special
    token, as in vLLM. So a client can end a message within its text, unless `escaped` has changed
    the call.

    If the tokenizer allows it, rendered chats are cut into segments. The segments of earlier turns
    are cached, so only the new part of the next turn is tokenised. Call rendered() from one event
    loop only.
    """

    def __init__(
        self,
        model: str | Path,
        revision: str = "",
        engine_args: Mapping[str, Any] = NO_ARGS,
        *,
        escapes: bool = False,
    ) -> None:
        """Load the tokenizer and the chat template.

        Args:
            engine_args: vLLM's engine arguments; only those about the chat template are used.
            escapes: whether `escaped` changes special tokens in clients' messages.
        """
        self.model = str(model)
        tokenizer = _load(model, revision)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(
                f"the tokenizer of {model} is not a fast tokenizer; add a tokenizer.json to the "
                "model folder"
            )
        backend.no_truncation()
        backend.no_padding()
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1  # all valid token ids are less than this
        self._longest_token = max(map(len, vocabulary))  # its length in characters
        self._tokenizer = tokenizer
        self._template = ChatTemplate(
            tokenizer,
            template=_template_option(engine_args.get("chat_template")),
            defaults=engine_args.get("default_chat_template_kwargs"),
            with_unused_tools=not engine_args.get("exclude_tools_when_tool_choice_none"),
        )
        self._backend = backend
        special = SpecialTokens(tokenizer, self._template.source) if escapes else None
        self._escape = Escape(special) if special else None
        self._opening = _opening(backend)
        self._cutter = _cutter(backend)
        self._cache = SegmentCache()  # not thread-safe: used in the event loop only
        # Tokenising a prompt uses one core. The event loop and the engines need the other cores.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="tokenise")

    async def texts(
        self, prompts: Sequence[str], *, max_model_len: int | None = None
    ) -> list[TokenIds]:
        """Return the ids of plain texts, each with the tokenizer's special tokens around it.

        Raises:
            ApiError: a text is too long, or has no tokens.
        """
        texts = await self.continuations(prompts, max_model_len)
        token_ids = [np.concatenate([self._opening, text_ids]) for text_ids in texts]
        if not all(map(len, token_ids)):
            raise invalid("prompt", 'prompt is ""; expected at least one token')
        return token_ids

    async def prefix_ids(self, text: str, *, max_model_len: int | None = None) -> TokenIds:
        """Return the ids of a plain text that other text will follow.

        They include the special tokens before the text, but not those after it.
        """
        self.check_length("prompt", text, max_model_len)
        return np.concatenate([self._opening, *await self.encode([text])])

    async def continuations(
        self, prompts: Sequence[str], max_model_len: int | None = None
    ) -> list[TokenIds]:
        """Return the ids of plain texts, each of which will follow other text.

        They include the special tokens after each text, but not those before it.
        """
        for prompt in prompts:
            self.check_length("prompt", prompt, max_model_len)
        return [*map(self.without_opening, await self.encode(prompts, special=True))]

    def without_opening(self, token_ids: TokenIds) -> TokenIds:
        """Return the ids without the special tokens that the tokenizer puts before any text."""
        opening = len(self._opening)
        has_opening = np.array_equal(token_ids[:opening], self._opening)
        return token_ids[opening:] if has_opening else token_ids

    def ids(self, token_ids: TokenIds) -> TokenIds:
        """Check that a client's token ids are in the vocabulary, and return them."""
        if not len(token_ids):
            raise invalid("prompt", "prompt is []; expected at least one token id")
        largest = int(token_ids.max())
        if largest >= self.vocab_size:
            raise invalid(
                "prompt",
                f"prompt has the token id {largest}; expected ids from 0 to {self.vocab_size - 1}",
            )
        return token_ids

    def decode(self, token_ids: TokenIds) -> str:
        """Return the text of the ids, including special tokens."""
        return str(self._backend.decode(token_ids.tolist(), skip_special_tokens=False))

    def token_strings(self, token_ids: TokenIds) -> list[str]:
        """Return the vocabulary's string for each token."""
        return [str(token) for token in self._tokenizer.convert_ids_to_tokens(token_ids.tolist())]

    def close(self) -> None:
        """Stop the worker threads after their current work."""
        self._workers.shutdown(cancel_futures=True)

    def render(self, messages: Sequence[ChatMessage], *, is_turn: bool = True) -> str:
        """Render messages with the same template and default arguments as chats.

        Args:
            is_turn: whether the text ends with the start of the assistant's message.

        Raises:
            ApiError: 400: the model has no template, or the template refuses the messages.
        """
        body = {
            "messages": [_template_message(message) for message in messages],
            "add_generation_prompt": is_turn,
        }
        try:
            return self._template.text(body, "string")
        except OnlyReplicaError:
            raise ApiError(
                400,
                "this model has no chat template; send a prompt to /v1/completions",
                param="messages",
            ) from None
        except (TemplateError, TypeError, ValueError) as error:
            raise invalid(
                "messages", f"the model's chat template refuses the messages: {error}"
            ) from error

    async def escaped(self, call: Call) -> Call:
        """Escape special tokens in the call's messages, if --escape-special-tokens is on.

        Raises:
            ApiError: the call cannot be escaped; see Escape.call.
        """
        if self._escape is None:
            return call
        if len(call.raw) <= INLINE_BYTES:
            return self._escape.call(call)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._workers, self._escape.call, call)

    async def chat_text(
        self,
        body: Mapping[str, Any],
        content_format: str | None,
        *,
        before: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Return the text that the template renders from a body.

        Args:
            before: messages of a prefix, which are rendered before those of the body.

        Raises:
            OnlyReplicaError: only a replica can render the body, or the template refuses it. In
                the second case the replica answers with vLLM's error.
            ApiError: the body has too many nested values.
        """
        text = partial(self._template.text, body, content_format, before=before)
        try:
            if len(body.get("messages") or ()) <= INLINE_MESSAGES:
                return text()
            return await asyncio.get_running_loop().run_in_executor(self._workers, text)
        except (TemplateError, TypeError, ValueError) as error:
            raise OnlyReplicaError(str(error)) from error
        except RecursionError:
            raise invalid(None, "the body is nested too deep; send fewer nested values") from None

    async def chat(
        self, body: Mapping[str, Any], content_format: str | None, *, max_model_len: int
    ) -> TokenIds:
        """Return the ids of a chat, up to the start of the assistant's message.

        Raises:
            OnlyReplicaError: see `chat_text`.
            ApiError: the chat is too long, or has too many nested values.
        """
        text = await self.chat_text(body, content_format)
        self.check_length("messages", text, max_model_len)
        return await self.rendered(text)

    async def completions(
        self, prompts: Sequence[str] | Sequence[TokenIds], *, max_model_len: int
    ) -> list[TokenIds]:
        """Return the ids of each prompt of a completion.

        Args:
            prompts: either all texts, or all token ids.

        Raises:
            ApiError: a prompt is too long, empty, or has an invalid token id.
        """
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if texts:
            return await self.texts(texts, max_model_len=max_model_len)
        return [self.ids(ids) for ids in prompts if not isinstance(ids, str)]

    async def rendered(self, text: str) -> TokenIds:
        """Return the ids of a rendered chat. The text already contains the special tokens."""
        segments = self._cutter.cut(text) if self._cutter else [text]
        ids_of = {segment: self._cache.get(segment) for segment in segments}
        missing = [segment for segment, token_ids in ids_of.items() if token_ids is None]
        for segment, token_ids in zip(missing, await self.encode(missing), strict=True):
            ids_of[segment] = token_ids
            self._cache.put(segment, token_ids)
        return np.concatenate([ids_of[segment] for segment in segments])

    def check_length(self, field: str, text: str, max_model_len: int | None) -> None:
        """Check a text's length before it is tokenised.

        Raises:
            ApiError: the text would not fit in the context even if it had the longest tokens only.
        """
        if max_model_len is not None and len(text) > max_model_len * self._longest_token:
            raise context_length_exceeded(
                field,
                f"This model's maximum context length is {max_model_len} tokens. However, your "
                f"{field} contains {len(text)} characters, which cannot fit. Please reduce its "
                "length.",
            )

    async def encode(self, texts: Sequence[str], *, special: bool = False) -> list[TokenIds]:
        """Return the ids of each text.

        Args:
            special: whether to add the tokenizer's special tokens around each text.
        """
        if sum(map(len, texts)) <= INLINE_CHARACTERS:
            return self._token_ids(texts, special)
        loop, token_ids = asyncio.get_running_loop(), list[TokenIds]()
        for job in _jobs(texts):
            token_ids += await loop.run_in_executor(self._workers, self._token_ids, job, special)
        return token_ids

    def _token_ids(self, texts: Sequence[str], special: bool) -> list[TokenIds]:
        # The library's method `encode` would hold the GIL while it works. This one releases it.
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=special)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]


def _template_option(value: str | None) -> str | None:
    """Return the template that vLLM's option --chat-template gives as text or as a file's path.

    In vLLM this is load_chat_template.
    """
    if value is None:
        return None
    path = Path(value)
    is_text = any(character in value for character in "{}\n")
    return value if is_text else path.expanduser().read_text()


def _jobs(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Divide the texts, in order, into jobs of at least JOB_CHARACTERS; the last may be smaller."""
    begin, characters = 0, 0
    for end, text in enumerate(texts, 1):
        characters += len(text)
        if characters >= JOB_CHARACTERS or end == len(texts):
            yield texts[begin:end]
            begin, characters = end, 0


def _opening(backend: Any) -> TokenIds:
    """Return the special tokens that the tokenizer puts before any text, such as a BOS."""
    encoding = backend.encode("a", add_special_tokens=True)
    return np.array(encoding.ids[: encoding.special_tokens_mask.index(0)], dtype=np.uint32)


def _cutter(backend: Any) -> Cutter | None:
    """Return a cutter for this tokenizer.

    Returns:
        None if its texts cannot be cut. Then each chat is tokenised as a whole.
    """
    try:
        return Cutter(backend)
    except ValueError:
        return None


def _template_message(message: ChatMessage) -> dict[str, str]:
    """Return the message for the template. The role `developer` becomes `system`."""
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": message.content}


def _load(model: str | Path, revision: str) -> Any:
    """Load the model's tokenizer, if possible without torch, which takes 0.4 GB of memory."""
    # Without torch, transformers would warn that it has no models. None is needed here.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    if _is_generic(Path(model)):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(model)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model, revision=revision or "main")


def _is_generic(folder: Path) -> bool:
    """Return whether tokenizer.json alone defines the folder's tokenizer.

    AutoTokenizer would load the same tokenizer, but it would import torch to read the model's
    configuration.
    """
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text())
    except OSError:
        return False
    return bool(config.get("tokenizer_class") == "TokenizersBackend")
