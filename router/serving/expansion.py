"""Expansion: adds the parts of a prompt that are stored in the cluster.

These are the earlier conversation (Responses API) and the named prefix. The body of the call has
only their ids.
"""

from msgspec.structs import replace

from kvroute.router.api.calls import Call
from kvroute.router.conversations.continuing import Conversations, Expanded, with_conversation
from kvroute.router.prefixes.catalogue import Catalogue
from kvroute.router.prompts.tokenizer import Prompts
from kvroute.store.named_prefix import Prefix


async def expand(
    call: Call,
    *,
    conversations: Conversations | None,
    tokenizer: Prompts,
    catalogue: Catalogue,
) -> Expanded:
    """Return the call with its conversation and its named prefix.

    Special tokens in the client's texts are escaped if --escape-special-tokens is on.

    Args:
        conversations: the stored conversations; None: this server does not store responses.

    Raises:
        ApiError: the response or the prefix is unknown, or the conversation is too long.
    """
    expanded = await with_conversation(call, conversations)
    call = await tokenizer.escaped(expanded.call)
    return replace(expanded, call=call, prefix=await _named_prefix(call, catalogue))


async def _named_prefix(call: Call, catalogue: Catalogue) -> Prefix | None:
    """Return the named prefix of the call; None if it has none.

    Raises:
        ApiError: no prefix of this name is declared.
    """
    param_and_name = call.prefix()
    return await catalogue.named(*param_and_name, call.caller) if param_and_name else None
