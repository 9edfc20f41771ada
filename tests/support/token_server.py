"""A server that generates a given answer in vLLM's forms, and can be lost at any byte of it."""

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from kvroute.process.builtin_model import BUILTIN_MODEL, resolve
from kvroute.replica.attached_engine.server_client import (
    NoConnectionError,
    Reply,
    ServerLostError,
)
from tests.support.scripted_client import Asked, ScriptedClient, Stream

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NAME = "m"  # the model's name at the server
EOS = 2  # the token that ends the answer
CONTEXT = 4096  # most tokens of a prompt and its answer
FINGERPRINT = "vllm-0.32.0-abc"

Json = dict[str, Any]


class Output(NamedTuple):
    """What vLLM's engine gives to a handler at once."""

    text: str
    ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | None = None


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(f"{resolve(BUILTIN_MODEL)}/tokenizer.json")


def ids_of_text(text: str) -> list[int]:
    ids: list[int] = tokenizer().encode(text, add_special_tokens=False).ids
    return ids


class TokenServer:
    """One server. All of them give the same answer to the same prompt.

    Args:
        prompt: The token ids of the only prompt.
        created: The time in the server's responses.
    """

    def __init__(self, prompt: Sequence[int], created: int) -> None:
        self.url = f"http://server-{created}"
        self.client = ScriptedClient(self.url, self._respond)
        self._prompt = [*prompt]
        self._created = created
        self.start((), [])

    def start(self, answer: Sequence[int], lives: list[int]) -> None:
        """Start again.

        Args:
            answer: The token ids of the answer, without the one that ends it.
            lives: For the next responses, the number of bytes after which their server is lost. All
                servers take it from the same list. After the last one, no server is lost.
        """
        self._answer = [*answer, EOS]
        self._lives = lives
        self.bytes_left: int | None = None  # bytes until the loss; None: no loss
        # Number of the event that is replaced by an error, in an answer from its beginning.
        self.error_at: int | None = None
        self.refusals = 0  # how many of the next connections are refused
        self.is_healthy = True
        self.tokens_per_event = 1
        self.has_details = False  # --enable-prompt-tokens-details
        self.replaced = (b"", b"")  # what is replaced in the events, as another version would
        self.requests: list[tuple[str, Json]] = []

    @property
    def continues(self) -> bool:
        """Return whether the server was asked to continue an answer."""
        return any(isinstance(body.get("prompt"), list) for _, body in self.requests)

    @property
    def is_lost(self) -> bool:
        return self.bytes_left == 0

    def _respond(self, asked: Asked) -> Reply | Stream:
        if self.is_lost or self.refusals:
            self.refusals = max(0, self.refusals - 1)
            raise NoConnectionError("connection refused")
        if asked.path == "/health":
            return Reply(200 if self.is_healthy else 503, b"")
        body = json.loads(asked.body)
        if asked.path == "/detokenize":
            text = tokenizer().decode(body["tokens"], skip_special_tokens=False)
            return Reply(200, json.dumps({"prompt": text}).encode())
        self.requests.append((asked.path, body))
        self.bytes_left = self._lives.pop(0) if self._lives else None
        events = self.events(asked.path, body, asked.headers["x-request-id"])
        return Stream(200, "text/event-stream; charset=utf-8", partial(self._sent, events))

    async def _sent(self, events: Iterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the bytes of a response, until the server is lost."""
        for event in events:
            if self.bytes_left is None:
                yield event
                continue
            left = self.bytes_left
            self.bytes_left = max(0, left - len(event))
            yield event[:left]
            if self.is_lost:
                raise ServerLostError("incomplete chunked read")

    def events(self, path: str, body: Json, id_: str) -> Iterator[bytes]:
        """Yield the events of a response."""
        writer = _Chat if path == CHAT else _Completion
        ids = body["prompt"] if isinstance(body.get("prompt"), list) else self._prompt
        options = body.get("stream_options") or {}
        has_usage = options.get("include_usage")
        is_continuous = has_usage and options.get("continuous_usage_stats")
        head: Json = {"id": writer.prefix + id_, "object": writer.kind, "created": self._created}
        head["model"] = NAME
        returns_ids, count = bool(body.get("return_token_ids")), 0

        def usage() -> Json:
            return {
                "prompt_tokens": len(ids),
                "total_tokens": len(ids) + count,
                "completion_tokens": count,
            }

        events: list[Json] = []
        if path == CHAT:
            role: Json = head | {"choices": [_Chat.role()], "prompt_token_ids": None}
            role["prompt_token_ids"] = ids if returns_ids else None
            role["prompt_text"] = None
            events.append(role | ({"usage": usage()} if is_continuous else {}))
        for number, output in enumerate(self._outputs(ids, body)):
            count += len(output.ids)
            choice = writer.choice(output, ids if number == 0 else None, returns_ids=returns_ids)
            event = head | {"choices": [choice]}
            if is_continuous:
                event["usage"] = usage()
            if output.finish_reason and not has_usage:
                event["system_fingerprint"] = FINGERPRINT
            events.append(event)
        if has_usage:
            last = usage()
            if self.has_details:
                last["prompt_tokens_details"] = {"cached_tokens": len(ids)}
            events.append(head | {"choices": [], "usage": last, "system_fingerprint": FINGERPRINT})
        for number, event in enumerate(events):
            if number == self.error_at and ids == self._prompt:
                yield b'data: {"error":{"message":"EngineCore died","code":500}}\n\n'
                break
            packed = json.dumps(event, separators=(",", ":"), ensure_ascii=False).encode()
            old, new = self.replaced
            yield b"data: " + (packed.replace(old, new) if old else packed) + b"\n\n"
        yield b"data: [DONE]\n\n"

    def _outputs(self, ids: Sequence[int], body: Json) -> Iterator[Output]:
        """Yield the outputs, several tokens at once if the server is set to that."""
        waiting = Output("", [])
        for output in self._tokens(ids, body):
            waiting = Output(waiting.text + output.text, waiting.ids + output.ids, *output[2:])
            if output.finish_reason or len(waiting.ids) == self.tokens_per_event:
                yield waiting
                waiting = Output("", [])

    def _tokens(self, ids: Sequence[int], body: Json) -> Iterator[Output]:
        """Yield an output for each token, as vLLM's incremental detokenizer makes them."""
        answered = len(ids) - len(self._prompt)
        assert [*ids] == self._prompt + self._answer[:answered]
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        limit = limit or (16 if "prompt" in body else CONTEXT - len(ids))
        stops = body.get("stop") or []
        stops = [stops] if isinstance(stops, str) else stops
        includes_stop = body.get("include_stop_str_in_output")
        held = 0 if includes_stop or not stops else max(map(len, stops)) - 1
        stream = DecodeStream(ids=[*ids], skip_special_tokens=True)
        text, sent = "", 0
        for count, id_ in enumerate(self._answer[answered:], 1):
            new = "" if id_ == EOS else stream.step(tokenizer(), id_) or ""
            text += new
            ends = {
                stop: text.find(stop, max(0, len(text) - len(new) - len(stop) + 1))
                for stop in stops
                if new
            }
            found = min(
                ((at + len(stop), stop) for stop, at in ends.items() if at >= 0), default=None
            )
            reason = "stop" if found or id_ == EOS else "length" if count == limit else None
            if found:
                text = text[: found[0] if includes_stop else found[0] - len(found[1])]
            end = len(text) if reason else max(sent, len(text) - held)
            yield Output(text[sent:end], [id_], reason, found[1] if found else None)
            sent = end
            if reason:
                return


class _Completion:
    """The choices of /v1/completions."""

    prefix, kind = "cmpl-", "text_completion"

    @staticmethod
    def choice(output: Output, prompt: Sequence[int] | None, *, returns_ids: bool) -> Json:
        return {
            "index": 0,
            "text": output.text,
            "logprobs": None,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "prompt_token_ids": prompt if returns_ids else None,
            "token_ids": output.ids if returns_ids else None,
        }


class _Chat(_Completion):
    """The choices of /v1/chat/completions."""

    prefix, kind = "chatcmpl-", "chat.completion.chunk"

    @staticmethod
    def role() -> Json:
        delta = {"role": "assistant", "content": ""}
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}

    @staticmethod
    def choice(output: Output, prompt: Sequence[int] | None, *, returns_ids: bool) -> Json:
        choice: Json = {
            "index": 0,
            "delta": {"content": output.text},
            "logprobs": None,
            "finish_reason": output.finish_reason,
        }
        if output.finish_reason:
            choice["stop_reason"] = output.stop_reason
        return choice | {"token_ids": output.ids if returns_ids else None}
