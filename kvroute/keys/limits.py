"""What a tenant may take, as the key file has it."""

from typing import Annotated

from msgspec import Meta, Struct

OTHER = "other"  # all tenants that have no name of their own in accounts and metrics
ANY = "*"  # in place of a tenant's name: each one without limits of its own

AtLeastOne = Annotated[int, Meta(ge=1, le=2**48)]
Count = Annotated[int, Meta(ge=0, le=2**48)]
Adapter = Annotated[str, Meta(min_length=1, max_length=256)]


class TenantLimits(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """None: no limit. A misspelt field makes the file unreadable, since it would limit nothing."""

    max_requests: AtLeastOne | None = None  # under way at a time, on all routers
    max_prompt_tokens: AtLeastOne | None = None  # of requests under way, cached ones too
    uncached_tokens_per_minute: AtLeastOne | None = None  # of prompts
    max_prefixes: Count | None = None  # names it has declared, of each model
    max_pinned_blocks: Count | None = None  # whole KV blocks of those that are pinned
    adapters: tuple[Adapter, ...] | None = None  # those that it may name; (): none

    @property
    def are_counted(self) -> bool:
        """Whether its requests have to be counted."""
        return not (
            self.max_requests is None
            and self.max_prompt_tokens is None
            and self.uncached_tokens_per_minute is None
        )

    def allows(self, adapter: str) -> bool:
        """Whether a request may name that LoRA adapter."""
        return self.adapters is None or adapter in self.adapters
