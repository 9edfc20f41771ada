"""The limits of a tenant, as the key file has them."""

from typing import Annotated

from msgspec import Meta, Struct

OTHER = "other"  # name for all tenants above the limit of names in accounts and metrics
ANY = "*"  # name whose limits apply to each tenant without its own limits

AtLeastOne = Annotated[int, Meta(ge=1, le=2**48)]
Count = Annotated[int, Meta(ge=0, le=2**48)]
Adapter = Annotated[str, Meta(min_length=1, max_length=256)]


class TenantLimits(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The limits of a tenant; None: no limit.

    A misspelt field makes the file unreadable, since otherwise it would limit nothing.
    """

    max_requests: AtLeastOne | None = None  # running or waiting requests, on all routers
    max_prompt_tokens: AtLeastOne | None = None  # prompt tokens of these requests, cached or not
    uncached_tokens_per_minute: AtLeastOne | None = None  # uncached prompt tokens
    max_prefixes: Count | None = None  # declared named prefixes, for each model
    max_pinned_blocks: Count | None = None  # full KV blocks of pinned named prefixes
    adapters: tuple[Adapter, ...] | None = None  # LoRA adapters that it may use; (): none

    @property
    def are_counted(self) -> bool:
        """Return whether the tenant's requests have to be counted."""
        return not (
            self.max_requests is None
            and self.max_prompt_tokens is None
            and self.uncached_tokens_per_minute is None
        )

    def allows(self, adapter: str) -> bool:
        """Return whether a request may use this LoRA adapter."""
        return self.adapters is None or adapter in self.adapters
