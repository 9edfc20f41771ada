"""A router's estimate of how much of a replica's KV cache is held by running requests."""

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
    here is the longest hit on any replica.
    """

    tokens: int = 0  # tokens that all requests hold together
    # Request id -> its tokens after the shared prefix, and the last block of that prefix.
    _requests: dict[str, tuple[int, Fingerprint | None]] = field(default_factory=dict)
    _prefixes: dict[Fingerprint, _Prefix] = field(default_factory=dict)

    def add(
        self, request_id: str, *, new_tokens: int, cached_tokens: int, prefix: Fingerprint | None
    ) -> None:
        """Add a request. It is counted until it is removed.

        Args:
            new_tokens: tokens that the request adds to the cache.
            cached_tokens: tokens of its prompt that were in the cache when it was sent.
            prefix: the last block of its prompt that any replica had cached; None: no block was
                cached.
        """
        self.remove(request_id)
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
        if prefix is None:
            return
        shared = self._prefixes[prefix]
        shared.requests -= 1
        if not shared.requests:
            self.tokens -= shared.tokens
            del self._prefixes[prefix]

    def needed(self, *, new_tokens: int, cached_tokens: int, prefix: Fingerprint | None) -> int:
        """Return the tokens that all requests would hold if this one were added; see `add`."""
        shared = None if prefix is None else self._prefixes.get(prefix)
        held = min(cached_tokens, shared.tokens) if shared else 0
        return self.tokens + new_tokens + cached_tokens - held
