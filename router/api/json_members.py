"""JSON objects whose members stay raw bytes, so that only changed members are encoded again."""

import msgspec

Members = dict[str, msgspec.Raw]

encode = msgspec.json.encode
_members = msgspec.json.Decoder(Members)


def members(raw: bytes | msgspec.Raw) -> Members:
    """Return the members of a JSON object as raw bytes.

    Raises:
        DECODE_ERRORS: the bytes are not a JSON object.
    """
    return _members.decode(raw)
