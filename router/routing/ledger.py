"""Where a prompt's tokens came from: the cache, and if not, why not.

A token stands at a position of its prompt, and a cache has leading tokens only; so a few lengths
say all, each the end of what counts from the prompt's start:

    delivered   the engine took from its cache
    expected    the router counted on in the chosen replica's cache
    reusable    the most that any replica held or was about to hold
    named       whole blocks of the named prefix that the request goes on from
    known       the most that any replica ever held, as far as the router remembers
    cacheable   any cache could have: whole blocks, without the one of the last token

What was delivered is `hit` up to `expected` and `surprise` beyond it: a gain that the router did
not see coming, since the index was behind or a sibling was quicker. The rest was computed, and each
token of it has one cause, the first of these whose end it lies before:

    stale       expected: evicted on the way, not there yet, or the index was wrong
    spilled     reusable: another replica had it, and the request did not go there
    unpinned    named: declared to be kept warm, and no replica had it
    evicted     known: some replica once had it, and none any more
    new         cacheable: no replica ever had it
    apart       the same, of a prompt with a cache_salt. Prompts of other salts may share the text,
                which only their salts' owners could tell: as much at most is lost to keeping apart
    tail        not cacheable

So the nine add up to the prompt's tokens, whatever the lengths are.
"""

import msgspec


class Ledger(msgspec.Struct, frozen=True):
    """One prompt's tokens by where they came from."""

    hit: int
    surprise: int
    stale: int
    spilled: int
    unpinned: int
    evicted: int
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
    named: int = 0,
    known: int = 0,
    is_salted: bool = False,
) -> Ledger:
    """The ledger of a prompt. All lengths are in tokens; those beyond the prompt end with it."""
    begin = min(delivered, prompt_tokens)
    hit = min(begin, expected)

    def until(end: int) -> int:
        """What lies before the end and not before an earlier one."""
        nonlocal begin
        before, begin = begin, max(begin, min(end, prompt_tokens))
        return begin - before

    return Ledger(
        hit=hit,
        surprise=begin - hit,
        stale=until(expected),
        spilled=until(reusable),
        unpinned=until(0 if is_salted else named),
        evicted=until(known),
        new=until(0 if is_salted else cacheable),
        apart=until(cacheable),
        tail=until(prompt_tokens),
    )
