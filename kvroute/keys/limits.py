"""The limits of a tenant, as they are in the key file."""

from typing import Annotated

from msgspec import Meta, Struct

OTHER = "other"  # accounts and metrics name a limited number of tenants; all others are OTHER
ANY = "*"  # the limits under this name apply to each tenant without its own limits

AtLeastOne = Annotated[int, Meta(ge=1, le=2**48)]
Count = Annotated[int, Meta(ge=0, le=2**48)]
Adapter = Annotated[str, Meta(min_length=1, max_length=256)]


class TenantLimits(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The limits of one tenant. None means no limit.

    A misspelt field makes the file unreadable. If it was ignored, it would limit nothing.
    """

    max_requests: AtLeastOne | None = None  # running and waiting requests at all routers
    max_prompt_tokens: AtLeastOne | None = None  # prompt tokens of these requests, cached or not
    uncached_tokens_per_minute: AtLeastOne | None = None  # rate of uncached prompt tokens
    max_prefixes: Count | None = None  # declared named prefixes of each model
    max_pinned_blocks: Count | None = None  # full KV blocks of the tenant's pinned prefixes
    adapters: tuple[Adapter, ...] | None = None  # LoRA adapters that the tenant may use; (): none

    @property
    def are_counted(self) -> bool:
        """Return whether a limit exists for which the tenant's requests have to be counted."""
        return not (
            self.max_requests is None
            and self.max_prompt_tokens is None
            and self.uncached_tokens_per_minute is None
        )

    def allows(self, adapter: str) -> bool:
        """Return whether the tenant's requests may use this LoRA adapter."""
        return self.adapters is None or adapter in self.adapters
