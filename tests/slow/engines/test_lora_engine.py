"""Requests under LoRA adapters: asked of the simulated engine and of vLLM with real adapters."""

import asyncio
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from kvroute.blocks.fingerprint import Fingerprint, fingerprints, root
from kvroute.contract.generation import GenerateRequest
from kvroute.features.adapters.adapter_files import check_files
from kvroute.features.adapters.added import AddedAdapter
from tests.support.adapters import write_adapter
from tests.support.answers import completion, events_of, ids_of, status_of
from tests.support.engines import (
    BLOCK,
    BROKEN,
    LATE,
    LAYERS,
    NAMES,
    TOKENS,
    WIDTH,
    Running,
    prompt_of,
    request_of,
    rest_of,
)
from tests.support.waiting import until

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]


def under(lora: str, prompt: list[int], namespace: str = "") -> GenerateRequest:
    return replace(request_of(prompt, namespace), variant=lora)


def chain_of(prompt: list[int], lora: str, namespace: str = "") -> set[Fingerprint]:
    parent = root(model="m", block_size=BLOCK, variant=lora, namespace=namespace)
    return set(fingerprints(np.array(prompt, np.uint32), block_size=BLOCK, parent=parent))


async def cached_tokens(running: Running, request: GenerateRequest) -> int:
    return (await running.run(request))[0].cached_tokens


async def test_an_adapter_shares_blocks_with_itself_alone(running: Running) -> None:
    prompt = prompt_of(200, seed=51)
    for lora in ("", "sql", "law"):
        assert await cached_tokens(running, under(lora, prompt)) == 0
        assert await cached_tokens(running, under(lora, prompt)) == 192


async def test_the_events_tell_an_adapters_fingerprints(running: Running) -> None:
    prompt = prompt_of(200, seed=52)
    await running.run(under("sql", prompt))
    await until(lambda: chain_of(prompt, "sql") <= set(running.table.held()))
    assert not chain_of(prompt, "") & set(running.table.held())


async def test_a_salt_that_is_called_like_the_adapter_is_still_a_salt(running: Running) -> None:
    prompt = prompt_of(200, seed=53)
    await running.run(under("sql", prompt, namespace="sql"))
    await until(lambda: chain_of(prompt, "sql", "sql") <= set(running.table.held()))
    assert not chain_of(prompt, "sql") & set(running.table.held())


async def test_adapters_answer_otherwise_than_the_model_and_each_other(running: Running) -> None:
    if running.engine.facts.engine == "simulated":
        pytest.skip("what it says comes from the prompt alone")
    prompt = prompt_of(100, seed=54)
    answers = [ids_of(await running.run(under(lora, prompt))) for lora in ("", "sql", "law")]
    assert len({tuple(answer) for answer in answers}) == 3
    assert ids_of(await running.run(under("sql", prompt))) == answers[1]


async def test_the_adapter_that_was_used_least_recently_makes_room(running: Running) -> None:
    for lora in ("sql", "law", "sql", "poems"):
        await running.run(under(lora, prompt_of(40, seed=55)))
    load = running.engine.load()
    assert set(load.variants) == {"sql", "poems"}
    assert load.setup_s > 0


async def test_more_adapters_at_once_than_one_batch_takes_are_all_answered(
    running: Running,
) -> None:
    prompt = prompt_of(100, seed=56)
    asked = (running.run(under(lora, prompt)) for lora in ("", *NAMES, *NAMES))
    answers = await asyncio.gather(*asked)
    assert {len(ids_of(answer)) for answer in answers} == {TOKENS}


async def test_an_adapter_that_is_unknown_is_refused_by_name(running: Running) -> None:
    with pytest.raises(ValueError, match=r"no LoRA adapter 'nobody'.*sql"):
        await running.run(under("nobody", prompt_of(40, seed=57)))


async def test_an_adapter_that_cannot_be_loaded_costs_its_own_requests_only(
    running: Running,
) -> None:
    if running.engine.facts.engine == "simulated":
        pytest.skip("it reads no weights")
    with pytest.raises(ValueError, match=f"'{BROKEN}' cannot be loaded from .*{BROKEN}"):
        await running.run(under(BROKEN, prompt_of(40, seed=58)))
    await running.engine.check()
    assert await cached_tokens(running, under("", prompt_of(40, seed=58))) == 0


def late(running: Running, name: str = LATE) -> AddedAdapter:
    """Return the adapter that is added after the engine's start."""
    folder = running.root / name
    files = check_files(str(folder), running.root, max_rank=16)
    return AddedAdapter(name=name, path=str(folder), digest=files.digest, rank=files.rank)


@pytest.mark.parametrize(
    ("name", "files", "why"),
    [
        ("deeper", {"layers": LAYERS + 1}, f"more layers than the model 'm', such as .*{LAYERS}"),
        ("other", {"prefix": "base_model.model.decoder.h."}, "none of its weights .* model 'm'"),
    ],
)
async def test_an_adapter_of_another_model_is_refused(
    running: Running, name: str, files: dict[str, Any], why: str
) -> None:
    if running.engine.facts.engine == "simulated":
        pytest.skip("it reads no weights")
    write_adapter(running.root / name, seed=1, width=WIDTH, **{"layers": LAYERS, **files})
    adapter = late(running, name)
    running.engine.admit_adapter(adapter.as_adapter)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"adapter '{name}' cannot be loaded.*{why}"):
            await running.engine.load_adapter(adapter.key)
    assert adapter.key not in running.engine.load().variants
    await running.engine.drop_adapter(adapter.key)
    await running.run(under("sql", prompt_of(40, seed=63)))


def under_late(adapter: AddedAdapter, prompt: list[int]) -> GenerateRequest:
    call = completion(model=LATE, max_tokens=TOKENS)
    call = replace(call, variant=adapter.key)
    return replace(request_of(prompt), variant=adapter.key, call=call)


async def test_an_adapter_is_added_and_dropped_while_the_engine_runs(running: Running) -> None:
    adapter, prompt = late(running), prompt_of(200, seed=60)
    request = under_late(adapter, prompt)
    with pytest.raises(ValueError, match="no LoRA adapter"):
        await running.run(request)
    running.engine.admit_adapter(adapter.as_adapter)
    await running.engine.load_adapter(adapter.key)
    assert adapter.key in running.engine.load().variants
    first = await running.run(request)
    assert events_of(first)[0]["model"] == LATE
    assert first[0].cached_tokens == 0
    assert await cached_tokens(running, request) == 192
    await until(lambda: chain_of(prompt, adapter.key) <= set(running.table.held()))
    await running.engine.drop_adapter(adapter.key)
    assert adapter.key not in running.engine.load().variants
    with pytest.raises(ValueError, match="no LoRA adapter"):
        await running.run(request)


async def test_an_added_adapter_answers_as_it_did_before_it_was_dropped(running: Running) -> None:
    adapter, prompt = late(running), prompt_of(100, seed=61)
    answers = []
    for _ in range(2):
        running.engine.admit_adapter(adapter.as_adapter)
        answers.append(ids_of(await running.run(under_late(adapter, prompt))))
        await running.engine.drop_adapter(adapter.key)
    base = ids_of(await running.run(request_of(prompt)))
    assert answers[0] == answers[1]
    if running.engine.facts.engine == "vllm":
        assert answers[0] != base


async def test_the_name_of_an_added_adapter_is_known_to_its_own_requests_only(
    running: Running,
) -> None:
    if running.engine.facts.engine == "simulated":
        pytest.skip("it does not check the field model")
    adapter, prompt = late(running), prompt_of(40, seed=62)
    running.engine.admit_adapter(adapter.as_adapter)
    stranger = replace(request_of(prompt), call=completion(model=LATE, max_tokens=TOKENS))
    assert status_of(await running.run(under_late(adapter, prompt))) == 200
    assert status_of(await running.run(stranger)) == 404
    await running.engine.drop_adapter(adapter.key)


async def test_an_answer_goes_on_under_its_adapter(running: Running) -> None:
    if running.engine.facts.engine == "simulated":
        pytest.skip("what it says comes from the prompt alone")
    request = under("law", prompt_of(100, seed=59))
    whole = await running.run(request)
    while whole[0].is_last:  # the engine was faster than this process
        whole = await running.run(request)
    assert ids_of(whole[:1] + await running.run(rest_of(request, whole[:1]))) == ids_of(whole)
