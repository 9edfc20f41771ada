"""Parses a request body with several chats, in the format of vLLM's route for batches of chats."""

from msgspec import Raw
from msgspec.json import decode, encode

from kvroute.router.api.call_limits import MAX_CHOICES, MAX_COPIED
from kvroute.router.api.calls import CHAT_COMPLETIONS, Call, parse_call
from kvroute.router.api.errors import ApiError, invalid, shown, unsupported
from kvroute.router.api.json_members import members
from kvroute.router.api.parsing import BOM, json_object, read_as_vllm_does

CHAT_BATCH = f"{CHAT_COMPLETIONS}/batch"
# Fields that vLLM supports in single chats, but not in batches.
SINGLE_CHATS = (
    "stream",
    "tools",
    "use_beam_search",
)


def parse_chat_batch(raw: bytes) -> list[Call]:
    """Return one call per conversation. Each call has a copy of the body's other fields.

    Raises:
        ApiError: the body is not a batch, or one of its chats is not valid.
    """
    raw = raw.removeprefix(BOM)
    body = json_object(raw)
    read_as_vllm_does(body)
    _check(body)
    fields = members(raw)
    conversations = decode(fields.pop("messages"), type=list[Raw])
    size = sum(len(bytes(value)) for value in fields.values())
    if size * len(conversations) > MAX_COPIED:
        raise ApiError(
            413,
            f"the fields next to messages take {size} bytes, and each of the {len(conversations)} "
            f"conversations needs a copy; the limit is {MAX_COPIED} together. Send fewer at once",
            code="request_too_large",
        )
    return [
        parse_call(CHAT_COMPLETIONS, encode({**fields, "messages": chat})) for chat in conversations
    ]


def _check(body: dict[str, object]) -> None:
    conversations = body.get("messages")
    if not isinstance(conversations, list) or not conversations:
        raise _no_conversations(conversations)
    for conversation in conversations:
        if not isinstance(conversation, list) or not conversation:
            raise _no_conversations(conversations)
    if len(conversations) > MAX_CHOICES:
        raise invalid(
            "messages",
            f"messages has {len(conversations)} conversations; send {MAX_CHOICES} at most",
        )
    if body.get("n") not in (None, 1):
        raise invalid(
            "n", f"n is {shown(body['n'])}; in a batch, each chat has one choice, so leave n out"
        )
    for name in SINGLE_CHATS:
        if body.get(name):
            raise unsupported(
                name,
                f"{name} is {shown(body[name])}, which a batch of chats does not support; "
                f"leave {name} out, or send each conversation to {CHAT_COMPLETIONS}",
            )


def _no_conversations(given: object) -> ApiError:
    return invalid(
        "messages",
        f"messages is {shown(given)}; expected a list of conversations, each a list of messages",
    )
