"""A router is known until it leaves or its lease ends."""

import asyncio

from kvroute.contract.records import ProcessLocation, RouterDescription
from kvroute.store.connection import connect
from kvroute.store.index import Index


def router_at(node: str) -> RouterDescription:
    return RouterDescription(ProcessLocation(node))


async def test_a_router_is_known_until_it_leaves_or_its_lease_ends(redis_url: str) -> None:
    client = connect(redis_url)
    index = Index(client, "leases")
    await index.announce_router("a", router_at("here"), lease_s=30)
    await index.announce_router("b", router_at("there"), lease_s=0.05)
    await index.announce_router("c", router_at("nowhere"), lease_s=30)
    await index.withdraw_router("c")
    async with asyncio.timeout(60):
        while (known := await index.routers()).keys() != {"a"}:
            await asyncio.sleep(0.01)
    assert known == {"a": router_at("here")}
    await client.aclose()
