"""Which requests a second stock server can continue, and the request that it gets.

The second server gets the prompt and the answer so far as one prompt of token ids. So it cannot
continue what depends on where the answer begins, or on an application's state: tools, schemas,
several choices, penalties that count only the tokens of the answer, or log-probabilities.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvroute.contract.http_call import HttpCall
from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.replica.attached_engine.server_bodies import CHAT, COMPLETIONS, REPORT_MODE

USUAL_TOKENS = 16  # vLLM's default of max_tokens on /v1/completions

# Fields that have the same meaning in the request to the second server. A repetition penalty is
# one of them, because it counts the tokens of the prompt, too.
COPIED = (
    *("model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "length_penalty"),
    *("stop", "stop_token_ids", "ignore_eos", "logit_bias", "allowed_token_ids"),
    *("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
    *("priority", "cache_salt", "session_id", "user", "stream_options", "stream_interval"),
)
ADJUSTED = ("max_tokens", "max_completion_tokens", "min_tokens", "seed")
# Fields that only have an effect on the prompt, or none at all.
DROPPED = (
    *("messages", "prompt", "add_special_tokens", "add_generation_prompt"),
    *("continue_final_message", "documents", "chat_template", "chat_template_kwargs"),
    *("reasoning_effort", "include_reasoning", "parallel_tool_calls", "truncation_side"),
    *("prefix_id", "stream", "request_id", "return_token_ids", "return_prompt_text"),
    *("return_tokens_as_token_ids", "metadata", "store", "service_tier"),
    *("prompt_cache_key", "safety_identifier"),
)
# The only values of other fields with which a request can be continued, besides null.
HARMLESS: Mapping[str, Any] = {
    "n": 1,
    "best_of": 1,
    "logprobs": False,  # 0 asks for the log-probability of each token
    "top_logprobs": 0,
    "echo": False,
    "suffix": "",
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "use_beam_search": False,
    "bad_words": [],
    "watermarking": False,
}
ANY_VALUE = frozenset((*COPIED, *ADJUSTED, *DROPPED))


@dataclass(frozen=True, slots=True)
class PlainStream:
    """A streamed completion or chat that a second server can continue."""

    path: str
    fields: Mapping[str, Any]  # the client's body
    stops: Sequence[str]

    @property
    def returns_ids(self) -> bool:
        """Return whether the client itself asks for the token ids."""
        return bool(self.fields.get("return_token_ids"))

    @property
    def includes_stop(self) -> bool:
        """Return whether the answer ends with the stop string, instead of before it."""
        return bool(self.fields.get("include_stop_str_in_output"))

    @property
    def max_tokens(self) -> int | None:
        """Return the limit of the answer's tokens; None: the rest of the context."""
        limit: int | None = self.fields.get("max_tokens")
        if self.path == COMPLETIONS:
            return USUAL_TOKENS if limit is None else limit
        completion: int | None = self.fields.get("max_completion_tokens")
        return limit if completion is None else completion

    def tokens_left(self, answered: int, prompt: int, context: int) -> int:
        """Return how many tokens the rest of the answer may have.

        Args:
            answered: The tokens of the answer so far.
            prompt: The tokens of the prompt.
            context: The most tokens of a prompt and its answer.
        """
        limit = self.max_tokens
        return (context - prompt if limit is None else limit) - answered

    def rest(self, answered: int) -> dict[str, Any]:
        """Return the fields of the request for the rest of the answer, without the prompt.

        Args:
            answered: The tokens of the answer so far.
        """
        fields = {name: self.fields[name] for name in COPIED if self.fields.get(name) is not None}
        if least := self.fields.get("min_tokens"):
            fields["min_tokens"] = max(0, least - answered)
        if (seed := self.fields.get("seed")) is not None:
            # With the same seed, vLLM would draw the first server's random numbers again.
            fields["seed"] = seed ^ answered
        if self.stops:  # JoinedText holds text back itself, since it knows the text before
            fields["include_stop_str_in_output"] = True
        return fields | {"stream": True, "return_token_ids": True}


def plain_stream(call: HttpCall, context: int) -> PlainStream | None:
    """Return the request if a second server can continue its answer exactly; None: it cannot.

    Args:
        call: The client's request.
        context: The most tokens of a prompt and its answer; 0: unknown.
    """
    if call.upload or call.path not in (CHAT, COMPLETIONS) or b'"stream"' not in call.body:
        return None
    try:
        fields = msgspec.json.decode(call.body)
    except DECODE_ERRORS:
        return None
    if not isinstance(fields, dict) or fields.get("stream") is not True:
        return None
    stops = _stops(fields.get("stop"))
    if stops is None or not all(_can_continue(name, value) for name, value in fields.items()):
        return None
    is_text = _is_conversation if call.path == CHAT else _is_one_prompt
    if not is_text(fields) or not _has_numbers(fields):
        return None
    # vLLM ignores stop strings before min_tokens, also those that end later.
    if stops and fields.get("min_tokens"):
        return None
    plain = PlainStream(call.path, fields, stops)
    return None if plain.max_tokens is None and not context else plain


def _can_continue(name: str, value: Any) -> bool:
    if value is None:
        return True
    if name == "spaces_between_special_tokens":  # false: the text depends on the token before
        return value is True
    if name == "vllm_xargs":
        return isinstance(value, dict) and value.keys() <= {REPORT_MODE}
    if name in HARMLESS:
        harmless = HARMLESS[name]
        is_like = isinstance(value, bool) == isinstance(harmless, bool)
        return is_like and bool(value == harmless)
    return name in ANY_VALUE


def _has_numbers(fields: Mapping[str, Any]) -> bool:
    """Return whether all fields that are changed for the second server are integers."""
    values = (fields.get(name) for name in ADJUSTED)
    return all(value is None or type(value) is int for value in values)


def _stops(value: Any) -> Sequence[str] | None:
    """Return the stop strings; None: this is no valid value."""
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or not all(stop and isinstance(stop, str) for stop in stops):
        return None
    return stops


def _is_one_prompt(fields: Mapping[str, Any]) -> bool:
    prompt = fields.get("prompt")
    if isinstance(prompt, list):
        return bool(prompt) and all(type(id_) is int for id_ in prompt)
    return isinstance(prompt, str)


def _is_conversation(fields: Mapping[str, Any]) -> bool:
    """Return whether all messages are text only."""
    messages = fields.get("messages")
    if not isinstance(messages, list):
        return False
    return all(isinstance(each, dict) and _is_text(each.get("content")) for each in messages)


def _is_text(content: Any) -> bool:
    if isinstance(content, list):
        return all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    return content is None or isinstance(content, str)
