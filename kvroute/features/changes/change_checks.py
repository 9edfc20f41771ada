"""What operators see of chats that change before their end: a check, and a figure."""

from collections.abc import Iterable, Iterator, Sequence

from kvroute.doctor.checks import Check, Facts
from kvroute.doctor.load_checks import FEW_REQUESTS
from kvroute.features.figure import Figure

BROKEN_SHARE = 0.05  # a warning if chats that change cost more than this share of prompt tokens
MOVE = "put changing text, such as dates and ids, at the end: into the last user message"
REMEDIES = {  # part of the chat that changes -> remedy; other parts: MOVE
    "tools": "send the same tools in the same order with each turn",
    "template": "perhaps the chat template moves tools or drops earlier reasoning; "
    "chat_template_kwargs may prevent this",
}
ABOUT = (  # explains the figure
    "The share of this router's prompt tokens that missed the caches since chats changed before "
    "their end, in the last five minutes."
)
WHERE = {  # part of the chat that changes -> its description
    "system": "in the system message",
    "developer": "in the developer's message",
    "user": "in a user's message",
    "assistant": "in an assistant's message",
    "tool": "in a tool's result",
    "tools": "in the definitions of tools",
    "template": "although all messages are the same",
}


def changes(models: Iterable[Facts]) -> Iterator[Check]:
    """Check for chats whose earlier messages change from turn to turn.

    Args:
        models: One router's view of the chats of each model (changed_places.py: as_json).
    """
    for model in models:
        if model["requests"] >= FEW_REQUESTS:
            yield from _changes(model["lost_tokens"], model["places"], model["prompt_tokens"])


def _changes(tokens: int, places: Sequence[Facts], total: int) -> Iterator[Check]:
    notable = [place for place in places if place["tokens"] > BROKEN_SHARE * total]
    for place in notable:
        share = (
            f"{place['tokens'] / total:.0%} of prompt tokens missed the cache because chats change"
        )
        remedy = REMEDIES.get(place["role"], MOVE)
        yield Check("hits", "warning", f"{share} {_where(place)}", remedy)
    if not notable and tokens > BROKEN_SHARE * total:
        share = f"{tokens / total:.0%} of prompt tokens missed the cache because chats change"
        yield Check("hits", "warning", f"{share} at many places before their end", MOVE)


def _where(place: Facts) -> str:
    kind = f": {place['kind']}" if place.get("kind") else ""
    return f"at token {place['token']:,}, {WHERE.get(place['role'], 'in a message')}{kind}"


def figures(model: Facts) -> list[Figure]:
    """Return how much changes cost, if they cost anything."""
    if not model["lost_tokens"]:
        return []
    share = model["lost_tokens"] / model["prompt_tokens"]
    note = f"most of it {_where(model['places'][0])}" if model["places"] else "at many places"
    return [Figure("Lost to changed chats", f"{share:.0%}", note, ABOUT, share > BROKEN_SHARE)]
