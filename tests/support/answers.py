"""Completion requests as routers send them to replicas, and the content of the chunks."""

import json
from collections.abc import Sequence
from typing import Any

from kvroute.contract.generation import Chunk
from kvroute.contract.http_call import HttpCall

COMPLETIONS = "/v1/completions"


def completion(path: str = COMPLETIONS, **fields: Any) -> HttpCall:
    """Return a completion call. It is greedy and streamed unless the fields say otherwise."""
    own = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    body = {**own, "temperature": 0, "ignore_eos": True, "stream": True, **fields}
    return HttpCall(path, json.dumps(body).encode(), 1.0)


def ids_of(chunks: Sequence[Chunk]) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


def data_of(chunks: Sequence[Chunk]) -> bytes:
    return b"".join(chunk.http.data for chunk in chunks if chunk.http)


def status_of(chunks: Sequence[Chunk]) -> int:
    (status,) = (chunk.http.status for chunk in chunks if chunk.http and chunk.http.status)
    return status


def events_of(chunks: Sequence[Chunk]) -> list[Any]:
    """Return the events of a stream, without [DONE]."""
    lines = data_of(chunks).decode().split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def choices_of(chunks: Sequence[Chunk], index: int = 0) -> list[Any]:
    """Return the choice with this index from each event."""
    return [
        choice
        for event in events_of(chunks)
        for choice in event["choices"]
        if choice["index"] == index
    ]


def text_of(chunks: Sequence[Chunk], index: int = 0) -> str:
    return "".join(choice["text"] for choice in choices_of(chunks, index))


def end_of(chunks: Sequence[Chunk], index: int = 0) -> str:
    """Return the finish reason of a choice."""
    (reason,) = filter(None, (choice["finish_reason"] for choice in choices_of(chunks, index)))
    return str(reason)


def logprobs_of(chunks: Sequence[Chunk], index: int = 0) -> list[tuple[str, dict[str, float]]]:
    """Return the text of each token, and its alternatives."""
    logprobs = [choice["logprobs"] for choice in choices_of(chunks, index) if choice["logprobs"]]
    return [
        pair for part in logprobs for pair in zip(part["tokens"], part["top_logprobs"], strict=True)
    ]
