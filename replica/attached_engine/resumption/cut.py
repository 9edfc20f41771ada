"""Where the second server begins, and the text of the answer before.

vLLM turns tokens into text one by one. It takes the text of the prompt as sent. So a prompt may not
end within a character: vLLM would send the text of the whole prompt once the character is
complete. The last tokens, if they are an incomplete character, are generated again: no text of them
was sent.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from kvroute.replica.attached_engine.resumption.joined_text import held_characters
from kvroute.replica.attached_engine.resumption.plain_stream import PlainStream

INCOMPLETE = "\ufffd"  # how tokenizers write an incomplete character
# Tokens that may be generated again. A character has at most four bytes, and a token at least one;
# the rest is for characters that the model has left incomplete.
MAX_AGAIN = 8
CONTEXT_TOKENS = 8  # tokens of the prompt with which the answer is decoded: spaces depend on them

Detokenize = Callable[[Sequence[int]], Awaitable[str]]  # returns the text of tokens


class Cut(NamedTuple):
    """The part of the answer that the second server gets in its prompt."""

    kept: int  # tokens
    before: str  # its last characters, as many as a stop string can begin with


async def find_cut(
    detokenize: Detokenize,
    plain: PlainStream,
    prompt: Sequence[int],
    answered: Sequence[int],
    text_chars: int,
) -> Cut | None:
    """Return where the second server begins; None: it cannot continue exactly.

    Args:
        detokenize: Returns the text of tokens.
        plain: The request.
        prompt: The token ids of the prompt.
        answered: The token ids of the answer so far.
        text_chars: Characters of the answer that the client has got. The tokens must have just
            this text: otherwise, the first server has changed it, for example with a parser.
    """
    context = [*prompt[-CONTEXT_TOKENS:]]
    text_of_context = await detokenize(context)
    for kept in range(len(answered), max(0, len(answered) - MAX_AGAIN) - 1, -1):
        if kept == 0:  # the whole answer is generated again
            return Cut(0, "") if text_chars == 0 else None
        text = await detokenize([*context, *answered[:kept]])
        if text.endswith(INCOMPLETE):
            continue
        if not text.startswith(text_of_context):
            return None
        before = text[len(text_of_context) :]
        can_begin = min(len(before), held_characters(plain.stops))
        held = 0 if plain.includes_stop else can_begin
        if len(before) - held != text_chars:
            return None
        return Cut(kept, before[len(before) - can_begin :])
    return None
