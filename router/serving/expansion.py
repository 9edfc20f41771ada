"""Expansion: adds to a call the parts of its prompt that are stored in the cluster.

These are the earlier conversation (Responses API) and the named prefix. The call's body only names
them.
"""

from msgspec.structs import replace

from kvroute.router.api.calls import Call
from kvroute.router.prefixes.catalogue import Catalogue
from kvroute.router.prompts.tokenizer import Prompts
from kvroute.router.serving.conversations import Conversations, Expanded, continued
from kvroute.store.named_prefix import Prefix


async def expand(
    call: Call,
    *,
    conversations: Conversations | None,
    tokenizer: Prompts,
    catalogue: Catalogue,
) -> Expanded:
    """Return the call with its conversation and its named prefix, and with special tokens split.

    Args:
        conversations: the stored conversations; None: this server stores none.

    Raises:
        ApiError: there is no such response or prefix, or the whole conversation is too long.
    """
    expanded = await continued(call, conversations)
    call = await tokenizer.escaped(expanded.call)
    return replace(expanded, call=call, prefix=await named_prefix(call, catalogue))


async def named_prefix(call: Call, catalogue: Catalogue) -> Prefix | None:
    """Return the prefix that the call names; None: the call names no prefix.

    Raises:
        ApiError: no prefix of that name is declared.
    """
    named = call.prefix()
    return await catalogue.named(*named, call.caller) if named else None
