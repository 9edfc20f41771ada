"""A router's estimate of how much of a replica's KV cache its running requests hold."""

from dataclasses import dataclass, field

from kvroute.blocks.fingerprint import Fingerprint


@dataclass(slots=True)
class _Prefix:
    """A prefix that running requests share: its blocks are in the cache once."""

    requests: int = 0
    tokens: int = 0  # the most tokens that one of these requests found in the cache


@dataclass(slots=True)
class KvUse:
    """Tokens of the KV cache that unanswered requests hold, with shared prefixes counted once.

    Requests share a prefix if, when they were sent, the last block of their prompts that any
    replica had cached was the same block.
    """

    tokens: int = 0
    _requests: dict[str, tuple[int, Fingerprint | None]] = field(default_factory=dict)
    _prefixes: dict[Fingerprint, _Prefix] = field(default_factory=dict)

    def add(
        self, request_id: str, *, new_tokens: int, cached_tokens: int, prefix: Fingerprint | None
    ) -> None:
        """Count a request until it is removed.

        Args:
            new_tokens: tokens that the request adds to the cache.
            cached_tokens: tokens of its prompt that were in the cache when it was sent.
            prefix: the last block of its prompt that any replica had cached; None: no replica had
                any.
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
        """Forget a request; nothing happens if it is not counted."""
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
        """Return the tokens that all requests would hold if one more were added; see `add`."""
        shared = None if prefix is None else self._prefixes.get(prefix)
        held = min(cached_tokens, shared.tokens) if shared else 0
        return self.tokens + new_tokens + cached_tokens - held
