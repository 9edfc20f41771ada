"""Where a prompt's tokens came from: the cache, and if not, why not.

A token stands at a position of its prompt, and a cache has leading tokens only; so four lengths say
all, each the end of what counts from the prompt's start:

    delivered   the engine took from its cache
    expected    the router counted on in the chosen replica's cache
    reusable    the most that any replica held or was about to hold
    cacheable   any cache could have: whole blocks, without the one of the last token

What was delivered is `hit` up to `expected` and `surprise` beyond it: a gain that the router did
not see coming, since the index was behind or a sibling was quicker. The rest was computed, and each
token of it has one cause, the first of these whose end it lies before:

    stale       expected: evicted on the way, not there yet, or the index was wrong
    spilled     reusable: another replica had it, and the request did not go there
    new         cacheable: no replica had it
    apart       the same, of a prompt with a cache_salt. Prompts of other salts may share the text,
                which only their salts' owners could tell: as much at most is lost to keeping apart
    tail        not cacheable

So the seven add up to the prompt's tokens, whatever the four lengths are.
"""

import msgspec


class Ledger(msgspec.Struct, frozen=True):
    """One prompt's tokens by where they came from."""

    hit: int
    surprise: int
    stale: int
    spilled: int
    new: int
    apart: int
    tail: int


CAUSES = Ledger.__struct_fields__


def account(
    prompt_tokens: int,
    *,
    cacheable: int,
    reusable: int,
    expected: int,
    delivered: int,
    is_salted: bool = False,
) -> Ledger:
    """The ledger of a prompt. All lengths are in tokens; those beyond the prompt end with it."""

    def between(start: int, end: int) -> int:
        return max(0, min(end, prompt_tokens) - start)

    delivered = min(delivered, prompt_tokens)
    known = max(delivered, expected)
    seen = max(known, reusable)
    unseen = between(seen, cacheable)
    return Ledger(
        hit=min(delivered, expected),
        surprise=between(expected, delivered),
        stale=between(delivered, expected),
        spilled=between(known, reusable),
        new=0 if is_salted else unseen,
        apart=unseen if is_salted else 0,
        tail=between(max(seen, cacheable), prompt_tokens),
    )
