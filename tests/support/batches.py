"""Batches for tests: their lines, and whether each line has exactly one result."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openai import APIError, OpenAI
from openai.types import Batch

CHAT = "/v1/chat/completions"
FINAL = ("completed", "failed", "expired", "cancelled")


def questions(model: str, count: int, *, words: int = 60, each: int = 5) -> list[str]:
    """Return lines in which `each` questions are about the same text, shuffled."""
    lines = []
    for number in range(count):
        text = random.Random(number // each).choices(range(1000), k=words)
        content = f"{' '.join(map(str, text))} {number}"
        body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 2}
        line = {"custom_id": str(number), "method": "POST", "url": CHAT, "body": body}
        lines.append(json.dumps(line))
    random.Random(count).shuffle(lines)
    return lines


def create(client: OpenAI, lines: Sequence[str], endpoint: str = CHAT, **more: Any) -> Batch:
    """Create a batch with these lines; `more` has further fields of the request."""
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    more = {"completion_window": "24h"} | more
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, **more)  # type: ignore[arg-type]


def completed(client: OpenAI, batch: str) -> int:
    """Return the number of answered lines; -1 if the cluster does not answer at the moment."""
    try:
        counts = client.batches.retrieve(batch).request_counts
    except APIError:
        return -1
    return counts.completed if counts else 0


def is_final(client: OpenAI, batch: str) -> bool:
    try:
        return client.batches.retrieve(batch).status in FINAL
    except APIError:
        return False


def assert_complete(client: OpenAI, batch: str, lines: int) -> None:
    """Assert that each line of an ended batch has exactly one result, and that none has failed."""
    found = client.batches.retrieve(batch)
    assert found.status == "completed", found
    assert found.error_file_id is None, client.files.content(found.error_file_id).text[:1000]
    assert found.output_file_id is not None
    results = client.files.content(found.output_file_id).text.splitlines()
    ids = [int(json.loads(result)["custom_id"]) for result in results]
    assert sorted(ids) == [*range(lines)]
    assert found.request_counts is not None
    counts = found.request_counts.model_dump()
    assert counts == {"total": lines, "completed": lines, "failed": 0}


def runs_in(folder: Path, batch: str) -> int:
    """Return how many times routers have begun to run a batch of a cluster."""
    return len([*folder.glob(f"*/batches/{batch}/run-*.json")])
