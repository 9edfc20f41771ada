"""A router's recent chats, among which it finds an earlier turn of the same chat.

Clients send a chat as a whole, without a name. So a chat is found again by its messages: the newest
ones are new, and those before them stand in the earlier turn too. Of messages, only hashes are
kept, and token ids of the prompts.
"""

import secrets
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from kvroute.contract.generation import TokenIds
from kvroute.router.sessions.breaks import Break, Difference, difference

CAPACITY_TOKENS = 8_000_000  # 32 MB
MESSAGE_TOKENS, TURN_TOKENS = (
    24,
    256,
)  # memory of a message and a turn besides tokens: 100 bytes and 1 kB, in tokens
MAX_MESSAGES = 2_048  # messages of a chat; longer chats cost too much to compare
SHORT = 16  # characters; many chats have such a message
FOUND_BY = 8  # a chat is found by that many of its last messages
SHARERS = 4  # the latest chats that are found by the same message
LOOKED_AT = 16  # messages of a new chat that others have too
SURE_MESSAGES = 2  # equal messages in a row from which two prompts are the same chat

ROLES = ("system", "developer", "user", "assistant", "tool")
OTHERS = ("tools", "template", "other")  # definitions of tools; how messages become a prompt
PLACES = (*ROLES, *OTHERS)
# Items of /v1/responses that have no role.
TYPES = {"reasoning": "assistant", "function_call": "assistant", "function_call_output": "tool"}
HASHED = {"role", "content", "cache_control"}  # clients move the last one from turn to turn

encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, eq=False)
class SentChat:
    """A chat as it was sent once."""

    messages: list[int]  # hashes
    telling: list[int]  # numbers of the messages that are long enough to find it by
    tools: int  # hash
    token_ids: TokenIds

    @property
    def room_tokens(self) -> int:
        return TURN_TOKENS + len(self.token_ids) + MESSAGE_TOKENS * len(self.messages)

    @property
    def keys(self) -> list[int]:
        """Return the messages by which the chat is found."""
        return [self.messages[number] for number in self.telling[-FOUND_BY:]]


@dataclass(frozen=True, slots=True)
class Earlier:
    """A kept turn that has messages of a new one."""

    turn: SentChat
    parted: int  # number of the first message that differs
    behind: int  # messages in a row behind that, that both have

    @property
    def is_whole(self) -> bool:
        """Return whether the new chat begins with all of it."""
        return self.parted == len(self.turn.messages)

    def is_same_chat(self, differ: Difference | None) -> bool:
        """Return whether it is the same chat.

        Chats may have one message in common by chance, so most of the prompts must be equal, too.
        """
        if max(self.behind, self.parted if self.is_whole else 0) >= SURE_MESSAGES:
            return True
        if differ is None:
            return self.is_whole
        return differ.token + differ.alike > max(differ.before.tokens, differ.after.tokens)


class Chats:
    """One model's chats in one router. Not for several threads."""

    def __init__(self, *, capacity_tokens: int = CAPACITY_TOKENS, seed: int | None = None) -> None:
        """Create an empty store of chats.

        Args:
            capacity_tokens: bound of the stored tokens.
            seed: 64 bits for all hashes. By default it is random, so no client can learn from a
                hash what others' chats contain.
        """
        self._capacity_tokens = capacity_tokens
        self._seed = secrets.randbits(64) if seed is None else seed
        self._turns: OrderedDict[SentChat, None] = OrderedDict()  # oldest first
        self._by_message: dict[int, list[SentChat]] = {}  # oldest first
        self.room_tokens = 0  # taken, at most capacity_tokens

    def __len__(self) -> int:
        return len(self._turns)

    def see(
        self, messages: Sequence[Any], token_ids: TokenIds, *, tools: Any = None, scope: str = ""
    ) -> Break | None:
        """Store a turn in place of the chat's earlier turn, and return what broke the prefix since.

        Args:
            messages: the messages, as parsed from JSON.
            scope: chats with different scopes do not share caches.
        """
        turn = self._turn(messages, token_ids, tools, scope)
        if turn is None:
            return None
        earlier, found = self._compared(turn, messages)
        if earlier is not None:
            self._drop(earlier)
        self._keep(turn)
        return found

    def look(
        self, messages: Sequence[Any], token_ids: TokenIds, *, tools: Any = None, scope: str = ""
    ) -> Break | None:
        """Return what `see` would return, and store nothing."""
        turn = self._turn(messages, token_ids, tools, scope)
        return None if turn is None else self._compared(turn, messages)[1]

    def _turn(
        self, messages: Sequence[Any], token_ids: TokenIds, tools: Any, scope: str
    ) -> SentChat | None:
        """Return the turn; None: it is too long to follow, or has nothing that can be hashed."""
        if not 0 < len(messages) <= MAX_MESSAGES or len(token_ids) > self._capacity_tokens // 8:
            return None
        seed = xxh3_64_intdigest(_bytes(scope), self._seed)
        try:
            digests = [_digest(message, seed) for message in messages]
            tools_hash = xxh3_64_intdigest(encode(tools), seed) if tools else seed
        except (ValueError, TypeError, OverflowError, RecursionError):
            return None
        telling = [number for number, (_, length) in enumerate(digests) if length >= SHORT]
        hashes = [digest for digest, _ in digests]
        return SentChat(hashes, telling, tools_hash, np.array(token_ids, np.uint32))

    def _compared(
        self, turn: SentChat, messages: Sequence[Any]
    ) -> tuple[SentChat | None, Break | None]:
        """Return the chat's earlier turn, and what broke the prefix since."""
        earlier = self._earlier(turn)
        if earlier is None:
            return None, None
        differ = difference(earlier.turn.token_ids, turn.token_ids, seed=self._seed)
        if not earlier.is_same_chat(differ):
            return None, None
        return earlier.turn, _break(earlier, turn, messages, differ) if differ else None

    def _earlier(self, turn: SentChat) -> Earlier | None:
        """Return the chat's earlier turn, found by the newest message that both have."""
        known = (each for each in reversed(turn.telling) if turn.messages[each] in self._by_message)
        for number in islice(known, LOOKED_AT):
            kept = reversed(self._by_message[turn.messages[number]])
            if found := list(filter(None, (_overlap(each, turn, number) for each in kept))):
                return max(found, key=lambda earlier: earlier.parted)
        return None

    def _keep(self, turn: SentChat) -> None:
        if not turn.telling:
            return  # no later turn could find it
        self._turns[turn] = None
        self.room_tokens += turn.room_tokens
        for key in turn.keys:
            turns = self._by_message.setdefault(key, [])
            turns.append(turn)
            del turns[:-SHARERS]
        while self.room_tokens > self._capacity_tokens:
            self._drop(next(iter(self._turns)))

    def _drop(self, turn: SentChat) -> None:
        del self._turns[turn]
        self.room_tokens -= turn.room_tokens
        for key in turn.keys:
            turns = [each for each in self._by_message.get(key, ()) if each is not turn]
            if turns:
                self._by_message[key] = turns
            else:
                self._by_message.pop(key, None)


def _overlap(old: SentChat, new: SentChat, number: int) -> Earlier | None:
    """Compare two chats that both have the new chat's message of this number.

    Returns:
        None: the message is before the first difference. They are two chats that began alike.
    """
    parted = _same(old.messages, new.messages)
    if parted == len(old.messages):
        return Earlier(old, parted, behind=0)
    there = _position(old.messages, new.messages[number], nearest=number)
    ours, theirs = new.messages[parted : number + 1], old.messages[parted : there + 1]
    behind = _same(ours[::-1], theirs[::-1])
    return Earlier(old, parted, behind) if behind else None


def _break(earlier: Earlier, turn: SentChat, messages: Sequence[Any], differ: Difference) -> Break:
    parted = earlier.parted
    if earlier.turn.tools != turn.tools and parted:  # templates put them before the second message
        return Break("tools", None, differ)
    if earlier.is_whole:
        return Break("template", None, differ)
    return Break(_role(messages[parted]), parted, differ)


def _role(message: Any) -> str:
    given = message if isinstance(message, Mapping) else {}
    role, kind = given.get("role"), given.get("type")
    if role is None and isinstance(kind, str):
        role = TYPES.get(kind)
    return role if role in ROLES else "other"


def _digest(message: Any, seed: int) -> tuple[int, int]:
    """Return a message's hash and its approximate length in characters."""
    if not isinstance(message, dict):
        raw = encode(message)
        return xxh3_64_intdigest(raw, seed), len(raw)
    role, content = message.get("role"), message.get("content")
    digest = xxh3_64_intdigest(_bytes(role), seed) if isinstance(role, str) else seed
    if isinstance(content, str) and len(message) == 2:
        raw = _bytes(content)
        return xxh3_64_intdigest(raw, digest), len(raw)
    length = 0
    for piece in _pieces(message, content):
        digest = xxh3_64_intdigest(piece, digest)
        length += len(piece)
    return digest, length


def _pieces(message: Mapping[str, Any], content: Any) -> Iterator[bytes]:
    """Yield the parts of a message that a prompt may contain.

    A text alone is the same as a list of one text.
    """
    if isinstance(content, str):
        yield _bytes(content)
    elif isinstance(content, list):
        yield from map(_piece, content)
    elif content is not None:
        yield encode(content)
    if message.keys() <= HASHED:
        return
    if rest := {name: each for name, each in message.items() if name not in HASHED and each}:
        yield encode(rest)


def _piece(part: Any) -> bytes:
    if not isinstance(part, dict):
        return encode(part)
    text = part.get("text")
    if isinstance(text, str):
        return _bytes(text)
    return encode({name: each for name, each in part.items() if name != "cache_control"})


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # JSON may have halves of characters


def _same(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of equal numbers at the start of both.

    The search halves the range, since slices are compared without Python.
    """
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _position(messages: Sequence[int], message: int, *, nearest: int) -> int:
    """Return the message's position: the nearest one, else the last one."""
    if nearest < len(messages) and messages[nearest] == message:
        return nearest
    return len(messages) - 1 - messages[::-1].index(message)
