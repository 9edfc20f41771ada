"""The named prefixes of one model in one router: what the core calls."""

import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from pydantic import TypeAdapter, ValidationError

from kvroute.contract.generation import TokenIds
from kvroute.features.figure import Figure
from kvroute.features.opening import Opening
from kvroute.features.prefixes.catalogue import Catalogue
from kvroute.features.prefixes.composer import PrefixComposer
from kvroute.features.prefixes.declarations import Declarations
from kvroute.features.prefixes.named_prefix import Prefix
from kvroute.features.prefixes.prefix_id import PrefixId
from kvroute.features.prefixes.prefix_options import Task
from kvroute.features.prefixes.prefix_store import Prefixes
from kvroute.features.router_feature import RouterFeature
from kvroute.process.exposition import Readings
from kvroute.router.api.calls import Call
from kvroute.router.api.errors import ApiError, invalid, shown

if TYPE_CHECKING:
    from kvroute.router.dispatch.generation import Generation
    from kvroute.router.serving.assembly import Parts
    from kvroute.router.serving.router_base import RouterBase

HEADER = "x-kvroute-prefix"  # header with the name of a declared prefix
FIELDS = ("task_id", "prefix_id")  # fields of a body with such a name
# Description of a valid name, for error messages.
NAME = "the name of a declared prefix: a number, or up to 128 characters without ␟"
FIGURES_S = 5.0  # time between two updates of the figures, since the counts are in Redis

_id = TypeAdapter[str](PrefixId)


class RouterPrefixes(RouterFeature):
    """The catalogue of the named prefixes of one model.

    Args:
        tasks: the prefixes of --multi-task-prompt, which the router declares at its start.
    """

    name = "prefixes"

    def __init__(self, base: "RouterBase", tasks: Sequence[Task]) -> None:
        self._base = base
        self._block_size = base.settings.block_size
        self._tasks = tasks
        self._composer = PrefixComposer(base.tokenizer)
        self._figures: Sequence[Figure] = ()
        self._figures_until_s = 0.0

    def attach(self, parts: "Parts") -> None:
        base = self._base
        store = Prefixes(base.redis, base.model, cluster=base.cluster, unreadable=base.unreadable)
        self._catalogue = Catalogue(store, parts.fleet, block_size=self._block_size)
        self.declarations = Declarations(
            self._catalogue, self._composer, base.index.records, block_size=self._block_size
        )

    def tasks(self) -> dict[str, Coroutine[Any, Any, None]]:
        return {"catalogue": self._catalogue.run(self._tasks, self._composer)}

    async def opening(self, call: Call) -> "NamedOpening | None":
        named = named_in(call)
        if named is None:
            return None
        prefix = await self._catalogue.named(*named, call.caller)
        return NamedOpening(prefix, call.cache_salt, self._composer, self._catalogue)

    def shared_tokens(self, token_ids: TokenIds) -> int:
        return self._catalogue.shared_tokens(token_ids)

    def metrics(self, registry: CollectorRegistry, readings: Readings) -> None:
        readings.labelled_counter(  # MAX_PREFIXES limits the number of series
            "prefix",
            "kvroute_prefix_saved_tokens",
            "Tokens of a declared prefix that came from a cache.",
            self._catalogue.saved_tokens,
        )

    async def figures(self) -> Sequence[Figure]:
        if time.monotonic() >= self._figures_until_s:
            self._figures = await self.declarations.figures()
            self._figures_until_s = time.monotonic() + FIGURES_S
        return self._figures


class NamedOpening(Opening):
    """A named prefix as the opening of a call.

    Args:
        salt: the cache salt of the call.
    """

    def __init__(
        self, prefix: Prefix, salt: str, composer: PrefixComposer, catalogue: Catalogue
    ) -> None:
        self._prefix = prefix
        self._composer = composer
        self._catalogue = catalogue
        self.name = prefix.id
        # Requests with another salt cannot use the blocks that replicas keep.
        if prefix.is_shared or prefix.namespace == salt:
            self.kept_tokens = prefix.full_tokens(catalogue.block_size)

    async def chat(
        self, body: Mapping[str, Any], content_format: str | None, *, max_model_len: int
    ) -> TokenIds:
        return await self._composer.chat(
            body, self._prefix, content_format, max_model_len=max_model_len
        )

    async def completions(
        self, prompts: Sequence[str] | Sequence[TokenIds], *, max_model_len: int
    ) -> list[TokenIds]:
        return await self._composer.completions(prompts, self._prefix, max_model_len=max_model_len)

    def before(self, prompts: Sequence[TokenIds], *, has_media: bool) -> list[TokenIds]:
        if "prompt" not in self._prefix.source or has_media:
            raise ApiError(
                400,
                f"prefix {self._prefix.label!r} cannot be used with this body; declare the prefix "
                "with a prompt instead of messages, and send a body without images",
                code="unsupported_parameter",
            )
        return [self._composer.after_prefix(self._prefix, prompt) for prompt in prompts]

    def first_token(self, generation: "Generation") -> None:
        self._catalogue.count(self._prefix, generation.cached_tokens)


def named_in(call: Call) -> tuple[str, str] | None:
    """Return the name of the prefix that a call uses.

    Returns:
        The field or header that has the name, and the name. None if there is no prefix.

    Raises:
        ApiError: the body has both task_id and prefix_id, or the name is not valid.
    """
    given = {name: call.body[name] for name in FIELDS if call.body.get(name) is not None}
    if len(given) == 2:
        raise invalid(
            "prefix_id",
            f"prefix_id is {shown(given['prefix_id'])} and task_id is "
            f"{shown(given['task_id'])}; both name the prefix, so send only one of them",
        )
    for field, value in given.items():
        return field, _checked(field, value)
    name = call.headers.get(HEADER)
    return (HEADER, name) if name else None


def _checked(field: str, value: object) -> str:
    try:
        return _id.validate_python(value)
    except ValidationError:
        raise invalid(field, f"{field} is {shown(value)}; expected {NAME}") from None
