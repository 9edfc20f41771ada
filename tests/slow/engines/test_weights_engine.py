"""Engines that load other weights: the simulated one, and vLLM with two sets of random weights."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from kvroute.blocks.fingerprint import Fingerprint, fingerprints, root
from tests.support.answers import ids_of
from tests.support.engines import BLOCK, Running, prompt_of, shallow_model, started
from tests.support.waiting import until
from tests.support.weights import random_weights

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]

KEY = "step-1@1"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The model's folder, and one with other weights."""
    folder = tmp_path_factory.mktemp("weights")
    old = shallow_model(folder / "old")
    return old, random_weights(old, folder / "new", seed=1)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["simulated", "vllm"])
async def updated(
    request: pytest.FixtureRequest, folders: tuple[Path, Path]
) -> AsyncIterator[Running]:
    """An engine with all tiers: host memory, pulls, and for vLLM a disk."""
    options: dict[str, Any] = {"host_cache_gb": "0.05", "simulated_blocks": 90, "pull": "on"}
    if request.param == "vllm":
        options |= {"disk_cache": folders[0].parent / "cache", "disk_cache_gb": 0.1}
    async with started(request.param, model=str(folders[0]), **options) as running:
        yield running


def formats(folders: tuple[Path, Path]) -> set[str]:
    """Return the formats of the blocks that are on the disk."""
    files = (folders[0].parent / "cache").glob("*/*/*.kv")
    return {file.parent.parent.name for file in files}


def chain_of(prompt: list[int], weights: str) -> set[Fingerprint]:
    parent = root(model="m", block_size=BLOCK, weights=weights)
    return set(fingerprints(np.array(prompt, np.uint32), block_size=BLOCK, parent=parent))


async def test_new_weights_find_nothing_of_the_old_ones_and_answer_otherwise(
    updated: Running, folders: tuple[Path, Path]
) -> None:
    prompt, own = prompt_of(200, seed=1), updated.engine
    old_format, is_vllm = own.facts.format, own.facts.engine == "vllm"
    before = await updated.ask(prompt)
    await updated.pin("prefix", prompt)
    await until(lambda: chain_of(prompt, "") <= set(updated.table.held()))
    await own.load_weights(str(folders[1]), KEY)
    assert (own.facts.weights, dict(own.pins)) == (KEY, {})
    assert own.facts.format not in ("", old_format)
    await until(lambda: not updated.table.held())
    after = await updated.ask(prompt)
    assert after[0].cached_tokens == 0
    assert ids_of(after) != ids_of(before)
    again = await updated.ask(prompt)
    assert (again[0].cached_tokens, ids_of(again)) == (192, ids_of(after))
    await until(lambda: chain_of(prompt, KEY) <= set(updated.table.held()))
    assert not chain_of(prompt, "") & set(updated.table.held())
    if is_vllm:  # the blocks on the disk have the new format, too
        await until(lambda: formats(folders) == {own.facts.format[:32]})
    assert not (await updated.compare()).drift
    await own.load_weights(str(folders[0]), "")
    assert own.facts.format == old_format
    assert ids_of(await updated.ask(prompt)) == ids_of(before)


async def test_updated_engines_answer_as_engines_that_start_with_the_weights(
    updated: Running, folders: tuple[Path, Path]
) -> None:
    if updated.engine.facts.engine == "simulated":
        pytest.skip("its answers depend on the key of the weights")
    prompt = prompt_of(300, seed=2)
    await updated.engine.load_weights(str(folders[1]), KEY)
    answer = ids_of(await updated.ask(prompt))
    async with started("vllm", model=str(folders[1])) as fresh:
        assert ids_of(await fresh.ask(prompt)) == answer
