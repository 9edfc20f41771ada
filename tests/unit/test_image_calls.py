"""The replica that answered a chat with the first image renders the next one with it."""

import json
import random
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvroute.blocks.fingerprint import MediaSpan
from kvroute.contract.http_call import Rendered, decode_call, encode_rendered
from kvroute.replica.sim_engine.config import SimulatedConfig
from kvroute.replica.sim_engine.simulated import SimulatedEngine
from kvroute.router.api.calls import MESSAGES, parse_call
from kvroute.router.placement.attempts import RequestContext
from kvroute.router.placement.fleet import Fleet
from kvroute.router.prompts.image_affinity import ImageAffinity
from kvroute.router.serving.rendering import Renderer
from tests.support.wired import Wired, dispatcher_of, questions_of

INSTANT = SimulatedConfig(prefill_tokens_per_s=0, decode_step_s=0, decode_per_seq_s=0)
IDS = np.full(100, 7, "<u4")
SHOWN = 40  # the first token of the image


class Router:
    """The parts of a router that render and place requests."""

    def __init__(self) -> None:
        self.engines = {f"r{number}": SimulatedEngine(INSTANT) for number in range(4)}
        self.rendered: list[str] = []  # by whom
        self.wired = Wired({id_: engine.generate for id_, engine in self.engines.items()})
        for id_, server in self.wired.servers.items():
            server.methods = {"render": partial(self._render, id_)}
        fleet = Fleet(model="m", revision="", block_size=32, rng=random.Random(0))
        composer: Any = None  # routers do not render this route's bodies
        self.dispatcher, self.affinity = dispatcher_of(self.wired, fleet), ImageAffinity()
        questions = questions_of(self.wired, self.dispatcher)
        self.renderer = Renderer(
            questions, fleet, composer, self.affinity, max_model_len=lambda: 1000
        )

    async def _render(self, id_: str, packed: bytes, rank: int) -> bytes:
        self.rendered.append(id_)
        (message,) = json.loads(decode_call(packed).body)["messages"]
        shown = MediaSpan(message["content"][0]["source"]["data"], SHOWN, 20)
        return encode_rendered(Rendered(IDS.tobytes(), is_text=False, media=(shown,)))

    async def ask(self, image: str) -> tuple[str, str]:
        """Send a chat with this image; return the replicas that rendered it and that got it."""
        source = {"type": "base64", "media_type": "image/png", "data": image}
        messages = [{"role": "user", "content": [{"type": "image", "source": source}]}]
        body = json.dumps({"model": "m", "max_tokens": 4, "messages": messages}).encode()
        call = parse_call(MESSAGES, body)
        rendered = await self.renderer.render(call, None)
        assert [span.identifier for span in rendered.media] == [image]
        assert rendered.image is not None
        context = RequestContext(time.monotonic(), media=rendered.media)
        ((prompt, http),) = rendered.prompts()
        generation = await self.dispatcher.generate(prompt, http, context)
        generation.close()
        self.affinity.record(rendered.image, generation.replica_id)
        return self.rendered[-1], generation.replica_id


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    router = Router()
    async with router.wired:
        yield router
    for engine in router.engines.values():
        await engine.close()


async def test_the_replica_that_answered_renders_the_next_turn(router: Router) -> None:
    moved = 0
    for number in range(20):
        rendered_by, answered_by = await router.ask(f"image {number}")
        moved += rendered_by != answered_by
        for _ in range(2):
            before = answered_by
            rendered_by, answered_by = await router.ask(f"image {number}")
            assert rendered_by == before
    assert moved  # else this would not tell


async def test_new_images_are_spread_over_the_replicas(router: Router) -> None:
    for number in range(40):
        await router.ask(f"image {number}")
    assert set(router.rendered) == set(router.engines)
