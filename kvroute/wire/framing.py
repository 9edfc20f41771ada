"""Framing of messages: a message is sent in one or more frames of at most 1 MB.

A frame has the length of its payload (4 bytes, little endian), the message's kind (1 byte) and the
payload. If the bit MORE is set in the kind, the next frame continues the message.
"""

from collections.abc import Iterator
from enum import IntEnum
from struct import Struct

HEADER = Struct("<IB")
LARGEST_FRAME = 1_000_000  # most bytes of payload in one frame
LARGEST_MESSAGE = 64_000_000  # most bytes of one message; a million token ids take 4 million bytes
MORE = 0x80


class MessageKind(IntEnum):
    """The kinds of messages. Unknown kinds, from a later version, are ignored."""

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
    """A message is too long, or the bytes are not frames."""


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
        self.largest = LARGEST_MESSAGE
        self._rest = b""  # an incomplete frame
        self._parts: list[bytes] = []  # payloads of an incomplete message
        self._size = 0  # bytes in these payloads

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the kind and payload of each message that `data` completes. Raises FramingError."""
        if self._rest:
            data = self._rest + data
        begin, end = 0, len(data)
        while end - begin >= HEADER.size:
            length, kind = HEADER.unpack_from(data, begin)
            if length > LARGEST_FRAME or self._size + length > self.largest:
                raise FramingError(f"the message has {self._size + length} bytes or more")
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
