"""Live pages receive all changes."""

import asyncio
import json
from typing import Any

import pytest

from kvroute.features.page.live import LISTENERS, Live, State
from kvroute.router.api.errors import ApiError
from tests.support.waiting import until


async def never() -> None:
    await asyncio.Event().wait()


class Source:
    """A state that the test sets, and the number of snapshots of it."""

    def __init__(self) -> None:
        self.state: dict[str, bytes] = {}
        self.snapshots = 0

    async def snapshot(self) -> State:
        self.snapshots += 1
        return dict(self.state)


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> tuple[Source, Live]:
    monkeypatch.setattr("kvroute.features.page.live.PERIOD_S", 0.01)
    monkeypatch.setattr("kvroute.features.page.live.FRESH_S", 0.0)
    source = Source()
    return source, Live(source.snapshot, never)


def read(event: bytes) -> tuple[str, dict[str, Any], list[str]]:
    kind, data = event.decode().removesuffix("\n\n").split("\n")
    fields = json.loads(data.removeprefix("data: "))
    return kind.removeprefix("event: "), fields["changed"], fields["gone"]


async def test_a_listener_gets_the_whole_state_and_then_the_changes(
    live: tuple[Source, Live],
) -> None:
    source, page = live
    source.state = {"a": b"1", "b": b"2"}
    events = await page.listen()
    assert read(await anext(events)) == ("whole", {"a": 1, "b": 2}, [])
    source.state = {"a": b"1", "b": b"3", "c": b"4"}
    assert read(await anext(events)) == ("change", {"b": 3, "c": 4}, [])
    source.state = {"c": b"4"}
    kind, changed, gone = read(await anext(events))
    assert (kind, changed, sorted(gone)) == ("change", {}, ["a", "b"])


async def test_a_listener_gets_the_values_that_it_alone_asked_for(
    live: tuple[Source, Live],
) -> None:
    source, page = live
    source.state = {"a": b"1"}
    charts = {"history": b"[1]"}
    one, other = await page.listen(lambda: charts), await page.listen()
    assert read(await anext(one)) == ("whole", {"a": 1, "history": [1]}, [])
    assert read(await anext(other)) == ("whole", {"a": 1}, [])
    charts["history"] = b"[1,2]"
    assert read(await anext(one)) == ("change", {"history": [1, 2]}, [])


async def test_a_slow_listener_misses_no_change(live: tuple[Source, Live]) -> None:
    source, page = live
    source.state = {"first": b"0"}
    slow, quick = await page.listen(), await page.listen()
    await anext(slow)
    for number in range(5):
        source.state = {str(number): b"0"}
        await anext(quick)
    source.state |= {"last": b"1"}
    assert read(await anext(slow)) == ("change", {"4": 0, "last": 1}, ["first"])


async def test_listeners_share_a_snapshot_and_without_listeners_there_is_none(
    live: tuple[Source, Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvroute.features.page.live.FRESH_S", 60.0)
    source, page = live
    assert source.snapshots == 0
    listening = [await page.listen() for _ in range(3)]
    for events in listening:
        await anext(events)
        await anext(events)
    assert source.snapshots == 1


async def test_one_listener_too_many_is_refused_until_another_leaves(
    live: tuple[Source, Live],
) -> None:
    _, page = live
    listening = [await page.listen() for _ in range(LISTENERS)]
    with pytest.raises(ApiError, match="close one") as refusal:
        await page.listen()
    assert refusal.value.status == 503
    del listening[0]
    await until(lambda: page.listeners < LISTENERS)
    await page.listen()


async def test_listeners_are_disconnected_when_the_router_stops() -> None:
    over = asyncio.Event()

    async def ends() -> None:
        await over.wait()

    page = Live(Source().snapshot, ends)
    events = await page.listen()
    await anext(events)
    over.set()
    assert [event async for event in events] == []
    assert page.listeners == 0
