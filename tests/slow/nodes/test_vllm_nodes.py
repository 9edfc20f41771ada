"""Real engines on several nodes: an answer goes on when the node that gives it is lost."""

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.nodes import ON_NODES, Nodes, ray_up

pytestmark = [*ON_NODES, pytest.mark.timeout(900)]

TOKENS = 150  # of an answer
HEARD = 10  # when the node is lost


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    args = {"engine": "vllm", "replicas": 2, "block_size": 32, "kv_cache_memory_mb": 128}
    with ray_up(workers=2, args=args | {"max_model_len": 2048}, gpus=1) as nodes:
        yield nodes


def test_an_answer_goes_on_when_its_node_is_lost(nodes: Nodes) -> None:
    assert set(nodes.index().values()) == {host.address for host in nodes.workers}
    with OpenAI(base_url=f"{nodes.url}/v1", api_key="none", max_retries=0, timeout=240) as client:

        def answer(victim: bool = False) -> tuple[int, int]:
            """Tokens that it has, and that its prompt found cached; victim: its node is lost."""
            stream = client.chat.completions.create(
                model=BUILTIN_MODEL,
                messages=[{"role": "user", "content": "Tell me about rivers. " * 20}],
                max_tokens=TOKENS,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            replica = stream.response.headers["x-kvroute-replica"]
            usage: Any = None
            for number, event in enumerate(stream):
                usage = event.usage
                if victim and number == HEARD:
                    nodes.worker(nodes.index()[replica]).kill()
            return usage.completion_tokens, usage.prompt_tokens_details.cached_tokens

        assert answer() == (TOKENS, 0)
        tokens, cached_tokens = answer(victim=True)
        assert tokens == TOKENS
        assert cached_tokens >= 64, "the second one went where the first one was"
