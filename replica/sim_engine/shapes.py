"""Converts a simulated engine's outputs to a response in OpenAI's format, as JSON or as events."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec

from kvroute.replica.sim_engine.choice_output import Alternative, ChoiceOutput, TokenLogprob
from kvroute.replica.sim_engine.sampling import Sampling

DONE = b"data: [DONE]\n\n"
EVENTS, JSON = "text/event-stream; charset=utf-8", "application/json"

encode = msgspec.json.encode


@dataclass(slots=True)
class _ChoiceOutput:
    """The output of one choice so far."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    characters: int = 0  # number of characters of the tokens whose log-probabilities were sent
    finish_reason: str | None = None


class SimulatedResponse(ABC):
    """The response to one prompt.

    `add` returns the bytes to send for an output, and `end` the bytes at the response's end.
    """

    id_prefix: ClassVar[str]
    response_object: ClassVar[str]
    event_object: ClassVar[str]

    def __init__(
        self,
        sampling: Sampling,
        *,
        id_: str,
        model: str,
        created: float,
        prompt_tokens: int,
        cached_tokens: int | None = None,  # None: the number in the first output is used
    ) -> None:
        self._sampling = sampling
        self._head = {"created": int(created), "model": model}
        self._id = f"{self.id_prefix}-{id_}"
        self._prompt_tokens = prompt_tokens
        self._tokens = 0
        self._cached_tokens = cached_tokens
        self._choices = [_ChoiceOutput() for _ in range(sampling.n)]
        self._unfinished = sampling.n  # number of choices that have not finished
        self._has_opening = False  # whether the opening events were returned
        # The events of a stream differ only in `choices`. The bytes around it are encoded once.
        usage = b',"usage":null' if sampling.include_usage else b""
        self._before = b"data: " + self._object(self.event_object)[:-1] + b',"choices":['
        self._after = b"]" + usage + b"}\n\n"

    @property
    def is_complete(self) -> bool:
        return not self._unfinished

    @property
    def content_type(self) -> str:
        return EVENTS if self._sampling.is_stream else JSON

    def add(self, output: ChoiceOutput) -> bytes:
        """Add an output, and return the bytes to send for it."""
        self._tokens += len(output.token_ids)
        if self._cached_tokens is None:
            self._cached_tokens = output.cached_tokens
        if output.finish_reason is not None:
            self._unfinished -= 1
        if not self._sampling.is_stream:
            return self._collect(output)
        opening, self._has_opening = b"" if self._has_opening else self._opening(), True
        return opening + self._output_event(output)

    def end(self) -> bytes:
        """Return the bytes to send after all outputs."""
        if self._sampling.is_stream:
            return self._closing()
        choices = [
            self._response_choice(index, choice) for index, choice in enumerate(self._choices)
        ]
        return self._object(self.response_object, choices=choices, usage=self._usage())

    def _collect(self, output: ChoiceOutput) -> bytes:
        choice = self._choices[output.index]
        choice.texts.append(output.text)
        choice.logprobs.extend(output.logprobs)
        choice.finish_reason = output.finish_reason or choice.finish_reason
        return b""

    def _output_event(self, output: ChoiceOutput) -> bytes:
        choice = self._choices[output.index]
        logprobs = b"null"
        if self._sampling.logprobs is not None:
            logprobs = encode(self._format_logprobs(output.logprobs, choice.characters))
            choice.characters += sum(len(logprob.chosen.token) for logprob in output.logprobs)
        delta, reason = self._delta(encode(output.text)), encode(output.finish_reason)
        return self._event(output.index, delta, logprobs, reason)

    def _event(self, index: int, delta: bytes, logprobs: bytes, reason: bytes) -> bytes:
        choice = b'{"index":%d,%b,"logprobs":%b,"finish_reason":%b}'
        return self._before + choice % (index, delta, logprobs, reason) + self._after

    def _closing(self) -> bytes:
        if not self._sampling.include_usage:
            return DONE
        last = self._object(self.event_object, choices=[], usage=self._usage())
        return b"data: " + last + b"\n\n" + DONE

    def _response_choice(self, index: int, choice: _ChoiceOutput) -> dict[str, object]:
        has_logprobs = self._sampling.logprobs is not None
        return {
            "index": index,
            **self._content("".join(choice.texts)),
            "logprobs": self._format_logprobs(choice.logprobs, 0) if has_logprobs else None,
            "finish_reason": choice.finish_reason,
        }

    def _usage(self) -> dict[str, object]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._tokens,
            "total_tokens": self._prompt_tokens + self._tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens or 0},
        }

    def _object(self, kind: str, **rest: object) -> bytes:
        return encode({"id": self._id, "object": kind, **self._head, **rest})

    def _opening(self) -> bytes:
        """Return the events before the first output."""
        return b""

    @abstractmethod
    def _delta(self, text: bytes) -> bytes:
        """Return the JSON field of an event's choice that contains `text`, a JSON string."""

    @abstractmethod
    def _content(self, text: str) -> dict[str, object]:
        """Return the field of a complete response's choice that contains `text`."""

    @abstractmethod
    def _format_logprobs(self, tokens: Sequence[TokenLogprob], offset: int) -> dict[str, object]:
        """Return the log-probabilities of tokens in the API's format.

        Args:
            tokens: The tokens.
            offset: The number of characters of the answer before these tokens.
        """


class ChatReply(SimulatedResponse):
    id_prefix = "chatcmpl"
    response_object = "chat.completion"
    event_object = "chat.completion.chunk"

    def _opening(self) -> bytes:
        delta = b'"delta":{"role":"assistant","content":""}'
        indices = range(len(self._choices))
        return b"".join([self._event(index, delta, b"null", b"null") for index in indices])

    def _delta(self, text: bytes) -> bytes:
        return b'"delta":{"content":%b}' % text

    def _content(self, text: str) -> dict[str, object]:
        return {"message": {"role": "assistant", "content": text}}

    def _format_logprobs(self, tokens: Sequence[TokenLogprob], offset: int) -> dict[str, object]:
        """Return a list with an entry for each token. The entry lists the most likely tokens."""
        content = [
            {**_entry(token.chosen), "top_logprobs": [_entry(other) for other in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}


class CompletionReply(SimulatedResponse):
    id_prefix = "cmpl"
    response_object = event_object = "text_completion"

    def _delta(self, text: bytes) -> bytes:
        return b'"text":%b' % text

    def _content(self, text: str) -> dict[str, object]:
        return {"text": text}

    def _format_logprobs(self, tokens: Sequence[TokenLogprob], offset: int) -> dict[str, object]:
        """Return several lists. Each list has an item for each token."""
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token.chosen.token)
        return {
            "tokens": [token.chosen.token for token in tokens],
            "token_logprobs": [token.chosen.logprob for token in tokens],
            "top_logprobs": [
                {other.token: other.logprob for other in (*token.top, token.chosen)}
                for token in tokens
            ],
            "text_offset": offsets,
        }


def _entry(alternative: Alternative) -> dict[str, object]:
    return {
        "token": alternative.token,
        "logprob": alternative.logprob,
        "bytes": list(alternative.token.encode()),
    }
