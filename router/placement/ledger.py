"""Every prompt token has one cause: it came from the cache, or there is one reason why not.

A cache holds only leading tokens of a prompt. So a few lengths describe everything. Each counts
tokens from the prompt's start:

    delivered   tokens that the engine took from its cache
    expected    tokens that the router expected in the chosen replica's cache
    reusable    the longest part that any replica held or was about to hold
    named       whole blocks of the named prefix that the request starts with, if it may share them
    partial     the longest part of which a replica's layers with full attention hold all, whatever
                its other layers hold; 0 for models with one kind of attention
    known       the longest part that any replica ever held, as far as the router remembers
    broken      not a length: the part that stood in the chat's earlier prompt too, behind a place
                that has changed since (sessions/breaks.py)
    cacheable   what a cache could hold: whole blocks, without the block of the last token

Delivered tokens are `hit` up to `expected`, and `unexpected_hit` beyond it: the index was behind,
or another request with the same prefix was faster. The other tokens were computed. The cause of
such a token is the first of these whose length reaches beyond the token's position:

    stale       expected: evicted in the meantime, not there yet, or the index was wrong
    spilled     reusable: another replica had it, but the request did not go there
    unpinned    named: declared to be kept warm, but no replica had it
    partial     partial: cached, but the layers with windows or states kept nothing at its end
    evicted     known: some replica had it once, but none has it now, or only in host memory from
                where reloading it would take longer than computing it
    broken      inside that part: had the prompt before it not changed, a cache could have held it
    new         cacheable: no replica ever had it
    isolated    the same, for a prompt with a cache_salt. Prompts with other salts may share the
                text, but only the owners of the salts can know: this is the most isolation can cost
    tail        not cacheable

The eleven causes add up to the prompt's tokens, whatever the lengths are.
"""

import msgspec


class Ledger(msgspec.Struct, frozen=True):
    """One prompt's tokens by where they came from."""

    hit: int
    unexpected_hit: int
    stale: int
    spilled: int
    unpinned: int
    partial: int
    evicted: int
    broken: int
    new: int
    isolated: int
    tail: int


NOTHING = range(0)
CAUSES = Ledger.__struct_fields__


def account(
    prompt_tokens: int,
    *,
    cacheable: int,
    reusable: int,
    expected: int,
    delivered: int,
    named: int = 0,
    partial: int = 0,
    known: int = 0,
    broken: range = NOTHING,
    is_salted: bool = False,
) -> Ledger:
    """Return the ledger of a prompt.

    All lengths are in tokens. Lengths beyond the prompt's end are cut.
    """
    begin = min(delivered, prompt_tokens)
    hit = min(begin, expected)

    def until(end: int) -> int:
        """Return the tokens before `end` that have no cause yet."""
        nonlocal begin
        before, begin = begin, max(begin, min(end, prompt_tokens))
        return begin - before

    counts = {
        "hit": hit,
        "unexpected_hit": begin - hit,
        "stale": until(expected),
        "spilled": until(reusable),
        "unpinned": until(named),
        "partial": until(partial),
        "evicted": until(known),
    }
    before_broken = until(min(broken.start, cacheable))
    lost = until(min(broken.stop, cacheable))
    new = before_broken + until(cacheable)
    return Ledger(
        **counts,
        broken=lost,
        new=0 if is_salted else new,
        isolated=new if is_salted else 0,
        tail=until(prompt_tokens),
    )
