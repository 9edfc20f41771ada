"""All parts of a model's router can be built in a process without Ray, Redis and replicas."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvroute.features import FEATURES
from kvroute.router.prompts.tokenizer import Prompts
from kvroute.router.serving.model_router import Lifecycle, ModelRouter
from kvroute.router.serving.status import feature_states
from tests.support.router_parts import FEATURES_ON, builtin_prompts, fake_parts


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Prompts]:
    prompts = builtin_prompts()
    yield prompts
    prompts.close()


OPTIONS = {
    "defaults": {},
    "everything on": {
        "lora_root": Path("/adapters"),
        "request_log": Path("/requests"),
        "features": FEATURES_ON,
    },
    "everything off": {"metrics": False},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
async def test_the_parts_of_a_router_are_built_in_an_order_that_works(
    tokenizer: Prompts, options: dict[str, Any]
) -> None:
    parts = fake_parts(tokenizer, **options)
    router = ModelRouter(parts)
    for coroutine in Lifecycle(parts).coroutines().values():
        coroutine.close()
    assert router.status.queue()["all_routers"]["requests"] == 0
    names = {feature.name for feature in FEATURES if feature.has_state}
    assert feature_states([router.status]).keys() == names
