"""The request log has a line for each request, replay reads it, and no request waits for it."""

import asyncio
import math
import os
import random
import resource
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvroute.blocks.fingerprint import Fingerprint, MediaSpan
from kvroute.blocks.tiers import HOST
from kvroute.contract.generation import EngineDeadError, GenerateRequest
from kvroute.contract.records import ReplicaRecord, TierFacts
from kvroute.features.gate import Entry
from kvroute.local.before_start import check_request_log
from kvroute.machine.problem import StartError
from kvroute.replay.workload.trace import read
from kvroute.replica.sim_engine.config import SimulatedConfig
from kvroute.replica.sim_engine.simulated import SimulatedEngine
from kvroute.router.observability import request_log
from kvroute.router.observability.request_log import RequestLog
from kvroute.router.placement.attempts import RequestContext
from kvroute.router.placement.fleet import Fleet
from kvroute.router.placement.waits import DEFAULT_URGENCY, NO_WAIT, Urgency, Wait
from kvroute.router.sessions.breaks import Break, Difference, Span
from kvroute.router.sessions.turns import NO_HINTS, SessionHints
from tests.support.answers import completion
from tests.support.chunks import streamed
from tests.support.json_lines import read_lines
from tests.support.records import FACTS, LOAD

BLOCK = 32
SPAN = Span(8, "0a")
KEYS = (
    "timestamp input_length output_length hash_ids block_size model replica reusable_tokens "
    "expected_tokens cached_tokens predicted_ttft_s ttft_s duration_s outcome ledger request_id "
    "replicas step_tokens attention_tokens kv_tokens"
).split()


class Router:
    """A fleet of one simulated engine and its log."""

    def __init__(self, file: Path) -> None:
        self.ranks = 1
        self.engine = SimulatedEngine(SimulatedConfig(prefill_tokens_per_s=0, decode_step_s=0))
        self.log = RequestLog(file, model="m", block_size=BLOCK, ranks=lambda: self.ranks)
        self.fleet = Fleet(
            model="m", revision="", block_size=BLOCK, rng=random.Random(0), observer=self.log
        )
        self.fleet.update([ReplicaRecord("a", "1", 0, FACTS, LOAD)])
        self.fleet.mirror.join("a")

    async def answer(
        self,
        prompt: int,
        *,
        stop_after: int | None = None,
        broken: Break | None = None,
        media: Sequence[MediaSpan] = (),
        tenant: str = "",
        urgency: Urgency = DEFAULT_URGENCY,
        wait: Wait = NO_WAIT,
        hints: SessionHints = NO_HINTS,
        **fields: Any,
    ) -> None:
        """Send a request, receive its chunks and end it, as the dispatcher does."""
        token_ids = np.arange(prompt, dtype=np.uint32)
        request = GenerateRequest("r", token_ids, call=completion(**{"max_tokens": 8} | fields))
        now_s = time.monotonic()
        placement = self.fleet.place(token_ids, ["a"], now_s, media=media)
        context = RequestContext(
            now_s, broken=broken, entry=Entry(tenant), urgency=urgency, wait=wait, hints=hints
        )
        attempt = self.fleet.sent(placement, "a", "r", now_s, context)
        try:
            async with aclosing(streamed(self.engine.generate, request)) as chunks:
                heard = 0
                async for chunk in chunks:
                    attempt.receive(chunk, time.monotonic())
                    heard += 1
                    if heard == stop_after:
                        break
        except EngineDeadError:
            attempt.end("failed")
            raise
        finally:
            attempt.end()


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[Router]:
    router = Router(tmp_path / "log.jsonl")
    yield router
    await router.engine.close()


def lines(path: Path) -> list[dict[str, Any]]:
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    return read_lines(files)


async def logged(router: Router) -> list[dict[str, Any]]:
    await router.log.flush()
    return lines(router.log._file)


async def test_a_line_has_the_prediction_and_the_outcome(router: Router) -> None:
    await router.answer(1000)
    router.fleet.mirror.forget_computed(math.inf)
    router.fleet.mirror.add("a", router.fleet.caches.chain(np.arange(1000, dtype=np.uint32))[:20])
    await router.answer(1000)
    first, second = await logged(router)
    assert list(first) == KEYS
    assert (first["input_length"], first["output_length"], first["outcome"]) == (1000, 8, "ok")
    assert (first["expected_tokens"], first["cached_tokens"]) == (0, 0)
    assert (second["expected_tokens"], second["cached_tokens"]) == (640, 992)
    assert first["predicted_ttft_s"] == pytest.approx(1.0, rel=0.01)
    assert second["predicted_ttft_s"] < 0.36  # the engine proved faster than it said
    assert first["ledger"].items() >= {"new": 992, "tail": 8}.items()
    assert second["ledger"].items() >= {"hit": 640, "unexpected_hit": 352, "tail": 8}.items()
    assert 0 < first["ttft_s"] <= first["duration_s"]
    assert first["replicas"] == 1
    assert first["step_tokens"] == FACTS.step_tokens
    assert first["kv_tokens"] == FACTS.capacity_blocks * FACTS.block_size


async def test_a_line_counts_the_replicas_that_a_waiting_request_was_not_admitted_to(
    router: Router,
) -> None:
    router.ranks = 3
    await router.answer(1000)
    (line,) = await logged(router)
    assert line["replicas"] == 3


async def test_ids_stand_for_128_tokens_and_survive_any_reader(router: Router) -> None:
    await router.answer(300)
    await router.answer(600)
    short, long = await logged(router)
    assert short["block_size"] == 128
    assert [len(line["hash_ids"]) for line in (short, long)] == [2, 4]
    assert long["hash_ids"][:2] == short["hash_ids"]
    assert all(int(float(id_)) == id_ for id_ in long["hash_ids"])


async def test_other_images_have_other_ids(router: Router) -> None:
    for name in ("cat", "dog", "cat"):
        await router.answer(600, media=[MediaSpan(name, 300, 50)])
    cat, dog, again = [line["hash_ids"] for line in await logged(router)]
    assert cat == again
    assert [one == other for one, other in zip(cat, dog, strict=True)] == [True, True, False, False]


@pytest.mark.parametrize(("block_size", "of_one_id"), [(16, 128), (48, 144), (256, 256)])
def test_an_id_stands_for_whole_blocks_of_the_engine(block_size: int, of_one_id: int) -> None:
    log = RequestLog(Path("unused"), model="m", block_size=block_size, ranks=lambda: 1)
    chain = [Fingerprint(1000 + i) for i in range(12)]
    assert log._ids(chain)[0] == chain[of_one_id // block_size - 1]


async def test_a_line_has_the_waits_for_features(router: Router) -> None:
    await router.answer(300, wait=Wait(waited_s=5.0).after_lines({"place": 2.0, "turn": 0.0}))
    (line,) = await logged(router)
    assert (line["queued_s"], line["place_s"]) == (7.0, 2.0)
    assert "turn_s" not in line


async def test_a_line_has_the_place_where_its_chat_changed(router: Router) -> None:
    await router.answer(400, broken=Break("user", 3, Difference(40, SPAN, SPAN, common=300)))
    (line,) = await logged(router)
    assert line["ledger"].items() >= {"broken": 300, "new": 84, "tail": 16}.items()
    assert (line["broken"]["message"], line["broken"]["token"], line["broken"]["tokens"]) == (
        {"index": 3, "role": "user"},
        40,
        300,
    )


async def test_a_line_has_its_tenant_and_replay_reads_it(router: Router) -> None:
    await router.answer(400, tenant="acme")
    await router.answer(400)
    named, nobodys = await logged(router)
    assert named["tenant"] == "acme"
    assert "tenant" not in nobodys
    assert len(read(router.log._file, limit=None, seed=0)) == 2


async def test_a_line_has_the_wait_of_its_request(router: Router) -> None:
    await router.answer(100, urgency=Urgency("batch"), wait=Wait("batch", "busy", 2.5))
    await router.answer(100)
    waited, at_once = await logged(router)
    assert (waited["queued_s"], waited["priority"]) == (2.5, "batch")
    assert at_once["timestamp"] - waited["timestamp"] >= 2500, "it came before it waited"
    assert not {"queued_s", "priority"} & at_once.keys()


async def test_a_line_has_its_session_and_replay_reads_it(router: Router) -> None:
    turns = [SessionHints(2**63 - 1), SessionHints(2**63 - 1, is_end=True), NO_HINTS]
    for hints in turns:
        await router.answer(400, hints=hints)
    first, last, nobodys = await logged(router)
    assert first["session"] == last["session"] == int(float(first["session"]))
    assert (last["session_end"], "session_end" in first) == (True, False)
    assert not {"session", "session_end", "tools"} & nobodys.keys()
    read_back = read(router.log._file, limit=None, seed=0)
    assert [each.session for each in read_back] == 2 * [f"{first['session']}"] + [None]


async def test_a_line_shows_that_a_request_had_tools(router: Router) -> None:
    for hints in (SessionHints(has_tools=True), NO_HINTS):
        await router.answer(400, hints=hints)
    with_tools, without = await logged(router)
    assert with_tools["tools"] is True
    assert "tools" not in without


async def test_a_line_has_the_reason_for_evicted_tokens(router: Router) -> None:
    await router.answer(400)
    chain = router.fleet.caches.chain(np.arange(800, dtype=np.uint32))
    router.fleet.mirror.add("a", chain)
    router.fleet.mirror.remove("a", chain)
    await router.answer(800)
    new, evicted = await logged(router)
    assert "evicted_why" not in new
    assert evicted["ledger"]["evicted"] == 800 - 32 - 384
    assert evicted["evicted_why"] == "usual"


async def test_a_line_has_the_tokens_from_host_memory(router: Router) -> None:
    facts = msgspec.structs.replace(FACTS, host=TierFacts(1000, 1000, 1e9))
    router.fleet.update([ReplicaRecord("a", "1", 0, facts, LOAD)])
    await router.answer(400)
    chain = router.fleet.caches.chain(np.arange(400, dtype=np.uint32))
    router.fleet.mirror.forget_computed(math.inf)
    router.fleet.mirror.add("a", [*chain[:2], *map(HOST.fingerprint, chain)])
    await router.answer(400)
    first, second = await logged(router)
    assert "host_tokens" not in first
    assert second["host_tokens"] == second["cached_tokens"] - 64 > 0


async def test_choices_count_together(router: Router) -> None:
    await router.answer(100, n=3, temperature=1)
    assert [(line["output_length"], line["outcome"]) for line in await logged(router)] == [
        (24, "ok")
    ]


async def test_a_request_whose_client_left_is_cancelled(router: Router) -> None:
    await router.answer(100, max_tokens=5000, stop_after=2)
    (line,) = await logged(router)
    assert line["outcome"] == "cancelled"
    assert line["output_length"] < 5000


async def test_a_failed_request_has_its_own_outcome(router: Router) -> None:
    await router.engine.close()
    with pytest.raises(EngineDeadError):
        await router.answer(100)
    (line,) = await logged(router)
    assert (line["outcome"], line["ttft_s"], line["cached_tokens"]) == ("failed", None, None)


async def test_a_full_disk_drops_lines_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    router = Router(Path("/dev/full"))
    for _ in range(3):
        await router.answer(100)
        await router.log.flush()
    assert router.log.dropped == 3
    assert caplog.messages == [
        "the request log /dev/full has no lines for some requests: "
        "[Errno 28] No space left on device"
    ]
    await router.engine.close()


async def test_a_disk_that_fills_up_keeps_whole_lines(router: Router) -> None:
    await router.answer(100)
    (kept,) = await logged(router)
    await router.answer(100)
    with largest_file(router.log._file.stat().st_size + 50):
        await router.log.flush()
    await router.answer(300)
    assert [line["input_length"] for line in await logged(router)] == [kept["input_length"], 300]
    assert router.log.dropped == 1


async def test_a_disk_that_hangs_drops_lines_without_delaying_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_log, "WAITING_LINES", 2)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # opening it to write hangs until somebody reads
    router = Router(pipe)
    await router.answer(100)
    writing = asyncio.create_task(router.log.flush())
    for _ in range(5):
        await router.answer(100)
    assert not writing.done()
    assert router.log.dropped == 3
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    await writing
    os.close(reader)
    await router.engine.close()


def test_a_folder_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match=r"--request-log is '.*/file'.*set it to another folder"):
        check_request_log(tmp_path / "file")


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limit the size of this process's files to that many bytes within the block."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
