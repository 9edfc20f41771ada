"""Engines for tests, simulated ones and vLLM, started as a replica starts them."""

import asyncio
import contextlib
import gc
import json
import shutil
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from msgspec.structs import replace

from kvroute.contract.comparison import Comparison
from kvroute.contract.generation import Chunk, GenerateRequest
from kvroute.process.builtin_model import BUILTIN_MODEL, resolve
from kvroute.replica.block_table import BlockTable, Changes
from kvroute.replica.engine.kv_events import Transfers
from kvroute.replica.engine.protocol import Engine
from kvroute.replica.engines import start_engines
from kvroute.replica.fabric.pull import ExchangingEngine, PullResult, carried_in, pull_key
from kvroute.replica.ghosts import Ghosts, make_ghosts
from kvroute.settings.replica import ReplicaSettings
from tests.support.answers import completion, ids_of
from tests.support.chunks import collected
from tests.support.waiting import until

BLOCK = 32
SECRET = b"secret"  # the secret of the engines' replicas
PULL_KEY = pull_key(SECRET)  # key of their block servers
PULLING = {"pulls": {"pull": "on"}}  # settings of features with which engines pull
TOKENS = 8  # number of tokens of an answer
TOOL_PARSER = "hermes"
INTERVAL = 4  # number of tokens in a chunk of the engine that tests/slow/engines share
NAMES = ("sql", "law", "poems")  # names of the shared engine's adapters
BROKEN = "broken"  # name of an adapter that cannot be loaded
LATE = "late"  # name of the folder of an adapter that is added after the engine's start
# The shallow model has the first layers and dimensions of the built-in model. It computes a token
# very fast, and its answers make no sense.
LAYERS = 2  # number of layers of the shallow model
WIDTH = 144  # hidden size of the shallow model; a multiple of the number of heads
WHOLE_WIDTH = 576  # hidden size of the built-in model
UNLIKELY = "fal"  # a token that the built-in model never generates
SHALLOW_CACHE_MB = 8  # as many blocks as the built-in model has in 128 MB


@dataclass
class Running:
    """An engine, with the block table and the list of evicted blocks that its events update."""

    engine: Engine
    table: BlockTable
    ghosts: Ghosts
    rank: int = 0
    root: Path = Path()  # folder of the adapters that can be added
    requests: int = 0
    transfers: list[Transfers] = field(default_factory=list)
    changes: Changes = field(default_factory=Changes)  # changes of the table since a test took them

    async def ask(self, prompt: list[int], namespace: str = "", **fields: Any) -> list[Chunk]:
        return await self.run(request_of(prompt, namespace, **fields))

    async def pin(
        self, name: str, prompt: list[int], namespace: str = "", *, in_host: bool = False
    ) -> None:
        ids = np.array([*prompt, 0], np.uint32)
        await self.run(GenerateRequest("", ids, namespace, pin=name, is_host_pin=in_host))

    async def cached_tokens(self, prompt: list[int]) -> int:
        return (await self.ask([*prompt, 0], max_tokens=1))[0].cached_tokens

    async def flood(self, seeds: range) -> None:
        """Run a prompt of 750 tokens for each seed: half of them in sequence, half at once."""
        prompts = [prompt_of(750, seed) for seed in seeds]
        for prompt in prompts[::2]:
            await self.cached_tokens(prompt)
        await asyncio.gather(*(self.cached_tokens(prompt) for prompt in prompts[1::2]))

    async def run(self, request: GenerateRequest) -> list[Chunk]:
        self.requests += 1
        request = replace(request, request_id=f"r{self.requests}", rank=self.rank)
        return await collected(self.engine.generate, request)

    async def pump(self) -> None:
        async for events in self.engine.events():
            self.transfers += [event for event in events if isinstance(event, Transfers)]
            self.ghosts.record_events(events)
            self.table.apply(events, self.changes)

    @property
    def exchanger(self) -> ExchangingEngine:
        """Return the engine as one that exchanges blocks."""
        assert isinstance(self.engine, ExchangingEngine)
        return self.engine

    async def compare(self) -> Comparison:
        """Return how the block table differs from the blocks that the engine has cached."""
        self.table.compared = None
        await self.engine.emit_held()
        await until(lambda: self.table.compared)
        assert self.table.compared
        return self.table.compared


@contextlib.asynccontextmanager
async def started(kind: Literal["simulated", "vllm"], **own: Any) -> AsyncIterator[Running]:
    """Start a small engine with these settings. It is closed at the end of the context."""
    async with started_ranks(kind, **own) as (running,):
        yield running


@contextlib.asynccontextmanager
async def started_ranks(
    kind: Literal["simulated", "vllm"], **own: Any
) -> AsyncIterator[list[Running]]:
    """Like `started`, but yield an object for each data parallel rank."""
    defaults: dict[str, Any] = {
        "model": BUILTIN_MODEL,
        "kv_cache_memory_mb": 128,
        "dtype": "float32",  # exact enough that the answer does not depend on cache hits
        "max_model_len": 1024,
    }
    settings = ReplicaSettings(
        served_model_name="m",
        redis_url="",
        engine=kind,
        simulated_prefill_tokens_per_s=0,
        simulated_decode_ms=5,
        **(defaults | own),
    )
    engines = await start_engines(settings, secret=SECRET)
    tables = [BlockTable(engine.group_entries) for engine in engines]
    ranks = [
        Running(
            *(engine, table, make_ghosts(engine, table), number),
            root=settings.lora_root or Path(),
        )
        for number, (engine, table) in enumerate(zip(engines, tables, strict=True))
    ]
    pumps = [asyncio.create_task(running.pump()) for running in ranks]
    if kind == "vllm" and (settings.disk_cache or settings.replica_features):
        # The weights are hashed in the background, which opens the tiers behind host memory.
        for running in ranks:
            await until(lambda running=running: running.exchanger.exchanging().format)  # type: ignore[misc]
    yield ranks
    for pump in pumps:
        pump.cancel()
    await asyncio.gather(*pumps, return_exceptions=True)
    for engine in engines:
        await engine.close()
    # If vLLM leaves something open, the warning should appear here and not in a later test.
    for running in ranks:
        vars(running).clear()
    del engine, engines
    gc.collect()


def pull_results(chunks: Sequence[Chunk]) -> list[PullResult]:
    """Return the results of pulls in the chunks of an answer."""
    found = [carried_in(chunk.features, PullResult) for chunk in chunks]
    return [result for result in found if result is not None]


def shallow_model(folder: Path, width: int = WIDTH) -> Path:
    """Write a model with the built-in model's first layers and dimensions; return its folder."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    whole = Path(resolve(BUILTIN_MODEL))
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    before = _configured(folder, num_hidden_layers=LAYERS, hidden_size=width)
    left_out = tuple(f"model.layers.{n}." for n in range(LAYERS, before["num_hidden_layers"]))
    with safe_open(whole / "model.safetensors", framework="pt") as weights:
        kept = {
            name: _narrow(name, weights.get_tensor(name), width)
            for name in weights.keys()  # noqa: SIM118 - it is not a mapping
            if not name.startswith(left_out)
        }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _narrow(name: str, weights: Any, width: int) -> Any:
    """Reduce weights to the first dimensions of the hidden vectors.

    Output projections have these dimensions as rows, and all other weights as the last axis.
    """
    is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
    return (weights[:width] if is_output else weights[..., :width]).contiguous()


def terse_model(folder: Path) -> Path:
    """Write a shallow model whose structured answers end soon; return its folder.

    If anything else is allowed, it generates no spaces and no further tool call.
    """
    from safetensors.torch import load, save_file
    from tokenizers import Tokenizer

    file = shallow_model(folder, WHOLE_WIDTH) / "model.safetensors"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [tokenizer.decode([n]) for n in range(tokenizer.get_vocab_size())]
    unwanted = [n for n, text in enumerate(texts) if text.isspace() or text.startswith("<")]
    weights = load(file.read_bytes())
    embeddings = weights["model.embed_tokens.weight"]
    head = embeddings.clone()
    # These tokens become much less likely than UNLIKELY, so that the end of an answer is likelier.
    head[unwanted] = 4 * embeddings[tokenizer.token_to_id(UNLIKELY)]
    save_file({**weights, "lm_head.weight": head}, file, metadata={"format": "pt"})
    _configured(folder, tie_word_embeddings=False)
    return folder


def _configured(folder: Path, **values: Any) -> dict[str, Any]:
    """Change the model's configuration, and return the configuration before the change."""
    file = folder / "config.json"
    before: dict[str, Any] = json.loads(file.read_text())
    file.write_text(json.dumps(before | values))
    return before


def thinking_model(folder: Path) -> Path:
    """Write a shallow model whose tokenizer has the tokens <think> and </think>; return its folder.

    They replace two other special tokens. The model has the full width, because a narrow one would
    generate no reasoning.
    """
    marks = {"<file_sep>": "<think>", "<filename>": "</think>"}
    shallow_model(folder, WHOLE_WIDTH)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (file := folder / name).is_file():
            text = file.read_text()
            for old, new in marks.items():
                text = text.replace(f'"{old}"', f'"{new}"')
            file.write_text(text)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        token["special"] &= token["content"] not in marks.values()
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def request_of(prompt: list[int], namespace: str = "", **fields: Any) -> GenerateRequest:
    """Return a completion request with these fields in its body."""
    call = completion(**{"max_tokens": TOKENS} | fields)
    return GenerateRequest("r", np.array(prompt, np.uint32), namespace, call=call)


def rest_of(request: GenerateRequest, begun: list[Chunk]) -> GenerateRequest:
    """Return the request that another engine gets if the first engine failed after these chunks."""
    assert request.call
    parts = [chunk.http for chunk in begun if chunk.http]
    call = replace(
        request.call,
        deltas=tuple(tokens for part in parts for tokens in part.deltas),
        cached_tokens=begun[0].cached_tokens,
        written_tokens=parts[0].written_tokens,
    )
    return replace(request.after(ids_of(begun)), call=call)


def prompt_of(tokens: int, seed: int) -> list[int]:
    return list(map(int, np.random.default_rng(seed).integers(1000, 40_000, tokens)))
