"""vLLM's scheduler with a disk and peers behind its host memory, driven without a model.

The bytes of each block are checked when it is copied to the KV cache.
"""

import errno
import gc
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvroute.blocks.cache_groups import DISK_GROUPS, HOST_GROUPS
from kvroute.prefill.speed import PrefillModel
from kvroute.replica.fabric import block_files
from kvroute.replica.fabric.pull import Pull
from tests.support.engines import PULLING
from tests.support.schedulers import BLOCK

if TYPE_CHECKING:
    from tests.support.host_tiers import Tiered

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

BLOCKS = 10  # full blocks of a prompt
PROMPT = BLOCKS * BLOCK + 1  # tokens
LONG_S = 60.0
SLOW = 1.0  # tokens per second: slower than any disk


@pytest.fixture
def start() -> Iterator[Callable[..., "Tiered"]]:
    """Return a function that creates and opens an engine."""
    from tests.support.host_tiers import Tiered

    engines: list[Tiered] = []

    def create(weights: str = "w", own: Mapping[str, Any] | None = None, **options: Any) -> Tiered:
        engines.append(Tiered(own={"replica_features": PULLING, **(own or {})}, **options))
        engines[-1].opened = engines[-1].open(weights)
        compute_at(engines[-1], SLOW)
        return engines[-1]

    yield create
    for engine in engines:
        assert engine.compare().drift == 0
        engine.close()


def compute_at(engine: "Tiered", tokens_per_s: float) -> None:
    """Set the speed at which the engine seems to compute."""
    engine.scheduler.host.meter.price.prefill = PrefillModel(tokens_per_s, 1e9)


def disk(folder: Path, blocks: int = 1_000) -> dict[str, Any]:
    from tests.support.host_tiers import BLOCK_BYTES

    return {"disk_cache": folder / "cache", "disk_cache_gb": blocks * BLOCK_BYTES / 1e9}


def flood(engine: "Tiered", prompts: int = 8, first: int = 50_000) -> None:
    """Evict everything else from the KV cache, and from a small host memory."""
    for number in range(prompts):
        engine.ask(first + 500 * number, PROMPT)


def published_on_disk(engine: "Tiered") -> int:
    (group,) = [group for group in engine.table._groups if group and group.entry >= DISK_GROUPS]
    return len(group.published)


def pull_from(peer: Any, tokens: int = PROMPT, within_s: float = LONG_S, name: str = "p") -> Pull:
    from tests.support.host_tiers import KEY

    address = peer if isinstance(peer, str) else peer.opened.address
    return Pull(name, address, KEY, tokens, within_s)


# Peers


def test_blocks_of_a_peer_are_hits(start: Callable[..., "Tiered"]) -> None:
    peer, own = start(), start()
    assert own.division.group_entries == (0, HOST_GROUPS)
    peer.ask(0, PROMPT)
    assert own.ask(0, PROMPT, pull=pull_from(peer)) == PROMPT - 1
    (result,) = own.pulled
    assert (result.tokens, result.reason) == (PROMPT - 1, "")
    assert len(own.table.in_host) == BLOCKS


def test_formats_that_differ_exchange_nothing(start: Callable[..., "Tiered"]) -> None:
    peer, own = start(weights="other"), start()
    peer.ask(0, PROMPT)
    assert own.ask(0, PROMPT, pull=pull_from(peer)) == 0
    assert [result.reason for result in own.pulled] == ["refused"]


def test_nothing_is_shared_until_the_weights_are_known(
    start: Callable[..., "Tiered"], tmp_path: Path
) -> None:
    peer, own = start(), start(weights="", own=disk(tmp_path))
    peer.ask(0, PROMPT)
    assert own.opened.disk_bytes_per_s > 0
    assert own.ask(0, PROMPT, pull=pull_from(peer)) == 0
    settle(own)
    assert not [*(tmp_path / "cache").iterdir()]
    assert own.open("w").address
    peer.ask(1_000, PROMPT)
    assert own.ask(1_000, PROMPT, pull=pull_from(peer)) == PROMPT - 1
    settle(own)
    assert published_on_disk(own) >= BLOCKS
    first = start(own=disk(tmp_path))
    assert first.ask(1_000, PROMPT) == PROMPT - 1


def test_a_request_that_only_pulls_is_never_computed(start: Callable[..., "Tiered"]) -> None:
    peer, own = start(), start()
    peer.ask(0, PROMPT)
    name = own.add(0, PROMPT, pull=pull_from(peer), only_pulls=True)
    while not own.pulled:
        own.step()
    for _ in range(3):
        own.step()
    assert own.scheduler.requests[name].num_computed_tokens == 0
    own.abort(name)
    own.run()
    assert len(own.table) == len(own.table.in_host) == BLOCKS
    assert own.ask(0, PROMPT) == PROMPT - 1


def test_a_pull_into_a_full_host_memory_evicts_there(start: Callable[..., "Tiered"]) -> None:
    peer, own = start(), start(host_blocks=BLOCKS + 5)
    peer.ask(0, PROMPT)
    flood(own, 3)
    assert own.ask(0, PROMPT, pull=pull_from(peer)) == PROMPT - 1
    assert own.compare().drift == 0


def test_a_peer_that_evicts_during_pulls_gives_right_bytes(start: Callable[..., "Tiered"]) -> None:
    """Requests at both engines, which pull from each other while they evict."""
    engines = start(host_blocks=40), start(host_blocks=40)
    rng = np.random.default_rng(1)
    for _ in range(60):
        own, peer = engines if rng.random() < 0.5 else engines[::-1]
        names = [
            own.add(
                500 * int(rng.integers(12)),
                int(rng.integers(1, 12)) * BLOCK + 1,
                pull=pull_from(peer) if rng.random() < 0.7 else None,
            )
            for _ in range(3)
        ]
        for engine in engines:
            if rng.random() < 0.8:
                engine.step()
        if rng.random() < 0.2:
            own.abort(names[0])
        if rng.random() < 0.05:
            own.run()
            own.scheduler.reset_prefix_cache()
    for engine in engines:
        engine.run()
    assert any(result.tokens for engine in engines for result in engine.pulled)


@pytest.fixture
def silent() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_other_requests_run_while_one_waits_for_its_pull(
    start: Callable[..., "Tiered"], silent: str
) -> None:
    own = start()
    waiting = own.add(0, PROMPT, pull=pull_from(silent, within_s=LONG_S))
    own.step()
    other = own.add(500, PROMPT)
    while other in own.scheduler.requests:
        own.step()
    assert waiting in own.scheduler.requests
    own.scheduler.reset_prefix_cache()
    own.run()
    assert [result.reason for result in own.pulled] == ["off"]


# The disk


def settle(engine: "Tiered") -> None:
    """Run steps until everything is written."""
    engine.run()
    assert not engine.scheduler.has_requests()


def test_blocks_on_the_disk_are_hits_after_a_restart(
    start: Callable[..., "Tiered"], tmp_path: Path
) -> None:
    first = start(own=disk(tmp_path))
    assert first.division.group_entries == (0, HOST_GROUPS, DISK_GROUPS)
    first.ask(0, PROMPT)
    settle(first)
    assert published_on_disk(first) == BLOCKS
    second = start(own=disk(tmp_path))
    assert published_on_disk(second) == BLOCKS
    assert second.ask(0, PROMPT) == PROMPT - 1
    settle(second)
    assert len(second.table.in_host) == BLOCKS
    assert sum(moved.disk_in_bytes for moved in second.transfers) > 0


def test_what_host_memory_evicts_is_read_from_the_disk(
    start: Callable[..., "Tiered"], tmp_path: Path
) -> None:
    engine = start(host_blocks=5 * BLOCKS, own=disk(tmp_path))
    engine.ask(0, PROMPT)
    settle(engine)
    flood(engine)
    assert engine.ask(0, PROMPT) == PROMPT - 1


def test_pulled_blocks_are_written_to_the_disk(
    start: Callable[..., "Tiered"], tmp_path: Path
) -> None:
    peer, own = start(), start(own=disk(tmp_path))
    peer.ask(0, PROMPT)
    own.ask(0, PROMPT, pull=pull_from(peer))
    settle(own)
    assert published_on_disk(own) == BLOCKS


def test_the_disk_cache_has_a_size(start: Callable[..., "Tiered"], tmp_path: Path) -> None:
    engine = start(own=disk(tmp_path, blocks=25))
    for number in range(8):
        engine.ask(500 * number, PROMPT)
        settle(engine)
    assert 20 <= published_on_disk(engine) <= 25
    engine.scheduler.connector.kvroute_disk._writers.shutdown(wait=True)
    assert len(list(tmp_path.rglob("*.kv"))) <= 25


def test_a_clear_deletes_the_files(start: Callable[..., "Tiered"], tmp_path: Path) -> None:
    engine = start(own=disk(tmp_path))
    engine.ask(0, PROMPT)
    assert engine.scheduler.reset_prefix_cache()
    engine.run()
    engine.scheduler.connector.kvroute_disk._writers.shutdown(wait=True)
    assert list(tmp_path.rglob("*.kv")) == []
    assert len(engine.table) == 0
    later = start(own=disk(tmp_path))
    assert len(later.table) == 0


def test_a_damaged_file_is_computed_and_written_again(
    start: Callable[..., "Tiered"], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = start(own=disk(tmp_path))
    first.ask(0, PROMPT)
    settle(first)
    second = start(own=disk(tmp_path))
    for path in tmp_path.rglob("*.kv"):
        content = bytearray(path.read_bytes())
        content[99] ^= 1
        path.write_bytes(content)
    assert second.ask(0, PROMPT) == 0
    settle(second)
    assert sum(moved.disk_failures for moved in second.transfers) == 1
    assert second.ask(0, PROMPT) == PROMPT - 1
    assert sum("damaged" in record.message for record in caplog.records) == 1


def test_a_full_disk_is_logged_once_and_counted(
    start: Callable[..., "Tiered"],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    caplog.set_level(logging.INFO, "kvroute.replica")
    engine = start(own=disk(tmp_path))
    engine.ask(0, PROMPT)
    settle(engine)
    monkeypatch.setattr(block_files, "_write", full)
    for number in range(1, 6):
        engine.ask(500 * number, PROMPT)
        settle(engine)
    assert published_on_disk(engine) <= BLOCKS
    assert sum(moved.disk_failures for moved in engine.transfers) >= 1
    assert sum("disk cache" in record.message for record in caplog.records) == 1
    monkeypatch.undo()
    engine.scheduler.connector.kvroute_disk._next_survey_s = 0.0
    until(engine, lambda: published_on_disk(engine) > BLOCKS, ask=9_000)
    assert "can be written again" in caplog.text


def until(engine: "Tiered", is_done: Callable[[], bool], ask: int) -> None:
    """Ask new prompts until something has happened."""
    deadline_s = time.monotonic() + LONG_S
    while not is_done():
        assert time.monotonic() < deadline_s
        engine.ask(ask := ask + 500, PROMPT)
        settle(engine)


def test_a_disk_that_hangs_is_not_waited_for(
    start: Callable[..., "Tiered"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start(own=disk(tmp_path))
    first.ask(0, PROMPT)
    settle(first)
    second, go_on = start(own=disk(tmp_path)), threading.Event()
    really = block_files.BlockFiles.read

    def hanging(*args: Any) -> bool:
        go_on.wait()
        return really(*args)

    monkeypatch.setattr(block_files.BlockFiles, "read", hanging)
    compute_at(second, PROMPT / 0.3)
    try:
        assert second.ask(0, PROMPT) == 0
    finally:
        go_on.set()
    settle(second)
    assert sum(moved.disk_failures for moved in second.transfers) == 1


def test_two_engines_share_a_folder(start: Callable[..., "Tiered"], tmp_path: Path) -> None:
    first, second = start(own=disk(tmp_path)), start(own=disk(tmp_path))
    first.ask(0, PROMPT)
    settle(first)
    second.scheduler.connector.kvroute_disk._next_survey_s = 0.0
    until(second, lambda: published_on_disk(second) >= 2 * BLOCKS, ask=20_000)
    assert second.ask(0, PROMPT) == PROMPT - 1
    first.scheduler.reset_prefix_cache()
    second.scheduler.connector.kvroute_disk._next_survey_s = 0.0
    until(second, lambda: published_on_disk(second) < 3 * BLOCKS, ask=40_000)


def test_a_disk_slower_than_computing_is_not_read(
    start: Callable[..., "Tiered"], tmp_path: Path
) -> None:
    first = start(own=disk(tmp_path))
    first.ask(0, PROMPT)
    settle(first)
    second = start(own=disk(tmp_path))
    tier = second.scheduler.connector.kvroute_disk
    compute_at(second, 1e3)
    for _ in range(20):
        tier._speed.record(4096, 1e3, time.monotonic())
    assert second.ask(0, PROMPT) == 0


def test_a_folder_that_cannot_be_used_switches_the_tier_off(
    start: Callable[..., "Tiered"], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file")
    peer, engine = start(), start(own=disk(tmp_path))
    assert engine.opened.disk_bytes_per_s == 0
    assert "the disk cache is off" in caplog.text
    peer.ask(0, PROMPT)
    assert engine.ask(0, PROMPT, pull=pull_from(peer)) == PROMPT - 1  # pulls are on


# The end


def test_nothing_is_left_of_the_host_memory(tmp_path: Path) -> None:
    from tests.support.host_tiers import Tiered

    engine = Tiered(own=disk(tmp_path))
    engine.open()
    engine.ask(0, PROMPT)
    region = engine.scheduler.connector.scheduler.manager.primary_tier._mmap_region
    assert not Path(region.mmap_path).exists()
    engine.close()
    gc.collect()
    assert region.mmap_obj is None
