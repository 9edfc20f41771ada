"""Sends the body of a request to a replica in parts, so that no message has the whole body."""

from kvroute.contract.generation import EngineDeadError
from kvroute.contract.http_call import BodyPart, encode_body_part
from kvroute.router.connections.links import HungError, Links, UnansweredError
from kvroute.router.placement.attempts import Body
from kvroute.wire.link import LostError, RefusedError

METHOD = "upload"  # name of the replica's method
TIMEOUT_S = 60.0  # seconds for a replica to store a part


async def upload(body: Body, links: Links, rank_id: str) -> None:
    """Send a body to a rank. The next part is sent when the replica has stored the one before.

    Raises:
        LostError, HungError, EngineDeadError: the replica was lost.
        RefusedError: the replica has no space for the body, or is too busy.
    """
    offset = 0
    async for data in body.parts():
        part = encode_body_part(BodyPart(body.upload.id, offset, data))
        try:
            refusal = await links.call(rank_id, METHOD, part, within_s=TIMEOUT_S)
        except UnansweredError as error:
            if isinstance(error.__cause__, LostError | HungError | EngineDeadError):
                raise error.__cause__ from error
            raise RefusedError(f"it has not stored a part of the body: {error}") from error
        if refusal:
            raise RefusedError(refusal.decode())
        offset += len(data)
