"""A batch of shuffled questions about documents, on two vLLM replicas with small caches."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.support.batches import create, is_final, questions
from tests.support.clients import openai_client
from tests.support.serving import KVROUTE, Cluster, start_cluster
from tests.support.waiting import wait_until

DOCUMENTS, QUESTIONS = 14, 10
WORDS = 200  # of about three tokens each
BLOCKS = 64  # KV blocks of a replica: 3 documents
TIMEOUT_S = 900.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("files")
    options = ("--replicas", "2", "--max-model-len", "1024", "--files-dir", str(folder))
    blocks = ("--engine-arg", f"num_gpu_blocks_override={BLOCKS}")
    with start_cluster(*options, *blocks) as cluster:
        yield cluster


def computed_tokens(lines: str) -> int:
    """Return the prompt tokens of results that were not in a cache."""
    usages = [json.loads(line)["response"]["body"]["usage"] for line in lines.splitlines()]
    assert len(usages) == DOCUMENTS * QUESTIONS
    return sum(
        usage["prompt_tokens"] - ((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)
        for usage in usages
    )


def test_the_order_of_a_batch_saves_two_thirds_of_the_tokens(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Compared with plain requests in the order of the file."""
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    with openai_client(cluster) as client:
        lines = asked(client, "1")
        file.write_text("\n".join(lines))
        command = [*KVROUTE, "batch", "run", f"{file}", "-o", f"{output}", "--url", cluster.url]
        subprocess.run([*command, "--keep-order"], check=True, timeout=TIMEOUT_S)
        plain = computed_tokens(output.read_text())
        batch = create(client, asked(client, "2")).id
        wait_until(lambda: is_final(client, batch), within_s=TIMEOUT_S)
        found = client.batches.retrieve(batch)
        assert found.output_file_id is not None
        ordered = computed_tokens(client.files.content(found.output_file_id).text)
    print(f"computed prompt tokens: {plain} in the order of the file, {ordered} as a batch")
    assert ordered < plain / 3


def asked(client: OpenAI, run: str) -> list[str]:
    """Return the lines of a batch, whose documents no other run has."""
    model = client.models.list().data[0].id
    lines = questions(model, DOCUMENTS * QUESTIONS, words=WORDS, each=QUESTIONS)
    return [line.replace('"content": "', f'"content": "{run} ') for line in lines]
