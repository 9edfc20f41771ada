"""Finds the first change from one prompt to another, and where the two agree again."""

from collections.abc import Iterator

from xxhash import xxh3_64_hexdigest

from kvroute.contract.generation import TokenIds
from kvroute.router.sessions.breaks import Difference, Span

PROBE_TOKENS = 16  # length of a piece of the old prompt that is searched in the new prompt
# Equal tokens in a row after which the prompts are known to agree again. The markup between two
# messages is shorter, so it does not count.
ENOUGH_TOKENS = 64
# A piece of the old prompt that begins p tokens after the first difference is searched in the first
# 2 * p + MIN_REACH tokens of the new prompt after that difference.
MIN_REACH = 2_048
# The most tokens after the first difference that are searched. A search takes milliseconds.
MAX_SEARCHED = 131_072
FIRST_STEP = 1_024  # tokens compared in the first step; each step compares twice as many
TOKEN_BYTES = 4  # size of a token id in an array


def difference(old: TokenIds, new: TokenIds, *, seed: int) -> Difference | None:
    """Return the first change from one prompt to the other.

    Args:
        seed: seed of the hashes.

    Returns:
        None if one prompt continues the other, or if they have no text in common after the change.
    """
    token = _common_length(old, new)
    if token == min(len(old), len(new)):
        return None
    agreement = _find_agreement(old[token:], new[token:])
    if agreement is None:
        return None
    removed, added, common = agreement
    return Difference(
        token,
        before=_span(old[token : token + removed], seed),
        after=_span(new[token : token + added], seed),
        common=common,
    )


def _find_agreement(old: TokenIds, new: TokenIds) -> tuple[int, int, int] | None:
    """Find where two token sequences agree again.

    Returns:
        The positions in `old` and in `new` where they agree, and for how many tokens.
    """
    packed = new[:MAX_SEARCHED].tobytes()
    enough = max(PROBE_TOKENS, min(ENOUGH_TOKENS, len(old) // 2))
    for probe in _probes(min(len(old), MAX_SEARCHED) - PROBE_TOKENS):
        for match in _matches(packed, old[probe : probe + PROBE_TOKENS].tobytes(), probe):
            back = _common_length(old[:probe][::-1], new[:match][::-1])
            common = back + _common_length(old[probe:], new[match:])
            if common >= enough:
                return probe - back, match - back, common
    return None


def _probes(last: int) -> Iterator[int]:
    """Yield the positions of the pieces to search for.

    Each is about twice as far as the one before. The last one is near the end.
    """
    probe = 0
    while probe <= last:
        yield probe
        probe = 2 * probe + 1
    if last > 0:
        yield last - last // 8


def _matches(packed: bytes, tokens: bytes, probe: int) -> Iterator[int]:
    """Yield positions at which the new prompt has the tokens of a piece.

    These are the piece's own position, and the first position within its reach (see MIN_REACH).

    Args:
        packed: the token ids of the new prompt, as bytes.
        tokens: the token ids of the piece, as bytes.
        probe: position of the piece in the old prompt.
    """
    begin = probe * TOKEN_BYTES
    if packed[begin : begin + len(tokens)] == tokens:
        yield probe
    offset = packed.find(tokens, 0, 2 * begin + MIN_REACH * TOKEN_BYTES)
    if offset >= 0 and offset % TOKEN_BYTES == 0:  # other matches begin inside a token id
        yield offset // TOKEN_BYTES


def _common_length(left: TokenIds, right: TokenIds) -> int:
    """Return the length of the longest common prefix of two token sequences."""
    length, begin, step = min(len(left), len(right)), 0, FIRST_STEP
    while begin < length:
        end = min(begin + step, length)
        differ = left[begin:end] != right[begin:end]
        first = int(differ.argmax())
        if differ[first]:
            return begin + first
        begin, step = end, 2 * step
    return length


def _span(token_ids: TokenIds, seed: int) -> Span:
    return Span(len(token_ids), xxh3_64_hexdigest(token_ids.tobytes(), seed))
