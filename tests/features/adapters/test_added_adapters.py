"""LoRA adapters that are added while a cluster runs: their files, keys and life in a replica."""

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from redis.exceptions import RedisError

from kvroute.blocks.chain import Scope, Space
from kvroute.blocks.variants import is_key, name_of
from kvroute.contract.adapters import Adapter
from kvroute.contract.generation import GenerateRequest
from kvroute.features.adapters.adapter_files import (
    MAX_HEADER_BYTES,
    MAX_TENSORS,
    check_files,
    path_in,
)
from kvroute.features.adapters.adapter_store import Adapters
from kvroute.features.adapters.added import AdapterFiles, AddedAdapter, own_name
from kvroute.features.adapters.added_adapters import AddedAdapters
from kvroute.replica.sim_engine.config import SimulatedConfig
from kvroute.replica.sim_engine.simulated import SimulatedEngine
from tests.support.adapters import write_adapter
from tests.support.answers import completion
from tests.support.waiting import until

DIGEST = 32 * "a"
CONFIG = SimulatedConfig(
    prefill_tokens_per_s=0,
    decode_step_s=0,
    decode_per_seq_s=0,
    lora_load_s=0,
    max_cpu_loras=2,
    can_add_adapters=True,
)


def added(name: str, path: Path, **fields: Any) -> AddedAdapter:
    files = check_files(str(path), path.parent, max_rank=16)
    return AddedAdapter(name=name, path=str(path), digest=files.digest, rank=files.rank, **fields)


# Names and keys.


@given(name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}", fullmatch=True), tenant=st.text())
def test_a_key_gives_the_name_back(name: str, tenant: str) -> None:
    key = f"{own_name(tenant, name)}@{DIGEST}"
    assert is_key(key)
    assert name_of(key) == name


@pytest.mark.parametrize("name", ["", "sql", "sql@1", "a@b.c", f"sql@{31 * 'a'}", f"@{DIGEST}"])
def test_the_name_of_an_adapter_of_the_start_is_no_key(name: str) -> None:
    assert not is_key(name)
    assert name_of(name) == name


def test_a_name_with_other_weights_shares_no_blocks_with_the_earlier_ones(tmp_path: Path) -> None:
    tokens, space = np.arange(64, dtype=np.uint32), Space("m", "", 32)
    earlier, same, later = (
        added("sql", write_adapter(tmp_path / name, seed=seed)).key
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    chains = [space.chain(tokens, Scope(key)) for key in (earlier, same, later)]
    assert chains[0] == chains[1]
    assert not set(chains[0]) & set(chains[2])


# Paths and files.


@given(st.text(alphabet="./a\\\0 ~", max_size=12))
def test_no_path_leads_out_of_the_folder_of_adapters(path: str) -> None:
    root = Path("/srv/adapters")
    try:
        found = path_in(root, path)
    except ValueError:
        return
    assert os.path.realpath(found).startswith("/srv/adapters/")


@pytest.mark.parametrize(
    "path", ["", "/", "..", "../x", "/srv/adapters", "/srv/adapters-2/x", "a/../..", "x\0", "~/x\n"]
)
def test_a_path_out_of_the_folder_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="srv/adapters"):
        path_in(Path("/srv/adapters"), path)


def test_a_path_can_be_absolute_or_in_the_folder() -> None:
    assert path_in(Path("/srv/a"), "sql") == path_in(Path("/srv/a"), "/srv/a/sql") == "/srv/a/sql"


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    outside = write_adapter(tmp_path / "outside", seed=1)
    root = tmp_path / "root"
    root.mkdir()
    (root / "sql").symlink_to(outside)
    with pytest.raises(ValueError, match="is a link out of"):
        check_files(str(root / "sql"), root, max_rank=16)


def write_header(weights: Path, header: bytes) -> None:
    weights.write_bytes(len(header).to_bytes(8, "little") + header)


def damaged(folder: Path, how: str) -> None:
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    data = weights.read_bytes()
    match how:
        case "short":
            weights.write_bytes(data[:-1])
        case "long":
            weights.write_bytes(data + b"0")
        case "no header":
            weights.write_bytes(b"no weights")
        case "empty":
            weights.write_bytes(b"")
        case "not JSON":
            weights.write_bytes(data[:8] + b"[" + data[9:])
        case "list":
            weights.write_bytes((2).to_bytes(8, "little") + b"[]")
        case "no tensors":
            weights.write_bytes((2).to_bytes(8, "little") + b"{}")
        case "many tensors":
            write_header(weights, b"{%s}" % b",".join([b'"":{}'] * (MAX_TENSORS + 1)))
        case "long header":
            write_header(weights, b" " * (MAX_HEADER_BYTES + 1))
        case "nested header":
            write_header(weights, b'{"a":' + b"[" * 100_000)
        case "nested config":
            config.write_text("[" * 100_000)
        case "other format":
            weights.rename(folder / "adapter_model.bin")
        case "huge config":
            config.write_text(" " * (2 << 20))
        case "pipe":
            weights.unlink()
            os.mkfifo(weights)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("short", "and its header says"),
        ("long", "and its header says"),
        ("no header", "not a safetensors file, or its end is missing"),
        ("empty", "not a safetensors file, or its end is missing"),
        ("not JSON", "its header is invalid"),
        ("list", "its header is invalid"),
        ("no tensors", "has no tensors"),
        ("many tensors", "has more than 200,000 tensors"),
        ("long header", "at most 33,554,432 are read"),
        ("nested header", "its header is invalid"),
        ("nested config", "is nested too deep"),
        ("other format", "cannot be read on the replica's machine"),
        ("huge config", "has more than"),
        ("pipe", "is not a file"),
    ],
)
def test_files_that_cannot_be_weights_are_refused(tmp_path: Path, how: str, message: str) -> None:
    folder = write_adapter(tmp_path / "sql", seed=1)
    damaged(folder, how)
    with pytest.raises(ValueError, match=message):
        check_files(str(folder), tmp_path, max_rank=16)


def test_a_rank_above_that_of_the_engine_is_refused_with_the_option(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "sql", seed=1, rank=32)
    with pytest.raises(ValueError, match="--max-lora-rank 32"):
        check_files(str(folder), tmp_path, max_rank=16)


# The life of adapters in a replica.


class Listed(Adapters):
    """The adapters in a Redis that exists only here."""

    def __init__(self) -> None:
        self.adapters: Mapping[str, AddedAdapter] = {}
        self.number = 1
        self.is_away = False

    def set(self, *adapters: AddedAdapter) -> None:
        self.adapters = {adapter.key: adapter for adapter in adapters}
        self.number += 1

    async def revision(self) -> int:
        if self.is_away:
            raise RedisError("away")
        return self.number

    async def all(self) -> list[AddedAdapter]:
        return [*self.adapters.values()]


class Replica:
    """A replica's adapters, with one simulated engine."""

    def __init__(self, root: Path, **differs: Any) -> None:
        self.engine = SimulatedEngine(dataclasses.replace(CONFIG, **differs))
        self.store = Listed()
        self.adapters = AddedAdapters(
            [self.engine], self.store, root=root, max_rank=16, on_change=lambda: None
        )

    @property
    def loaded(self) -> list[str]:
        return [name_of(key) for key in self.engine.load().variants]

    async def ask(self, adapter: AddedAdapter) -> str:
        """Ask for the adapter; return the response's model."""
        call = replace(completion(max_tokens=1), variant=adapter.key)
        ids = np.arange(8, dtype=np.uint32)
        request = GenerateRequest("r-0", ids, variant=adapter.key, call=call)
        data = b""
        chunks: list[Any] = []
        async with self.adapters.using(adapter.as_adapter):
            await self.engine.generate(request, chunks.append)
        data = b"".join(chunk.http.data for chunk in chunks if chunk.http)
        return data.decode()


@pytest.fixture
async def replica(tmp_path: Path) -> AsyncIterator[Replica]:
    replica = Replica(tmp_path)
    task = asyncio.create_task(replica.adapters.run())
    yield replica
    task.cancel()
    await replica.engine.close()


async def test_an_adapter_is_loaded_by_its_first_request_without_redis(
    replica: Replica, tmp_path: Path
) -> None:
    replica.store.is_away = True
    sql = added("sql", write_adapter(tmp_path / "sql", seed=1))
    assert '"model":"sql"' in (await replica.ask(sql)).replace(" ", "")
    assert replica.loaded == ["sql"]


async def test_a_warm_adapter_is_loaded_before_the_first_request(
    replica: Replica, tmp_path: Path
) -> None:
    replica.store.set(added("sql", write_adapter(tmp_path / "sql", seed=1), is_warm=True))
    await until(lambda: replica.loaded == ["sql"])


async def test_a_removed_adapter_is_unloaded_and_others_stay(
    replica: Replica, tmp_path: Path
) -> None:
    sql, law = (added(name, write_adapter(tmp_path / name, seed=1)) for name in ("sql", "law"))
    replica.store.set(sql, law)
    for adapter in (sql, law):
        await replica.ask(adapter)
    replica.store.set(law)
    await until(lambda: replica.loaded == ["law"])
    assert sql.key not in replica.adapters._used_s


async def test_an_adapter_with_a_running_request_is_not_unloaded(
    replica: Replica, tmp_path: Path
) -> None:
    sql = added("sql", write_adapter(tmp_path / "sql", seed=1))
    await replica.ask(sql)
    with replica.adapters._in_use(sql.key):
        replica.store.set()
        await until(lambda: replica.adapters._added.revision == replica.store.number)
        assert replica.loaded == ["sql"]
    await until(lambda: replica.loaded == [])


async def test_nothing_is_unloaded_while_redis_has_lost_its_data(
    replica: Replica, tmp_path: Path
) -> None:
    sql = added("sql", write_adapter(tmp_path / "sql", seed=1))
    replica.store.number = 0
    await replica.ask(sql)
    before_s = replica.adapters._added.complete_s
    await asyncio.sleep(0)
    assert replica.adapters._added.complete_s == before_s
    assert replica.loaded == ["sql"]


async def test_files_that_have_changed_are_not_loaded(replica: Replica, tmp_path: Path) -> None:
    sql = added("sql", write_adapter(tmp_path / "sql", seed=1))
    write_adapter(tmp_path / "sql", seed=2)
    with pytest.raises(ValueError, match=r"'sql' cannot be loaded.*differ from those with which"):
        await replica.ask(sql)
    assert replica.loaded == []


async def test_a_path_out_of_the_folder_is_refused_even_if_redis_has_it(
    replica: Replica, tmp_path: Path
) -> None:
    outside = added("sql", write_adapter(tmp_path.parent / "outside", seed=1))
    with pytest.raises(ValueError, match="it is not in"):
        await replica.ask(outside)


async def test_a_checked_adapter_takes_no_memory_afterwards(
    replica: Replica, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "sql", seed=1, rank=4)
    files = await replica.adapters.check(Adapter(name="sql", path=str(folder)), 0)
    assert files == AdapterFiles(digest=added("sql", folder).digest, rank=4)
    assert replica.loaded == []


async def test_the_reason_why_an_adapter_is_broken_is_returned(
    replica: Replica, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "sql", seed=1)
    damaged(folder, "short")
    files = await replica.adapters.check(Adapter(name="sql", path=str(folder)), 0)
    assert "and its header says" in files.problem


async def test_an_engine_that_takes_no_adapters_says_so(tmp_path: Path) -> None:
    replica = Replica(tmp_path, can_add_adapters=False)
    sql = added("sql", write_adapter(tmp_path / "sql", seed=1))
    with pytest.raises(ValueError, match="cannot load adapters after its start"):
        await replica.ask(sql)
    await replica.engine.close()
