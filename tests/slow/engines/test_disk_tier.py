"""An engine with a disk cache: its blocks survive a restart, and no file is believed blindly."""

import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kvroute.contract.generation import Chunk
from tests.support.answers import ids_of
from tests.support.engines import BLOCK, Running, prompt_of, shallow_model, started
from tests.support.waiting import until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]

PROMPT = 20 * BLOCK  # tokens
BLOCKS = PROMPT // BLOCK


def disk_blocks(running: Running) -> int:
    """Return how many blocks on the disk the replica publishes."""
    return len(running.table) - len(running.table.in_host) - _own(running)


def _own(running: Running) -> int:
    groups = [group for group in running.table._groups if group and group.entry == 0]
    return sum(len(group.published) for group in groups)


async def answer(running: Running, prompt: list[int]) -> list[Chunk]:
    return await running.ask([*prompt, 7], max_tokens=8)


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("disk")
    return {
        "model": str(shallow_model(folder / "model")),
        "host_cache_gb": "0.05",
        "kv_cache_memory_mb": 8,
        "disk_cache": folder / "cache",
        "disk_cache_gb": 0.5,
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def first(options: dict[str, Any]) -> AsyncIterator[dict[int, list[Chunk]]]:
    """Answers of an engine that has run and was closed."""
    async with started("vllm", **options) as running:
        answers = {}
        for seed in range(4):
            before = disk_blocks(running)
            answers[seed] = await answer(running, prompt_of(PROMPT, seed))
            await until(lambda before=before: disk_blocks(running) >= before + BLOCKS)  # type: ignore[misc]
        assert (await running.compare()).drift == 0
        assert running.engine.facts.disk
    yield answers


async def test_a_restarted_engine_uses_only_the_good_files(
    options: dict[str, Any], first: dict[int, list[Chunk]]
) -> None:
    files = _files_of_one_prompt(options["disk_cache"])
    damaged = files[0]
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    async with started("vllm", **options) as running:
        await until(lambda: disk_blocks(running) >= 4 * BLOCKS)
        damaged.write_bytes(content)  # while the engine runs
        for seed, computed in first.items():
            chunks = await answer(running, prompt_of(PROMPT, seed))
            assert ids_of(chunks) == ids_of(computed)
        cached = [
            (await answer(running, prompt_of(PROMPT, seed)))[0].cached_tokens for seed in first
        ]
        assert cached == [PROMPT] * 4
        assert sum(moved.disk_failures for moved in running.transfers) == 1
        assert sum(moved.disk_in_bytes for moved in running.transfers) > 0
        await until(lambda: damaged.exists())  # it is written again
        assert (await running.compare()).drift == 0

        assert await running.engine.reset_prefix_cache()
        await until(lambda: len(running.table) == 0)
        await until(lambda: not _has_files(options["disk_cache"]))
        chunks = await answer(running, prompt_of(PROMPT, 0))
        assert chunks[0].cached_tokens == 0
        assert ids_of(chunks) == ids_of(first[0])


def _has_files(folder: Path) -> bool:
    """Return whether there are blocks. Unlike rglob, os.walk passes over folders that disappear."""
    return any(name.endswith(".kv") for _, _, names in os.walk(folder) for name in names)


def _files_of_one_prompt(folder: Path) -> list[Path]:
    files = sorted(folder.rglob("*.kv"), key=lambda path: path.stat().st_mtime)
    assert len(files) >= 4 * BLOCKS
    return files


async def test_the_folder_stays_within_its_limit_and_a_full_disk_costs_only_speed(
    options: dict[str, Any], tmp_path: Path
) -> None:
    small = options | {"disk_cache": tmp_path / "cache", "disk_cache_gb": 0.01}
    async with started("vllm", **small) as running:
        facts = running.engine.facts
        assert facts.disk
        answers = [await answer(running, prompt_of(PROMPT, seed)) for seed in range(8)]
        await until(lambda: disk_blocks(running) > facts.disk.blocks // 2)  # type: ignore[union-attr]
        assert (await running.compare()).drift == 0
        assert len(list((tmp_path / "cache").rglob("*.kv"))) <= facts.disk.blocks + BLOCKS
        shutil.rmtree(tmp_path / "cache")  # the disk is gone
        again = [await answer(running, prompt_of(PROMPT, seed)) for seed in range(8, 16)]
        assert len(again) == 8
        later = [await answer(running, prompt_of(PROMPT, seed)) for seed in range(8)]
        assert list(map(ids_of, later)) == list(map(ids_of, answers))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk for some 20 blocks."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this user cannot mount a disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


async def test_a_full_disk_costs_only_speed(options: dict[str, Any], small_disk: Path) -> None:
    async with started("vllm", **options | {"disk_cache": small_disk / "cache"}) as running:
        first = [await answer(running, prompt_of(PROMPT, seed)) for seed in range(4)]
        await until(lambda: sum(moved.disk_failures for moved in running.transfers) > 0)
        for seed in range(100, 130):  # evict these prompts from both memories
            await answer(running, prompt_of(PROMPT, seed))
        again = [await answer(running, prompt_of(PROMPT, seed)) for seed in range(4)]
        assert list(map(ids_of, again)) == list(map(ids_of, first))
        assert (await running.compare()).drift == 0
        assert len(_sizes(small_disk)) == 1
        await until(lambda: not list(small_disk.glob("cache/*/new/*")))


def _sizes(folder: Path) -> set[int]:
    return {file.stat().st_size for file in folder.rglob("*.kv")}
