"""Expansion: adds the parts of a prompt that are stored in the cluster.

These are the earlier conversation (Responses API) and the opening, that is, the beginning that a
feature adds to the prompts. The body of the call has only their ids.
"""

from msgspec.structs import replace

from kvroute.router.api.calls import Call
from kvroute.router.conversations.continuing import Expanded, with_conversation
from kvroute.router.serving.assembly import Parts


async def expand(call: Call, parts: Parts) -> Expanded:
    """Return the call with its conversation and its opening.

    Special tokens in the client's texts are escaped if --escape-special-tokens is on.

    Raises:
        ApiError: the response or the opening is unknown, or the conversation is too long.
    """
    expanded = await with_conversation(call, parts.conversations)
    call = await parts.tokenizer.escaped(expanded.call)
    return replace(expanded, call=call, opening=await parts.opening(call))
