"""Expansion: adds the parts of a prompt that are stored in the cluster.

These are the earlier conversation (Responses API) and the named prefix. The body of the call has
only their ids.
"""

from msgspec.structs import replace

from kvroute.router.api.calls import Call
from kvroute.router.conversations.continuing import Expanded, with_conversation
from kvroute.router.prefixes.catalogue import Catalogue
from kvroute.router.serving.assembly import Parts
from kvroute.store.named_prefix import Prefix


async def expand(call: Call, parts: Parts) -> Expanded:
    """Return the call with its conversation and its named prefix.

    Special tokens in the client's texts are escaped if --escape-special-tokens is on.

    Raises:
        ApiError: the response or the prefix is unknown, or the conversation is too long.
    """
    expanded = await with_conversation(call, parts.conversations)
    call = await parts.tokenizer.escaped(expanded.call)
    prefix = await _named_prefix(call, parts.prefixes.catalogue)
    return replace(expanded, call=call, prefix=prefix)


async def _named_prefix(call: Call, catalogue: Catalogue) -> Prefix | None:
    """Return the named prefix of the call; None if it has none.

    Raises:
        ApiError: no prefix of this name is declared.
    """
    param_and_name = call.prefix()
    return await catalogue.named(*param_and_name, call.caller) if param_and_name else None
