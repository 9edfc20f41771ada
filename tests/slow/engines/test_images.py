"""The router expects of prompts with images what vLLM then finds in its cache."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from kvroute.blocks.chain import Scope
from kvroute.contract.generation import NO_TOKENS, GenerateRequest
from kvroute.contract.http_call import HttpCall, Rendered
from tests.support.answers import data_of, status_of
from tests.support.applications import chunks_of, goes_on
from tests.support.bodies import CHATS
from tests.support.engines import BLOCK, prompt_of, started
from tests.support.routed import REPLICA, Routed
from tests.support.tiny_vision import TEXTS, blank, image, picture, seeing_model

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]

CACHE_MB = 4  # for seven prompts of 600 tokens
NO_IMAGES: Mapping[str, Callable[[], str]] = {
    "no base64": lambda: "data:image/png;base64,%%%",
    "no data": lambda: "data:,",
    "no image": lambda: "data:image/png;base64,aGVsbG8=",
    "half an image": lambda: picture(1)[: len("data:image/png;base64,") + 8000],
    "too many pixels": lambda: blank(20_000),
    "no scheme": lambda: "x",
    "no server": lambda: "http://127.0.0.1:1/a.png",
    "a file": lambda: "file:///etc/hostname",
}

Content = str | list[Any]


@dataclass(frozen=True)
class Asked:
    cached: int  # prompt tokens
    starts: list[int]  # the first token of each image
    tokens: int
    answer: str


class Seeing(Routed):
    """A model that sees."""

    async def ask(self, *contents: Content, salt: str = "", max_tokens: int = 4) -> Asked:
        """A chat of these messages, by users and assistants in turn. How much of it was cached,
        which the router has expected."""
        await self.receive()
        call = call_of(*contents, max_tokens=max_tokens, **({"cache_salt": salt} if salt else {}))
        rendered = await self.running.engine.render(call)
        ids = np.frombuffer(rendered.token_ids, "<u4")
        placement = self.fleet.place(ids, [REPLICA], 0.0, Scope(namespace=salt), rendered.media)
        chunks = await self.running.run(GenerateRequest("r", ids, salt, call=call))
        assert status_of(chunks) == 200, data_of(chunks)
        assert placement.expected_tokens(REPLICA) == chunks[0].cached_tokens
        answer = json.loads(data_of(chunks))["choices"][0]["message"]["content"]
        starts = [span.offset for span in rendered.media]
        return Asked(chunks[0].cached_tokens, starts, len(ids), answer)

    async def refusal(self, *contents: Content) -> tuple[int, int]:
        """The status of the rendering, and that of the answer."""
        call = call_of(*contents)
        rendered = await self.running.engine.render(call)
        chunks = await self.running.run(GenerateRequest("r", NO_TOKENS, call=call))
        return status_in(rendered), status_of(chunks)


def call_of(*contents: Content, **fields: Any) -> HttpCall:
    messages = [
        {"role": ("user", "assistant")[number % 2], "content": content}
        for number, content in enumerate(contents)
    ]
    body = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 4, **fields}
    return HttpCall(CHATS, json.dumps(body).encode(), 1.0, is_rendered=False)


def status_in(rendered: Rendered) -> int:
    return rendered.refusal.status if rendered.refusal else 200


def text(words: int, seed: int = 0) -> dict[str, Any]:
    """About as many tokens."""
    found = np.random.default_rng(seed).choice(["dog", "cat", "house", "red", "tree"], words)
    return {"type": "text", "text": " ".join([f"{seed}:", *found])}


def whole_blocks(tokens: int) -> int:
    return tokens // BLOCK * BLOCK


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=TEXTS)
async def seeing(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Seeing]:
    """Long prompts take two steps."""
    model = seeing_model(request.param, tmp_path_factory.mktemp("model"))
    async with started(
        "vllm",
        model=str(model),
        max_model_len=2048,
        kv_cache_memory_mb=CACHE_MB,
        engine_args={"max_num_batched_tokens": 512},
    ) as running:
        seeing = Seeing(running)
        yield seeing
        vars(seeing).clear()


async def test_the_same_image_is_cached_in_two_chats(seeing: Seeing) -> None:
    shared = [text(60, seed=1), image(picture(1)), text(60, seed=2)]
    first = await seeing.ask(shared)
    assert first.cached == 0
    again = await seeing.ask(shared)
    assert again.cached == whole_blocks(again.tokens - 1)


async def test_a_prompt_that_continues_one_with_an_image_finds_it(seeing: Seeing) -> None:
    shared = [text(60, seed=3), image(picture(3)), text(60, seed=4)]
    first = await seeing.ask(shared)
    for seed in (5, 6, 7):
        longer = await seeing.ask([*shared, text(80, seed)])
        assert longer.starts == first.starts
    assert longer.cached > first.starts[0] + 100  # the image's tokens, and more


async def test_of_another_image_of_the_same_size_nothing_is_expected(seeing: Seeing) -> None:
    first = await seeing.ask([text(100, seed=8), image(picture(8)), text(60, seed=9)])
    other = await seeing.ask([text(100, seed=8), image(picture(9)), text(60, seed=9)])
    assert (other.tokens, other.starts) == (first.tokens, first.starts)
    assert other.cached <= whole_blocks(first.starts[0])


async def test_elsewhere_an_image_is_another_one(seeing: Seeing) -> None:
    for words in (70, 71, 72, 70):
        found = await seeing.ask([text(words, seed=10), image(picture(10)), text(50, seed=11)])
    assert found.cached == whole_blocks(found.tokens - 1)


async def test_a_second_image_counts_for_what_stands_behind_it(seeing: Seeing) -> None:
    def pair(second: int) -> list[Any]:
        images = [image(picture(12)), text(60, seed=13), image(picture(second))]
        return [text(40, seed=12), *images, text(40, seed=14)]

    for second in (13, 14, 15):
        found = await seeing.ask(pair(second))
    assert found.starts[0] + 100 < found.cached <= found.starts[1]
    assert (await seeing.ask(pair(13))).cached > found.starts[1]


async def test_images_that_share_a_block(seeing: Seeing) -> None:
    tiny = [image(picture(seed, 40, 40)) for seed in (16, 17)]
    for pair in (tiny, tiny[::-1], tiny, [tiny[0]] * 2):
        await seeing.ask([text(40, seed=15), *pair, text(40, seed=16)])


async def test_shorter_and_longer_prompts(seeing: Seeing) -> None:
    parts = [text(100, seed=17), image(picture(18)), text(200, seed=18), image(picture(19))]
    for count in (4, 3, 2, 1, 2, 4):
        await seeing.ask(parts[:count])


async def test_a_chat_goes_on_behind_its_images(seeing: Seeing) -> None:
    chat: list[Content] = [[text(60, seed=19), image(picture(20))]]
    for seed in (21, 22, 23):
        found = await seeing.ask(*chat, max_tokens=40)
        chat += [found.answer, [text(30, seed), image(picture(seed))]]
    last = await seeing.ask(*chat)
    assert last.cached > last.starts[-2]


async def test_salts_keep_images_apart(seeing: Seeing) -> None:
    prompt = [text(60, seed=24), image(picture(24)), text(60, seed=25)]
    assert [(await seeing.ask(prompt, salt=salt)).cached > 0 for salt in ("", "a", "b", "a")] == [
        *(False, False, False),
        True,
    ]


async def test_what_a_flood_has_left_is_expected(seeing: Seeing) -> None:
    prompts = [[text(300, seed), image(picture(seed)), text(150, seed)] for seed in range(30, 42)]
    for prompt in prompts:
        await seeing.ask(prompt)
    left = [(await seeing.ask(prompt)).cached for prompt in reversed(prompts)]
    assert left[0] > 0 == left[-1]


async def test_after_a_reset_an_image_is_computed_again(seeing: Seeing) -> None:
    prompt = [text(60, seed=42), image(picture(42)), text(60, seed=43)]
    await seeing.ask(prompt)
    assert await seeing.running.engine.reset_prefix_cache()
    assert (await seeing.ask(prompt)).cached == 0
    assert (await seeing.ask(prompt)).cached > 0


async def test_an_image_of_a_refused_request_is_not_missed_later(seeing: Seeing) -> None:
    prompt = [text(60, seed=45), image(picture(45))]
    call = call_of(prompt, max_tokens=100_000)
    refused = await seeing.running.run(GenerateRequest("r", NO_TOKENS, call=call))
    assert status_of(refused) == 400
    assert (await seeing.ask(prompt)).cached == 0


async def test_the_pixels_of_an_image_are_processed_once(
    seeing: Seeing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks first, the router or the engine."""
    processor = engine_of(seeing)._llm.renderer.mm_processor
    process, processed = processor._apply_hf_processor_main, list[int]()

    def counting(**given: Any) -> Any:
        processed.append(given["mm_items"].get_count("image", strict=False))
        return process(**given)

    monkeypatch.setattr(processor, "_apply_hf_processor_main", counting)
    for contents in ([50], [50], [50, 51], [51, 50]):
        await seeing.ask([image(picture(seed)) for seed in contents])
    assert sum(processed) == 2


@pytest.mark.parametrize("is_streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.usefixtures("unmerged")
async def test_another_replica_goes_on_behind_an_image(seeing: Seeing, is_streamed: bool) -> None:
    body = {"stream": is_streamed, "max_tokens": 14, "ignore_eos": True}
    call = call_of([text(40, seed=52), image(picture(52)), text(9)], **body)
    request = GenerateRequest("r", NO_TOKENS, call=call)
    await chunks_of(seeing.running, request)
    undisturbed = await chunks_of(seeing.running, request)
    for cut in (1, 5, 12):
        assert await goes_on(seeing.running, request, undisturbed, cut=cut)


@pytest.mark.parametrize("kind", NO_IMAGES)
async def test_what_is_no_image_is_refused(
    seeing: Seeing, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MEDIA_FETCH_MAX_RETRIES", "1")
    statuses = await seeing.refusal([text(9), image(NO_IMAGES[kind]())])
    assert all(400 <= status < 500 for status in statuses), statuses
    await seeing.ask([text(9), image(picture(1))])


async def test_while_an_image_is_loaded_others_are_answered(seeing: Seeing) -> None:
    with held_images() as (waiting, go_on):
        rendering = asyncio.create_task(seeing.running.engine.render(call_of([image(picture(1))])))
        assert await asyncio.to_thread(waiting.wait, 60)
        assert await seeing.running.ask(prompt_of(40, seed=1))
        assert not rendering.done()
        go_on.set()
        assert (await rendering).media


@contextmanager
def held_images() -> Iterator[tuple[threading.Event, threading.Event]]:
    """Images are decoded once the second event is set; the first one: such a one waits."""
    from vllm.multimodal.media import ImageMediaIO

    waiting, go_on = threading.Event(), threading.Event()
    load = ImageMediaIO.load_bytes

    def held(self: Any, data: bytes) -> Any:
        waiting.set()
        go_on.wait(60)
        return load(self, data)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ImageMediaIO, "load_bytes", held)
        try:
            yield waiting, go_on
        finally:
            go_on.set()


def engine_of(seeing: Seeing) -> Any:
    return seeing.running.engine
