"""The small engines that tests of this folder share, one simulated and one of vLLM."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kvroute.contract.adapters import WEIGHTS_FILES, Adapter
from tests.support.adapters import write_adapter
from tests.support.engines import (
    BROKEN,
    INTERVAL,
    LATE,
    LAYERS,
    NAMES,
    SHALLOW_CACHE_MB,
    TOOL_PARSER,
    WIDTH,
    Running,
    shallow_model,
    started,
)


@pytest.fixture
def unmerged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a chunk of every output of the engine, however slowly they are read."""
    from kvroute.replica.vllm_engine.http import request_run as http_run
    from tests.support.stock import COLLECTORS, Unmerged

    for module in COLLECTORS:
        monkeypatch.setattr(module, "RequestOutputCollector", Unmerged)
    monkeypatch.setattr(http_run, "UNSTREAMED_CHUNK_TOKENS", 1)


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=["simulated", "vllm"])
async def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Running]:
    """A shallow model in a small cache. It has memory for two of its adapters and takes one in a
    batch, and it answers in chunks of several tokens."""
    folder = tmp_path_factory.mktemp("engine")
    for seed, name in enumerate((*NAMES, BROKEN, LATE)):
        write_adapter(folder / name, seed=seed, layers=LAYERS, width=WIDTH, strength=4.0)
    (folder / BROKEN / WEIGHTS_FILES[0]).write_bytes(b"no weights")
    async with started(
        request.param,
        model=str(shallow_model(folder / "model")),
        kv_cache_memory_mb=SHALLOW_CACHE_MB,
        simulated_blocks=90,
        stream_interval=INTERVAL,
        adapters=tuple(Adapter(name=name, path=str(folder / name)) for name in (*NAMES, BROKEN)),
        max_loras=1,
        max_cpu_loras=2,
        lora_root=folder,
        engine_args={"tool_call_parser": TOOL_PARSER},
    ) as running:
        yield running
