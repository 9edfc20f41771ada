"""Weights that are updated while a cluster runs: fingerprints, files, pauses and requests."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvroute.blocks.chain import Scope, Space
from kvroute.contract.generation import (
    Chunk,
    EngineDeadError,
    GenerateRequest,
    OtherWeightsError,
)
from kvroute.replica.engine.pause import Pause
from kvroute.replica.sim_engine.config import SimulatedConfig
from kvroute.replica.sim_engine.simulated import SimulatedEngine
from kvroute.router.api.errors import ApiError
from kvroute.router.placement.attempts import RequestContext
from kvroute.router.placement.fleet import Fleet
from kvroute.weights.files import check_weights, folder_in
from kvroute.weights.version import NAME
from tests.support.answers import completion, ids_of
from tests.support.chunks import emitting, streamed
from tests.support.records import record
from tests.support.weights import empty_weights
from tests.support.wired import Wired, dispatcher_of

BLOCK = 4
PROMPT = np.arange(40, dtype=np.uint32)
INSTANT = SimulatedConfig(
    block_size=BLOCK,
    prefill_tokens_per_s=0,
    decode_step_s=0.002,
    decode_per_seq_s=0,
    weights_load_s=0,
)

keys = st.from_regex(rf"({NAME}@[0-9]{{1,18}})?", fullmatch=True)
texts = st.text(max_size=8)
token_ids = st.lists(st.integers(0, 2**32 - 1), min_size=BLOCK, max_size=40)
scopes = st.builds(Scope, lora=texts, namespace=texts, shared_tokens=st.sampled_from([0, BLOCK]))
names = st.tuples(texts, texts)  # of a model and its revision


# Fingerprints.


@given(token_ids, token_ids, keys, keys, scopes, scopes, names, names)
def test_no_chains_of_two_weights_share_a_fingerprint(
    one: list[int],
    other: list[int],
    weights: str,
    others: str,
    scope: Scope,
    other_scope: Scope,
    name: tuple[str, str],
    other_name: tuple[str, str],
) -> None:
    if weights == others:
        return
    mine = Space(*name, BLOCK, weights).chain(np.array(one, np.uint32), scope)
    theirs = Space(*other_name, BLOCK, others).chain(np.array(other, np.uint32), other_scope)
    assert not {*mine} & {*theirs}


# Files.


def problem(source: Path, root: Path, model: Path | None) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the callers check the message
        check_weights(source, root, model)
    return str(error.value)


def test_weights_with_the_models_tensors_fit(tmp_path: Path) -> None:
    model = empty_weights(tmp_path / "model", dtype="BF16")
    (model / "config.json").write_text('{"hidden_size": 2, "torch_dtype": "bfloat16"}')
    source = empty_weights(tmp_path / "new")
    check_weights(source, tmp_path, model)
    (source / "config.json").write_text('{"hidden_size": 2, "_name_or_path": "new"}')
    check_weights(source, tmp_path, model)
    check_weights(source, tmp_path, None)


def test_weights_of_another_model_are_refused_with_the_difference(tmp_path: Path) -> None:
    model = empty_weights(tmp_path / "model")
    assert "lacks 1 tensor: w" in problem(empty_weights(tmp_path / "a", name="x"), tmp_path, model)
    assert "has the shape [3]" in problem(
        empty_weights(tmp_path / "b", shape=(3,)), tmp_path, model
    )
    assert "has the type I32" in problem(
        empty_weights(tmp_path / "c", dtype="I32"), tmp_path, model
    )
    source = empty_weights(tmp_path / "d")
    for folder, theta in ((model, 1), (source, 2)):
        (folder / "config.json").write_text(f'{{"rope_theta": {theta}}}')
    assert "differs from the model's in rope_theta" in problem(source, tmp_path, model)


def test_broken_and_missing_files_are_refused(tmp_path: Path) -> None:
    source = empty_weights(tmp_path / "root" / "cut")
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    root = tmp_path / "root"
    assert "copy the file again" in problem(source, root, None)
    assert "is not a folder" in problem(root / "gone", root, None)
    (root / "empty").mkdir()
    assert "has no safetensors files" in problem(root / "empty", root, None)
    outside = empty_weights(tmp_path / "outside")
    (root / "empty" / "model.safetensors").symlink_to(outside / "model.safetensors")
    assert "is a link out of" in problem(root / "empty", root, None)
    with pytest.raises(ValueError, match="--weights-root"):
        folder_in(root, "../outside")


# Pauses.


async def test_a_pause_begins_after_the_last_request_and_holds_back_new_ones() -> None:
    pause, done, ends = Pause(), list[str](), asyncio.Event()

    async def use(name: str, until: asyncio.Event | None, *, is_continued: bool = False) -> None:
        async with pause.outside(is_continued=is_continued):
            if until:
                await until.wait()
            done.append(name)

    async def update() -> None:
        async with pause.begin("an update"):
            done.append("update")
            tasks.append(asyncio.create_task(use("late", None, is_continued=True)))
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(use("running", ends))]
    await asyncio.sleep(0)
    updating = asyncio.create_task(update())
    await asyncio.sleep(0)
    assert pause.is_near
    tasks.append(asyncio.create_task(use("new", None)))
    await use("continued", None, is_continued=True)
    assert done == ["continued"]
    ends.set()
    await asyncio.gather(updating, *tasks)
    await asyncio.gather(*tasks)
    assert done[:3] == ["continued", "running", "update"]
    assert {*done[3:]} == {"new", "late"}
    assert not pause.is_near


# Requests.


class Client:
    """Sends requests to replicas with different weights; the one with the id `dies` ends early."""

    def __init__(self, weights: Mapping[str, str], *, dies: str = "", has_records: bool) -> None:
        self.weights, self._dies = weights, dies
        self.engines = {id_: SimulatedEngine(INSTANT) for id_ in weights}
        self.fleet = Fleet(model="m", revision="", block_size=BLOCK, rng=random.Random(0))
        if has_records:
            self.fleet.update([record(id_, weights=key) for id_, key in weights.items()])
        self.asked: list[str] = []
        generates = {id_: emitting(partial(self._chunks, id_)) for id_ in weights}
        self.wired = Wired(generates)
        self.dispatcher = dispatcher_of(self.wired, self.fleet)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["Client"]:
        for id_, engine in self.engines.items():
            await engine.load_weights("", self.weights[id_])
        async with self.wired:
            yield self
        for engine in self.engines.values():
            await engine.close()

    async def _chunks(self, id_: str, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        self.asked.append(id_)
        own = self.engines[id_].facts.weights
        if request.weights not in (None, own):
            raise OtherWeightsError(own)
        number = 0
        async with aclosing(streamed(self.engines[id_].generate, request)) as chunks:
            async for chunk in chunks:
                yield chunk if number else replace(chunk, weights=own)
                number += 1
                if number == 3 and id_ == self._dies:
                    raise EngineDeadError("as planned")

    async def ask(self, **fields: Any) -> list[int]:
        call = completion(**{"max_tokens": 12} | fields)
        generation = await self.dispatcher.generate(PROMPT, call, RequestContext(time.monotonic()))
        chunks = []
        while chunk := await generation.next():
            chunks.append(chunk)
        return ids_of(chunks)[-12:]


async def answer_of(weights: str) -> list[int]:
    async with Client({"only": weights}, has_records=True).serving() as client:
        return await client.ask()


async def lost_answer(weights: Mapping[str, str], *, has_records: bool, stream: bool) -> list[int]:
    """Let the replica `old-1` die while it answers, and return the answer."""
    client = Client(weights, dies="old-1", has_records=has_records)
    async with client.serving():
        for _ in range(50):  # until the router chooses the replica that dies
            client.asked.clear()
            try:
                answer = await client.ask(stream=stream)
            finally:
                began = client.asked[:1] == ["old-1"]
            if began:
                return answer
    raise AssertionError("the replica was never chosen")


@pytest.mark.parametrize("has_records", [True, False])
async def test_an_answer_goes_on_only_with_the_weights_that_began_it(has_records: bool) -> None:
    weights = {"old-1": "a@1", "new-1": "b@2", "new-2": "b@2", "old-2": "a@1"}
    answer = await lost_answer(weights, has_records=has_records, stream=True)
    assert answer == await answer_of("a@1") != await answer_of("b@2")


@pytest.mark.parametrize("has_records", [True, False])
async def test_an_answer_whose_weights_are_gone_ends_if_the_client_has_a_part(
    has_records: bool,
) -> None:
    with pytest.raises(ApiError, match="no replica has the weights"):
        await lost_answer({"old-1": "a@1", "new": "b@2"}, has_records=has_records, stream=True)


async def test_an_answer_whose_weights_are_gone_begins_again_if_the_client_has_nothing() -> None:
    weights = {"old-1": "a@1", "new": "b@2"}
    answer = await lost_answer(weights, has_records=True, stream=False)
    assert answer == await answer_of("b@2")


# Placement.


def placed_fleet() -> Fleet:
    fleet = Fleet(model="m", revision="", block_size=BLOCK, rng=random.Random(0))
    fleet.update([record("old", weights="a@1"), record("new", weights="b@2")])
    for id_ in ("old", "new"):
        fleet.mirror.join(id_)
    return fleet


@pytest.mark.parametrize(("holder", "weights"), [("old", "a@1"), ("new", "b@2")])
def test_prompts_find_the_blocks_of_each_weights(holder: str, weights: str) -> None:
    fleet = placed_fleet()
    fleet.mirror.add(holder, fleet.caches.chain(PROMPT, weights=weights))
    placement = fleet.place(PROMPT, ["old", "new"], 0.0)
    assert placement.ranking[0].replica_id == holder
    assert placement.weights == weights
    assert placement.best_hit_blocks == 9
    assert fleet.caches.holders(PROMPT[:8]) == {holder}


def test_blocks_of_other_weights_are_no_hits_and_not_expected() -> None:
    fleet = placed_fleet()
    fleet.mirror.add("old", fleet.caches.chain(PROMPT, weights="b@2"))
    assert fleet.place(PROMPT, ["old"], 0.0).best_hit_blocks == 0
    fleet = placed_fleet()
    fleet.mirror.add("old", fleet.caches.chain(PROMPT, weights="a@1"))
    placement = fleet.place(PROMPT, ["old", "new"], 0.0)
    attempt = fleet.sent(placement, "new", "r", 0.0)
    assert attempt.dispatch.expected.blocks == ()
    assert fleet.sent(placement, "old", "s", 0.0).dispatch.new_tokens == 4
