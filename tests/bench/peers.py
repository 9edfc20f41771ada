"""Routing decisions of other routers, for the same blocks, prompts and replicas as kvroute's."""

import asyncio
import importlib.util
import os
import struct
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from kvroute.process.builtin_model import BUILTIN_MODEL, resolve
from tests.bench.indexed import (
    BLOCK,
    DOCUMENT_BLOCKS,
    HOLDER,
    PROMPT_TOKENS,
    REPLICAS,
    VOCABULARY,
    Tokens,
    documents,
    prompt,
    requests_in_flight,
)
from tests.bench.report import each_s

NO_DYNAMO = "SelectionService is left out: `pip install -e '.[bench]'` installs ai-dynamo-runtime."
NO_RAY = "PrefixTree is left out: this Ray has no ray.llm with prefix-aware routing in it."
INDEXED_S = 120.0  # seconds that Dynamo has to index all blocks


class Peer(Protocol):
    def each_s(self, tokens: Tokens, rounds: int) -> list[float]:
        """Make `rounds` decisions for a prompt, and return the seconds of each."""


def has_dynamo() -> bool:
    return importlib.util.find_spec("dynamo") is not None


def has_ray_llm() -> bool:
    return importlib.util.find_spec("ray.llm._internal.serve.routing_policies") is not None


class Dynamo:
    """Dynamo's SelectionService in this process, as in Ray Serve's KV-aware router.

    It receives KV events over ZMQ, in vLLM's format. This needs neither etcd nor NATS.
    """

    def __init__(self) -> None:
        os.environ.setdefault("DYN_LOG", "error")  # otherwise it logs each decision
        import zmq
        from dynamo.llm import SelectionService

        self._loop = asyncio.new_event_loop()
        self._service = SelectionService(indexer_threads=4)
        self._context = zmq.Context()
        self._sockets = [self._context.socket(zmq.PUB) for _ in REPLICAS]
        self._sent = [0] * len(REPLICAS)  # number of messages sent for each replica
        self._block_hashes = 0
        self._loop.run_until_complete(self._fill())

    def each_s(self, tokens: Tokens, rounds: int) -> list[float]:
        return self._loop.run_until_complete(self._each_s(tokens, rounds))

    async def _each_s(self, tokens: Tokens, rounds: int) -> list[float]:
        request, times_s = self._request(tokens.tolist()), []
        for _ in range(rounds):
            begun = time.perf_counter()
            await self._service.select(request)
            times_s.append(time.perf_counter() - begun)
        return times_s

    async def _fill(self) -> None:
        import zmq

        for worker, socket in enumerate(self._sockets):
            # No limit of waiting messages. By default, ZMQ drops messages beyond a thousand.
            socket.setsockopt(zmq.SNDHWM, 0)
            port = socket.bind_to_random_port("tcp://127.0.0.1")
            await self._service.upsert_worker(_worker(worker, f"tcp://127.0.0.1:{port}"))
        await asyncio.sleep(2.0)  # a subscriber misses messages that are sent before it connects
        latest: dict[int, Tokens] = {}
        for worker, tokens in documents():
            self._store(worker, tokens)
            latest[worker] = tokens
        for length in PROMPT_TOKENS:
            self._store(HOLDER, prompt(length)[: length // 2])
        for worker, tokens in latest.items():
            await self._until_held(worker, tokens, DOCUMENT_BLOCKS)
        for length in PROMPT_TOKENS:
            await self._until_held(HOLDER, prompt(length), length // 2 // BLOCK)
        for i, (worker, tokens) in enumerate(requests_in_flight()):
            request = self._request(tokens.tolist(), [worker])
            await self._service.select_and_reserve({**request, "selection_id": str(i)})

    def _store(self, worker: int, tokens: Tokens) -> None:
        """Send a BlockStored event in vLLM's encoding.

        Its fields are hashes, parent, tokens, block size, LoRA and medium.
        """
        first = self._block_hashes + 1
        self._block_hashes += len(tokens) // BLOCK
        hashes = list(range(first, self._block_hashes + 1))
        event = ["BlockStored", hashes, None, tokens.tolist(), BLOCK, None, "GPU", None]
        batch = msgspec.msgpack.encode([time.time(), [event], 0])
        self._sockets[worker].send_multipart([b"", struct.pack(">Q", self._sent[worker]), batch])
        self._sent[worker] += 1

    async def _until_held(self, worker: int, tokens: Tokens, blocks: int) -> None:
        request = self._request(tokens.tolist(), [])
        del request["allowed_worker_ids"]
        async with asyncio.timeout(INDEXED_S):
            while True:
                scores = (await self._service.overlap_scores(request))["workers"]
                held = {score["worker_id"]: score["device_blocks"] for score in scores}
                if held[worker] == blocks:
                    return
                await asyncio.sleep(0.1)

    @staticmethod
    def _request(
        tokens: list[int], workers: Sequence[int] = range(len(REPLICAS))
    ) -> dict[str, object]:
        return {
            "model_name": "m",
            "tenant_id": "default",
            "token_ids": tokens,
            "allowed_worker_ids": list(workers),
        }


def _worker(worker: int, events: str) -> dict[str, object]:
    return {
        "worker_id": worker,
        "model_name": "m",
        "tenant_id": "default",
        "endpoint": f"bench://{worker}",
        "block_size": BLOCK,
        "max_num_batched_tokens": 8192,
        "data_parallel_start_rank": 0,
        "data_parallel_size": 1,
        "kv_events_endpoints": {0: events},
    }


class RayPrefixTree:
    """The prefix tree of Ray's prefix-aware router, with the tokens' text.

    It is called directly here. Ray calls it in an actor, with a remote call.
    """

    def __init__(self) -> None:
        from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(resolve(BUILTIN_MODEL))
        self._words = [tokenizer.decode([token]) for token in range(VOCABULARY)]
        self._tree = PrefixTree()
        self._tree.add_tenants(REPLICAS, 0.0)
        for i, (replica, tokens) in enumerate(documents()):
            self._tree.insert(self._text(tokens), REPLICAS[replica], float(i))
        for length in PROMPT_TOKENS:
            self._tree.insert(self._text(prompt(length)[: length // 2]), REPLICAS[HOLDER], 1e6)

    def each_s(self, tokens: Tokens, rounds: int) -> list[float]:
        text = self._text(tokens)
        return each_s(lambda: self._tree.prefix_match(text, REPLICAS), rounds)

    def _text(self, tokens: Tokens) -> str:
        return "".join(self._words[token] for token in tokens.tolist())
