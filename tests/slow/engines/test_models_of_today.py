"""The router expects of today's architectures what vLLM then finds in its cache."""

from collections.abc import AsyncIterator, Mapping

import numpy as np
import pytest
import pytest_asyncio

from kvroute.blocks.cache_groups import FULL
from kvroute.process.vllm_build import installed_version
from tests.support.answers import ids_of
from tests.support.engines import BLOCK, prompt_of, started
from tests.support.routed import REPLICA, Routed
from tests.support.tiny_models import tiny_model

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]

CACHE_MB: Mapping[str, int] = {  # for less than ten prompts of 600 tokens
    "gemma3": 3,  # windows and full attention
    "mistral": 1,  # windows alone
    "llama4": 3,  # chunks and full attention
    "qwen3-next": 8,  # linear and full attention, in large blocks
    "lfm2": 3,  # convolutions and full attention
}


class Model(Routed):
    """Of one architecture."""

    @property
    def has_full_attention(self) -> bool:
        layout = self.running.engine.facts.layout
        return bool(layout and layout.groups[0].kind in FULL)

    async def ask(self, prompt: list[int], answer: list[int] | None = None) -> int:
        """How much of the prompt was cached, which the router has expected. The answer's tokens are
        added to `answer`."""
        await self.receive()
        placement = self.fleet.place(np.array(prompt, np.uint32), [REPLICA], 0.0)
        chunks = await self.running.ask(prompt, max_tokens=4 if answer is None else 70)
        if answer is not None:
            answer += ids_of(chunks)
        assert placement.expected_tokens(REPLICA) == chunks[0].cached_tokens
        return chunks[0].cached_tokens


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=CACHE_MB)
async def routed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Model]:
    """Long prompts take two steps."""
    if request.param == "lfm2" and installed_version().startswith("0.31."):
        pytest.skip("vLLM 0.31 cannot run this model on CPUs")
    model = tiny_model(request.param, tmp_path_factory.mktemp(request.param))
    async with started(
        "vllm",
        model=str(model),
        dtype="bfloat16",  # linear attention has no other on CPUs
        kv_cache_memory_mb=CACHE_MB[request.param],
        engine_args={"max_num_batched_tokens": 512},
    ) as running:
        routed = Model(running)
        yield routed
        vars(routed).clear()


async def test_the_second_time_a_prompt_is_cached(routed: Model) -> None:
    prompt = prompt_of(620, seed=1)
    assert await routed.ask(prompt) == 0
    assert await routed.ask(prompt) > 0
    assert await routed.ask(prompt) > 0


async def test_longer_prompts_take_their_beginning_which_was_a_prompt(routed: Model) -> None:
    """So it is with named prefixes."""
    prompt = prompt_of(620, seed=2)
    await routed.ask(prompt)
    for seed in (3, 41, 42):
        assert await routed.ask(prompt + prompt_of(300, seed)) > 0


async def test_a_shorter_prompt_has_no_more_than_its_model_keeps(routed: Model) -> None:
    prompt = prompt_of(900, seed=4)
    for tokens in (900, 620, 200, 620, 900):
        await routed.ask(prompt[:tokens])


async def test_prompts_of_whole_blocks_compute_their_last_block_again(routed: Model) -> None:
    prompt = prompt_of(640, seed=5)
    for tokens in (640, 640, 320, 320, 641):
        await routed.ask(prompt[:tokens])


async def test_what_prompts_share_is_cached_once_two_have_diverged(routed: Model) -> None:
    """Windows alone keep the ends of prompts only."""
    shared = prompt_of(400, seed=6)
    for seed in (7, 8):
        await routed.ask(shared + prompt_of(300, seed))
    third = await routed.ask(shared + prompt_of(300, seed=9))
    assert (third > 0) == routed.has_full_attention


async def test_a_chat_goes_on_from_what_its_model_keeps(routed: Model) -> None:
    chat = prompt_of(400, seed=10)
    for seed in (11, 12, 13):
        answer: list[int] = []
        await routed.ask(chat, answer)
        chat = chat + answer + prompt_of(60, seed)
    assert await routed.ask(chat) > 0


async def test_what_later_prompts_have_left_of_earlier_ones_is_expected(routed: Model) -> None:
    prompts = [prompt_of(620, seed) for seed in range(20, 32)]
    for prompt in prompts:
        await routed.ask(prompt)
    left = [await routed.ask(prompt) for prompt in reversed(prompts)]
    assert left[0] > 0 == left[-1]


async def test_no_flood_evicts_what_is_pinned(routed: Model) -> None:
    prefix, engine = prompt_of(400, seed=50), routed.running.engine
    await routed.running.pin("a", prefix)
    kept = engine.pins["a"] * BLOCK
    assert 300 < kept <= 400
    for seed in range(51, 63):
        await routed.ask(prompt_of(620, seed))
    for seed in (64, 65):
        assert await routed.ask(prefix + prompt_of(200, seed)) >= kept
    await engine.unpin("a")
    for seed in range(51, 63):
        await routed.ask(prompt_of(620, seed))
    assert await routed.ask(prefix + prompt_of(200, seed=66)) == 0


async def test_after_a_reset_nothing_is_expected(routed: Model) -> None:
    prompt = prompt_of(620, seed=40)
    await routed.ask(prompt)
    assert await routed.running.engine.reset_prefix_cache()
    assert await routed.ask(prompt) == 0
    assert await routed.ask(prompt) > 0
