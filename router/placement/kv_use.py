"""A router's estimate of how much of a replica's KV cache is held by running requests."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvroute.blocks.fingerprint import Fingerprint


@dataclass(slots=True)
class _Prefix:
    """A prefix that running requests share. Its blocks are in the cache only once."""

    requests: int = 0  # number of running requests with this prefix
    tokens: int = 0  # tokens of the longest hit of these requests


@dataclass(slots=True)
class KvUse:
    """Tokens of the KV cache that unanswered requests hold. Shared prefixes are counted once.

    Two requests share a prefix if their hits ended with the same block when they were sent. A hit
    here is the longest hit on any replica. A request also shares the prefix of later requests whose
    hits end in blocks that it computes, if these blocks are known.
    """

    tokens: int = 0  # tokens that all requests hold together
    # Request id -> its tokens after the shared prefix, and the last block of that prefix.
    _requests: dict[str, tuple[int, Fingerprint | None]] = field(default_factory=dict)
    _prefixes: dict[Fingerprint, _Prefix] = field(default_factory=dict)
    # Blocks that a request computes -> the request's id. Only the blocks passed to `add` are here.
    _computing: dict[Fingerprint, str] = field(default_factory=dict)
    _blocks: dict[str, Iterable[Fingerprint]] = field(default_factory=dict)  # the same, by id

    def add(
        self,
        request_id: str,
        *,
        new_tokens: int,
        cached_tokens: int,
        prefix: Fingerprint | None,
        blocks: Iterable[Fingerprint] = (),
    ) -> None:
        """Add a request. It is counted until it is removed.

        Args:
            new_tokens: tokens that the request adds to the cache.
            cached_tokens: tokens of its prompt that were in the cache when it was sent.
            prefix: the last block of its prompt that any replica had cached; None: no block was
                cached.
            blocks: the blocks that the request computes; empty: unknown.
        """
        self.remove(request_id)
        if prefix in self._computing and prefix not in self._prefixes:
            self._share(self._computing[prefix], prefix, cached_tokens)
        if blocks:
            self._blocks[request_id] = blocks
            self._computing.update(dict.fromkeys(blocks, request_id))
        own_tokens = new_tokens
        if prefix is None:
            own_tokens += cached_tokens
        else:
            shared = self._prefixes.setdefault(prefix, _Prefix())
            shared.requests += 1
            self.tokens += max(0, cached_tokens - shared.tokens)
            shared.tokens = max(shared.tokens, cached_tokens)
        self.tokens += own_tokens
        self._requests[request_id] = own_tokens, prefix

    def remove(self, request_id: str) -> None:
        """Remove a request. A request that was not added is ignored."""
        own_tokens, prefix = self._requests.pop(request_id, (0, None))
        self.tokens -= own_tokens
        for block in self._blocks.pop(request_id, ()):
            if self._computing.get(block) == request_id:
                del self._computing[block]
        if prefix is not None:
            self._leave(prefix)

    def _share(self, request_id: str, prefix: Fingerprint, tokens: int) -> None:
        """Move the first tokens of a request that computes them to a prefix that others share."""
        own_tokens, shorter = self._requests[request_id]
        before = self._prefixes[shorter].tokens if shorter is not None else 0
        own_tokens -= max(0, tokens - before)
        self._requests[request_id] = own_tokens, prefix
        self._prefixes[prefix] = _Prefix(requests=1, tokens=tokens)
        self.tokens += tokens - max(0, tokens - before)
        if shorter is not None:
            self._leave(shorter)

    def _leave(self, prefix: Fingerprint) -> None:
        shared = self._prefixes[prefix]
        shared.requests -= 1
        if not shared.requests:
            self.tokens -= shared.tokens
            del self._prefixes[prefix]

    def needed(self, *, new_tokens: int, cached_tokens: int, prefix: Fingerprint | None) -> int:
        """Return the tokens that all requests would hold if this one were added; see `add`."""
        shared = None if prefix is None else self._prefixes.get(prefix)
        held = min(cached_tokens, shared.tokens) if shared else 0
        if prefix in self._computing:
            held = cached_tokens
        return self.tokens + new_tokens + cached_tokens - held
