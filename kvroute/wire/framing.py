"""Messages on a connection: frames of at most 1 MB, of which a long message takes several.

A frame is the length of its payload (4 bytes, little endian), the message's kind (1 byte) and the
payload. A kind with MORE added: the next frame continues the message.
"""

from collections.abc import Iterator
from enum import IntEnum
from struct import Struct

HEADER = Struct("<IB")
LARGEST_FRAME = 1_000_000  # bytes of payload
LARGEST_MESSAGE = 64_000_000  # bytes; a prompt of a million tokens takes four million
MORE = 0x80


class Kind(IntEnum):
    """What a message is. Messages of other kinds, from a later version, are ignored."""

    CHALLENGE = 1
    PROOF = 2
    WELCOME = 3
    BEGIN = 4
    CANCEL = 5
    CALL = 6
    DELTAS = 7
    REPLY = 8
    PENDING = 9
    TAKEN = 10
    PREPARED = 11


class FramingError(ValueError):
    """The bytes are no frames, or a message is too long."""


def frames(kind: Kind, payload: bytes) -> Iterator[bytes]:
    """The message's bytes, frame by frame."""
    begin = 0
    while len(payload) - begin > LARGEST_FRAME:
        part = payload[begin : begin + LARGEST_FRAME]
        yield HEADER.pack(len(part), kind | MORE) + part
        begin += LARGEST_FRAME
    part = payload[begin:]
    yield HEADER.pack(len(part), kind) + part


class Reader:
    """Makes messages from bytes as they come."""

    def __init__(self) -> None:
        self.largest = LARGEST_MESSAGE
        self._rest = b""
        self._parts: list[bytes] = []  # of a message that is not complete
        self._size = 0  # of these

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """The kind and payload of each message that is complete now. Raises FramingError."""
        if self._rest:
            data = self._rest + data
        begin, end = 0, len(data)
        while end - begin >= HEADER.size:
            length, kind = HEADER.unpack_from(data, begin)
            if length > LARGEST_FRAME or self._size + length > self.largest:
                raise FramingError(f"a message of more than {self._size + length - 1} bytes")
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
