"""Models for speech: transcriptions and translations are those of vLLM's own server."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from kvroute.contract.generation import NO_TOKENS, Chunk, GenerateRequest
from kvroute.contract.http_call import HttpCall, Upload
from tests.support.answers import data_of, status_of
from tests.support.bodies import ASK, CHATS
from tests.support.chunks import collected
from tests.support.engines import started
from tests.support.tiny_audio import CLIP_S, POSITIONS, form, hearing_model, sound
from tests.support.transcriptions import (
    FORMS,
    LONG,
    SHORT,
    SOUNDS,
    TRANSCRIPTIONS,
    TRANSLATIONS,
    VERBOSE,
    Fields,
    plain,
)
from tests.support.waiting import until

pytest.importorskip("soundfile", reason="vLLM reads recordings with the package soundfile")
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]


class Hearing:
    """An engine with a model for speech, and vLLM's own application on it."""

    def __init__(
        self, engine: Any, stock: Callable[..., Awaitable[tuple[int, bytes]]], folder: Path
    ) -> None:
        self.engine = engine
        self.stock = stock
        self._folder = folder
        self._files = 0

    def request(self, path: str, body: bytes, content_type: str) -> GenerateRequest:
        self._files += 1
        file = self._folder / f"{self._files}"
        file.write_bytes(body)
        upload = Upload("u", len(body), content_type, b"", str(file))
        call = HttpCall(path, b"", 1.0, is_rendered=False, upload=upload)
        return GenerateRequest("id-1", NO_TOKENS, "salt", call=call)

    async def chunks(self, path: str, fields: Fields, file: bytes | None) -> list[Chunk]:
        request = self.request(path, *form(fields, file))
        return await collected(self.engine.generate, request)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hearing(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Hearing]:
    from tests.support.stock import stock_answer, stock_app

    folder = tmp_path_factory.mktemp("hearing")
    async with started(
        "vllm",
        model=str(hearing_model(folder / "model")),
        max_model_len=POSITIONS,
        kv_cache_memory_mb=16,
    ) as running:
        engine: Any = running.engine
        app = await stock_app(engine._llm, await engine._llm.get_supported_tasks())
        yield Hearing(engine, partial(stock_answer, app), folder)
        del engine, app


async def differences(
    hearing: Hearing, path: str, forms: Sequence[Fields], file: bytes | None
) -> list[Any]:
    """Return the forms that the engine answers unlike vLLM's own server, with both answers."""
    differing = []
    for fields in forms:
        ours = await hearing.chunks(path, fields, file)
        body, content_type = form(fields, file)
        status, data = await hearing.stock(path, body, content_type=content_type)
        if status_of(ours) != status or plain(data_of(ours)) != plain(data):
            differing.append((fields, data_of(ours)[-300:], data[-300:]))
    return differing


@pytest.mark.parametrize("path", [TRANSCRIPTIONS, TRANSLATIONS])
async def test_it_answers_as_vllms_own_server(hearing: Hearing, path: str) -> None:
    forms = [*FORMS, {**SHORT, "model": "other"}]
    assert await differences(hearing, path, forms, SOUNDS["short"]) == []


@pytest.mark.parametrize("name", SOUNDS)
async def test_each_recording_is_heard_as_vllm_hears_it(hearing: Hearing, name: str) -> None:
    forms = [SHORT, {**SHORT, "stream": "true"}, {**SHORT, **VERBOSE}]
    assert await differences(hearing, TRANSCRIPTIONS, forms, SOUNDS[name]) == []


async def test_other_recordings_have_other_texts(hearing: Hearing) -> None:
    """Nothing is read from a cache."""
    answers = [
        data_of(await hearing.chunks(TRANSCRIPTIONS, LONG, sound(seed))) for seed in (1, 2, 1)
    ]
    texts = [json.loads(answer)["text"] for answer in answers]
    assert texts[0] == texts[2] != texts[1]
    assert len(texts[0]) > 20
    assert not hearing.engine.facts.prefix_caching


async def test_the_segments_of_a_recording_have_times(hearing: Hearing) -> None:
    answer = json.loads(
        data_of(await hearing.chunks(TRANSCRIPTIONS, {**LONG, **VERBOSE}, SOUNDS["short"]))
    )
    assert (answer["duration"], answer["language"]) == (1.0, "en")
    assert answer["text"]
    assert answer["segments"][0]["end"] > 0


async def test_a_form_without_a_file_is_refused(hearing: Hearing) -> None:
    (chunk,) = await hearing.chunks(TRANSCRIPTIONS, SHORT, None)
    assert chunk.http
    assert chunk.http.status == 400
    assert b"file" in chunk.http.data


async def test_no_other_replica_continues_an_answer(hearing: Hearing) -> None:
    """It would have to know which part of the answer each token belongs to."""
    for chunk in await hearing.chunks(TRANSCRIPTIONS, {**SHORT, "stream": "true"}, sound(1)):
        assert chunk.http
        assert not chunk.http.can_continue


async def test_a_chat_is_refused_as_vllm_refuses_it(hearing: Hearing) -> None:
    body = {"model": "m", "messages": ASK}
    call = HttpCall(CHATS, json.dumps(body).encode(), 1.0, is_rendered=False)
    ours = await collected(hearing.engine.generate, GenerateRequest("id-1", NO_TOKENS, call=call))
    assert (status_of(ours), data_of(ours)) == await hearing.stock(CHATS, body)
    assert status_of(ours) == 404


async def test_nothing_runs_for_a_client_that_has_left(hearing: Hearing) -> None:
    states = hearing.engine._llm.output_processor.request_states
    long = sound(1, seconds=40 * CLIP_S)
    fields = {"language": "en"}
    asking = asyncio.create_task(hearing.chunks(TRANSCRIPTIONS, fields, long))
    await until(lambda: len(states) > 0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert asking.cancelled()
    await until(lambda: not states)


async def test_tokens_that_nobody_reads_are_refused(hearing: Hearing) -> None:
    """Those of a named prefix and of a canary; the replica goes on."""
    ids = np.arange(32, dtype=np.uint32)
    with pytest.raises(ValueError, match="recording"):
        await collected(hearing.engine.generate, GenerateRequest("r-1", ids))
    assert status_of(await hearing.chunks(TRANSCRIPTIONS, SHORT, sound(1))) == 200
