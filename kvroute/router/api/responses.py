"""An engine's chunks become a response in OpenAI's shape: whole, or one event for each chunk."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec

from kvroute.contract.generation import Chunk, TokenLogprob
from kvroute.router.api.logprobs import characters, chat_logprobs, completion_logprobs

DONE = b"data: [DONE]\n\n"

encode = msgspec.json.encode


@dataclass(slots=True)
class Usage:
    """Tokens of one call, summed over its prompts and their choices."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached: dict[int, int] = field(default_factory=dict)  # of each prompt, from its first chunk

    def count(self, chunk: Chunk, prompt: int) -> None:
        self.completion_tokens += len(chunk.token_ids)
        self.cached.setdefault(prompt, chunk.cached_tokens)

    @property
    def cached_tokens(self) -> int:
        return sum(self.cached.values())

    def as_json(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(slots=True)
class Choice:
    """The output of one choice so far."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    streamed_characters: int = 0  # counted only while logprobs are streamed


class Reply(ABC):
    """One response. A stream is `opening`, an `event` for each chunk, and `closing`. A whole
    response is an `add` for each chunk, and `whole`. The index of choice c of prompt p is
    p * n + c."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    event_object: ClassVar[str]

    def __init__(
        self,
        model: str,
        prompt_tokens: int,
        *,
        request_id: str = "",  # empty: a new one
        prompts: int = 1,
        n: int = 1,
        logprobs: bool = False,
        include_usage: bool = False,
        receipts: Sequence[object] = (),
    ) -> None:
        self.id = f"{self.id_prefix}-{request_id or uuid.uuid4().hex}"
        self.usage = Usage(prompt_tokens)
        self._head = {"created": int(time.time()), "model": model}
        self._n = n
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._more = {"kvroute_receipts": receipts} if receipts else {}  # next to OpenAI's members
        self._choices = [Choice() for _ in range(prompts * n)]
        self._unfinished = prompts * n  # choices of a stream
        # The events of a stream differ only in their choice; the bytes around it are encoded once.
        self._before = b"data: " + self._object(self.event_object)[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def opening(self) -> bytes:
        """The events before the first chunk."""
        return b""

    def event(self, chunk: Chunk, prompt: int = 0) -> bytes:
        """One chunk as a server-sent event."""
        self.usage.count(chunk, prompt)
        index = prompt * self._n + chunk.index
        logprobs = self._event_logprobs(index, chunk.logprobs) if self._logprobs else b"null"
        reason = b"null"
        if chunk.finish_reason is not None:
            self._unfinished -= 1
            reason = encode(chunk.finish_reason)
        return self._event(index, self._delta(encode(chunk.text)), logprobs, reason)

    @property
    def is_complete(self) -> bool:
        """Whether every choice of a stream had its last event."""
        return not self._unfinished

    def closing(self) -> bytes:
        """The end of a stream: usage and receipts if requested, and the [DONE] marker."""
        if not self._include_usage and not self._more:
            return DONE
        last = self._object(self.event_object, choices=[], usage=self.usage.as_json(), **self._more)
        return b"data: " + last + b"\n\n" + DONE

    def add(self, chunk: Chunk, prompt: int = 0) -> None:
        """Keeps a chunk for `whole`."""
        self.usage.count(chunk, prompt)
        choice = self._choices[prompt * self._n + chunk.index]
        choice.texts.append(chunk.text)
        choice.logprobs.extend(chunk.logprobs)
        choice.finish_reason = chunk.finish_reason or choice.finish_reason

    def whole(self) -> bytes:
        """The JSON body of the whole response."""
        choices = [self._choice(index, choice) for index, choice in enumerate(self._choices)]
        return self._object(
            self.whole_object, choices=choices, usage=self.usage.as_json(), **self._more
        )

    def _object(self, kind: str, **rest: object) -> bytes:
        return encode({"id": self.id, "object": kind, **self._head, **rest})

    def _choice(self, index: int, choice: Choice) -> dict[str, object]:
        return {
            "index": index,
            **self._emitted("".join(choice.texts)),
            "logprobs": self._shaped(choice.logprobs, 0) if self._logprobs else None,
            "finish_reason": choice.finish_reason,
        }

    def _event(self, index: int, delta: bytes, logprobs: bytes, reason: bytes) -> bytes:
        return b'%b{"index":%d,%b,"logprobs":%b,"finish_reason":%b}%b' % (
            self._before,
            index,
            delta,
            logprobs,
            reason,
            self._after,
        )

    def _event_logprobs(self, index: int, tokens: Sequence[TokenLogprob]) -> bytes:
        choice = self._choices[index]
        shaped = encode(self._shaped(tokens, choice.streamed_characters))
        choice.streamed_characters += characters(tokens)
        return shaped

    @abstractmethod
    def _delta(self, text: bytes) -> bytes:
        """The member of an event's choice that contains `text`, a JSON string."""

    @abstractmethod
    def _emitted(self, text: str) -> dict[str, object]:
        """The member of a whole response's choice that contains `text`."""

    @abstractmethod
    def _shaped(self, tokens: Sequence[TokenLogprob], offset: int) -> dict[str, object]:
        """The log-probabilities of tokens that follow `offset` characters."""


class ChatReply(Reply):
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    event_object = "chat.completion.chunk"

    def opening(self) -> bytes:
        delta = b'"delta":{"role":"assistant","content":""}'
        indices = range(len(self._choices))
        return b"".join(self._event(index, delta, b"null", b"null") for index in indices)

    def _delta(self, text: bytes) -> bytes:
        return b'"delta":{"content":%b}' % text

    def _emitted(self, text: str) -> dict[str, object]:
        return {"message": {"role": "assistant", "content": text}}

    def _shaped(self, tokens: Sequence[TokenLogprob], offset: int) -> dict[str, object]:
        return chat_logprobs(tokens)


class CompletionReply(Reply):
    id_prefix = "cmpl"
    whole_object = event_object = "text_completion"

    def _delta(self, text: bytes) -> bytes:
        return b'"text":%b' % text

    def _emitted(self, text: str) -> dict[str, object]:
        return {"text": text}

    def _shaped(self, tokens: Sequence[TokenLogprob], offset: int) -> dict[str, object]:
        return completion_logprobs(tokens, offset)
