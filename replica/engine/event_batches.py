"""vLLM's protocol for KV cache events over ZMQ: numbered batches, and replays of earlier batches.

The publisher has two sockets. Its PUB socket sends each batch as (topic, number, payload); numbers
start from 0. Its ROUTER socket receives a number and sends a replay: all batches from that number
on that the publisher still has, then a message with the number END_OF_REPLAY.
"""

import asyncio

import zmq.asyncio

END_OF_REPLAY = 2**64 - 1  # number in the message that ends a replay
REPLAY_TIMEOUT_S = 2.0  # timeout for each message of a replay, in seconds


async def receive_batch(socket: zmq.asyncio.Socket, wait_s: float) -> tuple[int, bytes] | None:
    """Return the number and the payload of a batch, or None if none arrived in time."""
    try:
        async with asyncio.timeout(wait_s):
            *_, number, payload = await socket.recv_multipart()
    except TimeoutError:
        return None
    return int.from_bytes(number, "big"), payload


async def request_replay(socket: zmq.asyncio.Socket, number: int) -> None:
    """Request a replay of all batches from this number on; `socket` is a DEALER socket."""
    await socket.send_multipart([b"", number.to_bytes(8, "big")])
