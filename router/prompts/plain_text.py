"""Returns a prompt's text without the special tokens and role names that templates add."""

import re
from collections.abc import Callable, Collection, Iterator, Sequence

# The name of a role. Templates write it directly after a special token, and before the end of the
# line or another special token.
ROLE = re.compile(r"(system|developer|user|assistant|model|tool|ipython)(\n+|$)")
BETWEEN = " · "  # stands between two messages
BROKEN = "\ufffd"  # stands for an incomplete character: a token may end within a character


def plain_text(
    token_ids: Sequence[int],
    *,
    decode: Callable[[list[int]], str],
    special: Collection[int],
    before: int | None = None,
) -> str:
    """Return the text of the messages in a part of a prompt.

    Args:
        token_ids: a part of a prompt.
        decode: returns the text of tokens.
        special: the ids of the special tokens.
        before: the token before the part; None: the part is at the prompt's beginning.
    """
    texts = []
    for follows_special, piece in _pieces(token_ids, special, before):
        text = decode(piece).strip(BROKEN).strip()
        role = follows_special and ROLE.match(text)
        texts.append(text[role.end() :].strip() if role else text)
    return BETWEEN.join(filter(None, texts))


def _pieces(
    token_ids: Sequence[int], special: Collection[int], before: int | None
) -> Iterator[tuple[bool, list[int]]]:
    """Yield the pieces between special tokens, and whether a special token precedes each piece.

    The start of the prompt counts as a special token.
    """
    follows_special, piece = before is None or before in special, list[int]()
    for token in token_ids:
        if token not in special:
            piece.append(token)
            continue
        yield follows_special, piece
        follows_special, piece = True, []
    yield follows_special, piece
