"""Each line of a batch has one result that counts, whichever router is stopped or goes on."""

import asyncio
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from kvroute.batch.prepare import Part, Preparation, Prepared, run
from kvroute.features.batches.batch_state import BatchState
from kvroute.features.batches.output import Output
from kvroute.features.batches.records import KINDS, BatchRecord, Kind, Run, new_batch_id
from kvroute.features.batches.stores.folder import Folder

LINES = 8
CHAT = "/v1/chat/completions"


def write_input(path: Path, count: int = LINES) -> None:
    lines = [{"custom_id": str(n), "url": CHAT, "body": {"n": n}} for n in range(count)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def record(id_: str) -> BatchRecord:
    return BatchRecord(
        id_,
        "",
        input_file_id="file-1",
        endpoint=CHAT,
        completion_window="24h",
        created_at=1,
        expires_at=2,
        output_file_id="file-2",
        error_file_id="file-3",
    )


@dataclass
class Router:
    """A router that runs the batch, or believes that it does."""

    run: Run
    output: Output
    left: list[int]
    report: Prepared = field(default_factory=Prepared)


class Place:
    """A batch in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = Folder(folder / "store")
        self.state = BatchState(self.store, new_batch_id())
        self.input = folder / "input.jsonl"
        write_input(self.input)

    async def begin(self, name: str = "router") -> Router:
        """Begin a run, as a router does."""
        claimed = await self.state.claim(name)
        assert claimed is not None
        parts = [
            Part(
                str(await self.store.path_of(self.state.name(segment.name))),
                segment.size,
                kind == "errors",
            )
            for kind in KINDS
            for segment in claimed.segments(kind)
        ]
        remaining = self.folder / f"remaining-{claimed.number}.npy"
        index = self.folder / "index"
        job = Preparation(str(self.input), CHAT, str(index), str(remaining), tuple(parts))
        report = run(job)
        left = [int(line) for line in np.load(remaining)]
        return Router(claimed, Output(self.state, claimed), left, report)

    async def results(self, kind: Kind) -> list[dict[str, Any]]:
        snapshot = await self.state.snapshot()
        assert snapshot is not None
        segments = await self.state.results(snapshot, kind)
        size = sum(segment.size for segment in segments)
        text = b"".join([chunk async for chunk in self.state.lines(segments, 0, size)])
        assert len(text) == size
        return [json.loads(line) for line in text.splitlines()]


class OneResultForEachLine(RuleBasedStateMachine):
    """Routers begin, answer lines, lose their disk in the middle of a line, go on and finish."""

    routers = Bundle("routers")

    def __init__(self) -> None:
        super().__init__()
        self.temporary = TemporaryDirectory()
        self.place = Place(Path(self.temporary.name))
        self.ended: set[tuple[str, ...]] = set()
        self.loop = asyncio.Runner()
        self.loop.run(self.place.state.create(record(self.place.state.id)))

    def teardown(self) -> None:
        self.loop.close()
        self.place.store.close()
        self.temporary.cleanup()

    @precondition(lambda self: not self.ended)
    @rule(target=routers)
    def begin(self) -> Router:
        return self.loop.run(self.place.begin())

    @rule(router=routers, count=st.integers(1, 4), status=st.sampled_from([200, 400]))
    def answer(self, router: Router, count: int, status: int) -> None:
        for _ in range(min(count, len(router.left))):
            line = str(router.left.pop())
            router.output.write(line, status=status, request_id="r", body=b"{}")
        self.loop.run(router.output.sync())

    @rule(router=routers, kind=st.sampled_from(KINDS))
    def die_while_writing(self, router: Router, kind: Kind) -> None:
        """The router writes half a line, and nothing afterwards."""
        self.loop.run(self.place.state.append(router.run, kind, b'{"custom_id": "'))
        router.left, router.output = [], Output(self.place.state, router.run)
        router.report = Prepared(faults=("dead",))  # type: ignore[arg-type]

    @rule(router=routers)
    def finish(self, router: Router) -> None:
        if not router.left and not router.report.faults:
            self.loop.run(self.place.state.finish(router.run, "completed"))

    @invariant()
    def no_line_has_two_results_and_a_finished_batch_has_all_and_never_changes(self) -> None:
        results, has_ended = self.loop.run(self.seen())
        ids = [result["custom_id"] for result in results]
        assert len(ids) == len(set(ids))
        if has_ended:
            self.ended.add(tuple(sorted(result["id"] for result in results)))
            assert len(results) == LINES
            assert len(self.ended) == 1

    async def seen(self) -> tuple[list[dict[str, Any]], bool]:
        """Return all results, and whether the batch has ended."""
        snapshot = await self.place.state.snapshot()
        results = [result for kind in KINDS for result in await self.place.results(kind)]
        return results, snapshot is not None and bool(snapshot.end)


OneResultForEachLine.TestCase.settings = settings(stateful_step_count=25)
TestOneResultForEachLine = OneResultForEachLine.TestCase


async def created(folder: Path) -> Place:
    """Return a place with a new batch."""
    place = Place(folder)
    await place.state.create(record(place.state.id))
    return place


async def test_a_run_goes_on_where_the_earlier_ones_ended(tmp_path: Path) -> None:
    place = await created(tmp_path)
    first = await place.begin()
    assert (first.report.total, first.left) == (LINES, list(range(LINES)))
    body = b'{"usage": {"prompt_tokens": 5, "completion_tokens": 2}}'
    first.output.write("3", status=200, request_id="r", body=body)
    first.output.write("4", status=404, request_id="r", body=b"{}")
    await first.output.sync()
    second = await place.begin()
    report = second.report
    assert second.left == [0, 1, 2, 5, 6, 7]
    assert (report.completed, report.failed) == (1, 1)
    assert (report.usage.prompt_tokens, report.usage.answer_tokens) == (5, 2)


async def test_only_one_of_two_routers_begins_a_run(tmp_path: Path) -> None:
    place = Place(tmp_path)
    claims = await asyncio.gather(*(place.state.claim(f"router {n}") for n in range(5)))
    assert sum(claim is not None and claim.number == 1 for claim in claims) == 1
    numbers = [claim.number for claim in claims if claim]
    assert len(numbers) == len(set(numbers))


async def test_results_that_could_not_be_written_are_not_taken_for_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = await created(tmp_path)
    router = await place.begin()
    router.output.write("1", status=200, request_id="r", body=b"{}")

    async def fail(run: Run, kind: Kind, lines: bytes) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as context:
        context.setattr(place.state, "append", fail)
        with pytest.raises(OSError, match="full"):
            await router.output.sync()
    with pytest.raises(OSError, match="full"):
        await router.output.sync()
    assert (await place.begin()).left == [*range(LINES)]


async def test_a_damaged_record_hides_only_its_batch(tmp_path: Path) -> None:
    place = Place(tmp_path)
    await place.store.create(place.state.name("batch.json"), b"\xff{")
    assert await place.state.snapshot() is None


def test_a_file_that_cannot_be_used_leaves_no_index(tmp_path: Path) -> None:
    path, index = tmp_path / "in", tmp_path / "index"
    path.write_text('{"custom_id": "a"}\n')
    report = run(Preparation(str(path), CHAT, str(index), str(tmp_path / "remaining.npy")))
    assert [(fault.line, fault.code) for fault in report.faults] == [(1, "invalid_request")]
    assert [*tmp_path.iterdir()] == [path]
    write_input(path)
    shutil.rmtree(index, ignore_errors=True)
    assert (
        run(Preparation(str(path), CHAT, str(index), str(tmp_path / "remaining.npy"))).total
        == LINES
    )


async def test_a_cancelled_caller_does_not_stop_a_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = await created(tmp_path)
    router = await place.begin()
    router.output.write("1", status=200, request_id="r", body=b"{}")
    may_write, append = asyncio.Event(), place.state.append

    async def slow(run: Run, kind: Kind, lines: bytes) -> None:
        await may_write.wait()
        await append(run, kind, lines)

    monkeypatch.setattr(place.state, "append", slow)
    first = asyncio.create_task(router.output.sync())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    may_write.set()
    await router.output.sync()
    assert [result["custom_id"] for result in await place.results("output")] == ["1"]


async def test_a_batch_is_not_ended_as_unstarted_once_a_run_has_begun(tmp_path: Path) -> None:
    place = await created(tmp_path)
    await place.begin()
    await place.state.end_unstarted("", "cancelled")
    snapshot = await place.state.snapshot()
    assert snapshot is not None
    assert (snapshot.end, snapshot.run and snapshot.run.number) == (None, 1)


async def test_a_batch_that_has_ended_is_not_run_again(tmp_path: Path) -> None:
    place = await created(tmp_path)
    router = await place.begin()
    await place.state.finish(router.run, "cancelled")
    assert await place.state.claim("router") is None
