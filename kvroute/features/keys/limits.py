"""The limits of a tenant, as they are in the key file."""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

# The name under which accounts and metrics count all further tenants, once they have reached their
# maximum number of names.
OTHER = "other"
ANY = "*"  # the limits under this name apply to each tenant without its own limits

AtLeastOne = Annotated[int, Meta(ge=1, le=2**48)]
Count = Annotated[int, Meta(ge=0, le=2**48)]
Adapter = Annotated[str, Meta(min_length=1, max_length=256)]


class TenantLimits(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The limits of one tenant. None means no limit.

    A misspelt field makes the file invalid. If it were ignored, the limit would not apply.
    """

    max_requests: AtLeastOne | None = None  # running and waiting requests at all routers
    max_prompt_tokens: AtLeastOne | None = None  # prompt tokens of these requests, cached or not
    uncached_tokens_per_minute: AtLeastOne | None = None  # rate of uncached prompt tokens
    max_prefixes: Count | None = None  # declared named prefixes of each model
    max_pinned_blocks: Count | None = None  # full KV blocks of the tenant's pinned prefixes
    max_files: Count | None = None  # files of the Files API, with the results of batches
    max_file_bytes: Count | None = None  # bytes of all files, with results
    max_open_batches: Count | None = None  # batches that have not ended
    max_adapters: Count | None = None  # added LoRA adapters of the tenant, for each model
    adapters: tuple[Adapter, ...] | None = None  # LoRA adapters that the tenant may use; (): none

    @property
    def by_name(self) -> dict[str, int]:
        """Return the numbers that are limited, by the name of the limit."""
        fields = msgspec.structs.asdict(self)
        return {name: most for name, most in fields.items() if isinstance(most, int)}

    @property
    def are_counted(self) -> bool:
        """Return whether routers have to count the tenant's requests or tokens."""
        counted = (self.max_requests, self.max_prompt_tokens, self.uncached_tokens_per_minute)
        return any(limit is not None for limit in counted)


NO_LIMITS = TenantLimits()
