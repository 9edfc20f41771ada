"""The ledger: counts each prompt token under one cause, which says why it was cached or not.

A cache holds only leading tokens of a prompt. So a few lengths are enough to find the cause of each
token. They are in tokens from the start of the prompt:

    delivered   tokens that the engine took from its cache
    expected    tokens that the router expected in the chosen replica's cache
    reusable    the longest part that any replica had cached, or was about to have cached
    kept        full blocks at the start of the prompt that replicas have to keep in their caches,
                if this request may share them
    partial     the longest part that a replica's layers with full attention have cached, whether or
                not its other layers have; 0 for models with one kind of attention
    known       the longest part that any replica ever had cached, as far as the router remembers
    broken      a range instead of a length: text that was also in the chat's earlier prompt, but
                comes after a place that has changed since then (sessions/breaks.py)
    cacheable   the longest part that a cache could hold: full blocks, without the last token

Delivered tokens count as `hit` up to `expected`, and as `unexpected_hit` beyond: the index was
late, or another request with the same prefix was faster. Of the tokens before `expected`, those
that were copied from another replica's host memory for this request count as `pulled`, and those
that were read from the disk cache as `disk`. All other tokens were computed. The cause
of such a token is the first one in this list whose length is greater than the token's position:

    cause       length      meaning
    stale       expected    evicted in the meantime, not computed yet, or the index was wrong
    spilled     reusable    another replica had it cached, but the request was not sent there
    unpinned    kept        in blocks that replicas have to keep, but no replica had it
    partial     partial     cached, but the layers with windows or states have nothing at its end
    evicted     known       some replica had it cached before, but none has it now; or it is in host
                            memory, and copying it back would take longer than computing it
    broken      broken      inside this range: a cache could have held it if the earlier part of the
                            prompt had not changed
    new         cacheable   no replica ever had it
    isolated    cacheable   as `new`, but the prompt has a cache_salt: without its salt, the text
                            might have been cached. So this is an upper bound of what isolation
                            costs
    tail                    cannot be cached: the token is beyond `cacheable`

The causes always add up to the number of tokens of the prompt.
"""

import msgspec


class Ledger(msgspec.Struct, frozen=True):
    """Number of a prompt's tokens by cause."""

    hit: int
    pulled: int
    disk: int
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

    @property
    def cached(self) -> int:
        """Return the number of tokens that came from a cache."""
        return self.hit + self.pulled + self.disk + self.unexpected_hit


NOTHING = range(0)
CAUSES = Ledger.__struct_fields__
CACHED = ("hit", "pulled", "disk", "unexpected_hit")  # causes of tokens from a cache


def account(
    prompt_tokens: int,
    *,
    cacheable: int,
    reusable: int,
    expected: int,
    delivered: int,
    kept: int = 0,
    partial: int = 0,
    known: int = 0,
    broken: range = NOTHING,
    is_salted: bool = False,
    pulled: int = 0,
    disk: int = 0,
) -> Ledger:
    """Return the ledger of a prompt.

    The lengths are explained in the module. Lengths beyond the end of the prompt are cut off.

    Args:
        is_salted: whether the prompt has a cache_salt.
        pulled: how many delivered and expected tokens came from another replica's host memory.
        disk: how many delivered and expected tokens came from the disk cache.
    """
    begin = min(delivered, prompt_tokens)
    hit = min(begin, expected)
    pulled = min(pulled, hit)
    disk = min(disk, hit - pulled)

    def until(end: int) -> int:
        """Return how many tokens before `end` have no cause yet, and mark them as counted."""
        nonlocal begin
        before, begin = begin, max(begin, min(end, prompt_tokens))
        return begin - before

    counts = {
        "hit": hit - pulled - disk,
        "pulled": pulled,
        "disk": disk,
        "unexpected_hit": begin - hit,
        "stale": until(expected),
        "spilled": until(reusable),
        "unpinned": until(kept),
        "partial": until(partial),
        "evicted": until(known),
    }
    before_broken = until(min(broken.start, cacheable))
    in_broken = until(min(broken.stop, cacheable))
    new = before_broken + until(cacheable)
    return Ledger(
        **counts,
        broken=in_broken,
        new=0 if is_salted else new,
        isolated=new if is_salted else 0,
        tail=until(prompt_tokens),
    )
