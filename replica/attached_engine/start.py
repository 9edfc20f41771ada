"""Starts the engines of the attached server that a replica has claimed."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from kvroute.blocks.chain import Space
from kvroute.contract.generation import CannotRunError
from kvroute.contract.identity import chat_template
from kvroute.contract.records import EngineFacts
from kvroute.replica.attached_engine.attached import AttachedEngine
from kvroute.replica.attached_engine.claim import claim
from kvroute.replica.attached_engine.connection import ServerConnection
from kvroute.replica.attached_engine.content_format import content_format
from kvroute.replica.attached_engine.server import RankFacts, ServerFacts
from kvroute.settings.replica import ReplicaSettings
from kvroute.store.attached_servers import AttachedServers
from kvroute.store.connection import connect

UNKNOWN_CONTEXT_TOKENS = 131_072  # context of a server that does not name it


async def start_attached(
    settings: ReplicaSettings, folder: str, replica_id: str
) -> list[AttachedEngine]:
    """Claim a server, wait until it answers, and return an engine for each of its ranks.

    Raises:
        CannotRunError: The server's blocks have another size than the cluster's.
    """
    servers = AttachedServers(
        connect(settings.redis_url),
        settings.served_model_name,
        cluster=settings.cluster,
        lease_s=settings.lease_s,
    )
    claimed = await claim(servers, settings.server_list.urls, replica_id)
    url = claimed.url
    keeping = asyncio.create_task(claimed.keep(), name="claim")
    connection = ServerConnection(url, authorization(settings.attach_key_file))
    server = await connection.start()
    sizes = {rank.block_size for rank in server.ranks}
    if sizes != {settings.block_size}:
        raise CannotRunError(
            f"{url} has KV cache blocks of {', '.join(map(str, sorted(sizes)))} tokens, and the "
            f"cluster has {settings.block_size}; set --block-size, or start the server with "
            f"--block-size {settings.block_size}"
        )
    template = await asyncio.to_thread(chat_template, folder, settings.revision)
    space = Space(settings.served_model_name, settings.revision, settings.block_size)
    engines = [
        AttachedEngine(
            connection,
            _facts(url, server, rank, content_format(template)),
            number,
            rank,
            space,
            ranks=len(server.ranks),
            model=server.model,
        )
        for number, rank in enumerate(server.ranks)
    ]
    for engine in engines:
        engine.start()
    engines[0].own(claimed, keeping)
    return engines


def authorization(key_file: Path | None) -> Mapping[str, str]:
    """Return the header with the servers' API key; empty: they need none."""
    if key_file is None:
        return {}
    return {"authorization": f"Bearer {key_file.read_text().strip()}"}


def _facts(url: str, server: ServerFacts, rank: RankFacts, format_: str) -> EngineFacts:
    return EngineFacts(
        block_size=rank.block_size,
        capacity_blocks=rank.capacity_blocks,
        max_model_len=server.max_model_len or UNKNOWN_CONTEXT_TOKENS,
        prefill_tokens_per_s=rank.prefill_tokens_per_s,
        prefix_caching=rank.prefix_caching,
        engine="attached",
        content_format=format_,
        server=url,
        guesses_cache=rank.events is None,
    )
