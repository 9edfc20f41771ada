"""Text of a prompt without what the chat template adds: special tokens and the names of roles."""

import re
from collections.abc import Callable, Collection, Iterator, Sequence

# Templates write these between two special tokens, or behind one and before a line's end.
ROLE = re.compile(r"(system|developer|user|assistant|model|tool|ipython)(\n+|$)")
BETWEEN = " · "  # stands between two messages
BROKEN = "\ufffd"  # stands for a part of a character, as a token may end within one


def plain_text(
    token_ids: Sequence[int],
    *,
    decode: Callable[[list[int]], str],
    special: Collection[int],
    before: int | None = None,
) -> str:
    """Return the text of the messages.

    Args:
        token_ids: a part of a prompt.
        decode: returns the text of tokens.
        special: the ids of the special tokens.
        before: the token before the part; None: the part is at the prompt's beginning.
    """
    texts = []
    for follows_special, piece in _pieces(token_ids, special, before):
        text = decode(piece).strip(BROKEN).strip()
        has_role = follows_special and ROLE.match(text)
        texts.append(text[has_role.end() :].strip() if has_role else text)
    return BETWEEN.join(filter(None, texts))


def _pieces(
    token_ids: Sequence[int], special: Collection[int], before: int | None
) -> Iterator[tuple[bool, list[int]]]:
    """Yield the pieces between special tokens, and whether each follows one."""
    follows, piece = before is None or before in special, list[int]()
    for token in token_ids:
        if token not in special:
            piece.append(token)
            continue
        yield follows, piece
        follows, piece = True, []
    yield follows, piece
