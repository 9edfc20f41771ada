"""Framing of messages: a message is sent in one or more frames of at most 1 MB.

A frame has the length of its payload (4 bytes, little endian), the message's kind (1 byte) and the
payload. If the bit MORE is set in the kind, the next frame continues the message.
"""

from collections.abc import Iterator
from enum import IntEnum
from struct import Struct

HEADER = Struct("<IB")
LARGEST_FRAME = 1_000_000  # maximum size of a frame's payload in bytes
LARGEST_MESSAGE = 64_000_000  # maximum size of a message in bytes; a million token ids take 4 MB
MORE = 0x80  # bit of a frame's kind: the next frame continues the message


class MessageKind(IntEnum):
    """The kinds of messages. Receivers ignore unknown kinds, since a later version may add some."""

    CHALLENGE = 1  # structs.Challenge
    PROOF = 2  # structs.Proof
    WELCOME = 3  # structs.Welcome
    BEGIN = 4  # structs.encode_begin: a request. Its answer is a stream of chunks
    CANCEL = 5  # structs.Cancel
    CALL = 6  # structs.MethodCall
    DELTAS = 7  # structs.Deltas: chunks and ends of streams
    REPLY = 8  # structs.MethodReply
    PENDING = 9  # structs.Pending
    TAKEN = 10  # structs.Preparing: the replica begins to prepare a request for its engine
    PREPARED = 11  # structs.Preparing: the replica has prepared the request
    AWAY = 12  # structs.Away


class FramingError(ValueError):
    """A received message is too long, or the received bytes are not frames."""


def frames(kind: MessageKind, payload: bytes) -> Iterator[bytes]:
    """Yield the frames of a message."""
    begin = 0
    while len(payload) - begin > LARGEST_FRAME:
        part = payload[begin : begin + LARGEST_FRAME]
        yield HEADER.pack(len(part), kind | MORE) + part
        begin += LARGEST_FRAME
    part = payload[begin:]
    yield HEADER.pack(len(part), kind) + part


class Reader:
    """Assembles messages from received bytes."""

    def __init__(self) -> None:
        self.largest = LARGEST_MESSAGE  # maximum size of a message in bytes
        self._rest = b""  # received bytes of an incomplete frame
        self._parts: list[bytes] = []  # received payloads of an incomplete message
        self._size = 0  # total size of these payloads in bytes

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the kind and payload of each message that `data` completes. Raises FramingError."""
        if self._rest:
            data = self._rest + data
        begin, end = 0, len(data)
        while end - begin >= HEADER.size:
            length, kind = HEADER.unpack_from(data, begin)
            if length > LARGEST_FRAME or self._size + length > self.largest:
                raise FramingError(
                    f"a message has at least {self._size + length} bytes, which is too long"
                )
            if end - begin - HEADER.size < length:
                break
            begin += HEADER.size + length
            payload = data[begin - length : begin]
            if kind & MORE:
                self._parts.append(payload)
                self._size += length
                continue
            if self._parts:
                payload = b"".join([*self._parts, payload])
                self._parts, self._size = [], 0
            yield kind, payload
        self._rest = data[begin:]
