"""Starts the engines of the attached server that a replica has claimed."""

import asyncio
from dataclasses import dataclass
from functools import partial

from redis.asyncio import Redis

from kvroute.blocks.chain import Space
from kvroute.contract.identity import chat_template, usual_max_tokens
from kvroute.contract.records import EngineFacts
from kvroute.replica.attached_engine.attached import AttachedEngine
from kvroute.replica.attached_engine.child_server import ChildServer
from kvroute.replica.attached_engine.claim import Claim, claim
from kvroute.replica.attached_engine.content_format import content_format
from kvroute.replica.attached_engine.server_connection import ServerConnection
from kvroute.replica.attached_engine.server_facts import (
    OWN_SERVER,
    RankFacts,
    ServerFacts,
    authorization,
    misfit,
)
from kvroute.replica.vllm_engine.process.cpu_affinity import claim_cores
from kvroute.settings.replica import ReplicaSettings
from kvroute.store.attached_servers import AttachedServers
from kvroute.store.connection import connect

UNKNOWN_CONTEXT_TOKENS = 131_072  # context of a server that does not name it


async def start_attached(
    settings: ReplicaSettings, folder: str, replica_id: str
) -> list[AttachedEngine]:
    """Claim a server, wait until it can be used, and return an engine for each of its ranks.

    If the server is removed from the list meanwhile, another one is claimed.
    """
    redis = connect(settings.redis_url)
    try:
        return await _claimed_engines(redis, settings, folder, replica_id)
    except BaseException:
        await redis.aclose()
        raise


async def _claimed_engines(
    redis: Redis, settings: ReplicaSettings, folder: str, replica_id: str
) -> list[AttachedEngine]:
    servers = AttachedServers(
        redis,
        settings.served_model_name,
        cluster=settings.cluster,
        lease_s=settings.lease_s,
    )
    while True:
        claimed = await claim(servers, settings.server_list.urls, replica_id)
        connection = ServerConnection(claimed.url, authorization(settings.attach_key_file))
        claimed.away_reason = partial(getattr, connection, "away_reason")
        if (server := await _usable(connection, claimed, settings)) is not None:
            engines = await _engines(settings, folder, connection, server)
            engines[0].own(_OwnedClaim(claimed, redis))
            return engines
        await claimed.close()
        await connection.close()


@dataclass(frozen=True, slots=True)
class _OwnedClaim:
    """A claim with its connection to Redis."""

    claim: Claim
    redis: Redis

    def problem(self) -> str:
        return self.claim.problem()

    async def close(self) -> None:
        await self.claim.close()
        await self.redis.aclose()


async def _usable(
    connection: ServerConnection, claimed: Claim, settings: ReplicaSettings
) -> ServerFacts | None:
    """Wait until the server can be used, and return its facts; None: the claim was lost before."""
    fits = partial(
        misfit,
        connection.url,
        model=settings.server_model,
        block_size=settings.block_size,
        adapters=[adapter.name for adapter in settings.adapters],
    )
    starting = asyncio.create_task(connection.start(fits))
    lost = asyncio.create_task(claimed.lost())
    try:
        await asyncio.wait([starting, lost], return_when=asyncio.FIRST_COMPLETED)
        return starting.result() if starting.done() else None
    finally:
        starting.cancel()
        lost.cancel()


async def start_unpatched(
    settings: ReplicaSettings, folder: str, unfit: str
) -> list[AttachedEngine]:
    """Start a vLLM server without kvroute's changes, and return its engine.

    Args:
        settings: The replica's settings.
        folder: The model's folder, or its name on the Hugging Face Hub.
        unfit: Why kvroute's own engine does not fit the installed vLLM; empty: the user's choice.

    Raises:
        CannotRunError: The server has ended while it started.
    """
    child = ChildServer(settings, folder, claim_cores(settings.cores))
    connection = ServerConnection(OWN_SERVER, {}, socket=child.socket)
    ended = asyncio.create_task(child.watch_start())
    starting = asyncio.create_task(connection.start())
    try:
        await asyncio.wait([ended, starting], return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            ended.result()
        engines = await _engines(settings, folder, connection, starting.result(), unfit=unfit)
    except BaseException:
        await child.close()
        raise
    finally:
        starting.cancel()
        ended.cancel()
    engines[0].own(child)
    return engines


async def _engines(
    settings: ReplicaSettings,
    folder: str,
    connection: ServerConnection,
    server: ServerFacts,
    *,
    unfit: str = "",
) -> list[AttachedEngine]:
    """Return a started engine for each rank of the server."""
    template = await asyncio.to_thread(chat_template, folder, settings.revision)
    usual_limit = await asyncio.to_thread(usual_max_tokens, folder, settings.revision)
    format_ = content_format(template)
    space = Space(settings.served_model_name, settings.revision, settings.block_size)
    url = connection.url if settings.is_attached else ""
    engines = [
        AttachedEngine(
            connection,
            _facts(url, server, rank, format_, unfit),
            server,
            number,
            space,
            has_usual_limit=usual_limit is not None,
        )
        for number, rank in enumerate(server.ranks)
    ]
    for engine in engines:
        engine.start()
    return engines


def _facts(url: str, server: ServerFacts, rank: RankFacts, format_: str, unfit: str) -> EngineFacts:
    return EngineFacts(
        block_size=rank.block_size,
        capacity_blocks=rank.capacity_blocks,
        max_model_len=server.max_model_len or UNKNOWN_CONTEXT_TOKENS,
        prefill_tokens_per_s=rank.prefill_tokens_per_s,
        prefix_caching=rank.prefix_caching,
        engine="attached" if url else "unpatched",
        content_format=format_,
        server=url,
        guesses_cache=rank.events is None,
        max_variants=len(server.adapters),
        unfit=unfit,
    )
