"""Expand: a call gets what the cluster has stored of its prompt.

That is the conversation before it (Responses API) and the named prefix, which are not in its body.
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
    """Return the call with its conversation and its prefix, and without special tokens in texts.

    Args:
        conversations: None: none are stored.

    Raises:
        ApiError: there is no such response or prefix, or the whole is too long.
    """
    expanded = await continued(call, conversations)
    call = await tokenizer.escaped(expanded.call)
    return replace(expanded, call=call, prefix=await named_prefix(call, catalogue))


async def named_prefix(call: Call, catalogue: Catalogue) -> Prefix | None:
    """Return the prefix that the call names; None: it names none. ApiError: there is none such."""
    named = call.prefix()
    return await catalogue.named(*named, call.caller) if named else None
