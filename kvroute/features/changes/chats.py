"""A store of recent chats, in which a router finds the earlier turn of a chat.

Clients send all messages of a chat in each request, without an id. So the router recognises a chat
by its messages: all but the newest were also in the earlier turn. The store has a hash of each
message and the token ids of the prompt, but not the text.
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
from kvroute.features.changes.differences import difference
from kvroute.router.sessions.breaks import Break, Difference

CAPACITY_TOKENS = 8_000_000  # size of the store in token ids of 4 bytes: 32 MB
MESSAGE_TOKENS = 24  # memory that a message takes besides its tokens: 100 bytes, in tokens
TURN_TOKENS = 256  # memory that a turn takes besides its tokens: 1 kB, in tokens
MAX_MESSAGES = 2_048  # longest chat in messages; longer chats would take too long to compare
MIN_CHARACTERS = 16  # a shorter message does not identify a chat, since many chats have it
KEY_MESSAGES = 8  # number of a chat's last messages by which it can be found
CHATS_PER_MESSAGE = 4  # chats with the same message that can be found by it; the latest ones
MAX_LOOKUPS = 16  # messages of a new chat that are looked up, the newest first
SURE_MESSAGES = 2  # with this many equal messages in a row, two prompts belong to one chat

ROLES = ("system", "developer", "user", "assistant", "tool")
# Roles of the items of /v1/responses that have a type instead of a role.
TYPES = {"reasoning": "assistant", "function_call": "assistant", "function_call_output": "tool"}
# Fields of a message that are hashed separately or, like cache_control, not at all. Clients move
# cache_control to another message in each turn.
HASHED = {"role", "content", "cache_control"}

encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, eq=False)
class SentChat:
    """One turn of a chat, as it was sent."""

    messages: list[int]  # hashes of the messages
    key_numbers: list[int]  # numbers of the messages that are long enough to identify the chat
    tools: int  # hash of the definitions of tools
    token_ids: TokenIds  # the prompt

    @property
    def size_tokens(self) -> int:
        """Return the memory that the turn takes, in token ids of 4 bytes."""
        return TURN_TOKENS + len(self.token_ids) + MESSAGE_TOKENS * len(self.messages)

    @property
    def keys(self) -> list[int]:
        """Return the hashes of the messages by which the chat can be found."""
        return [self.messages[number] for number in self.key_numbers[-KEY_MESSAGES:]]


@dataclass(frozen=True, slots=True)
class Earlier:
    """A stored turn that may be an earlier turn of a new chat."""

    turn: SentChat
    first_change: int  # number of the first message that differs
    common_after: int  # messages in a row after the changed ones that both chats have

    @property
    def is_continued(self) -> bool:
        """Return whether the new chat begins with all messages of the stored turn."""
        return self.first_change == len(self.turn.messages)

    def is_same_chat(self, differ: Difference | None) -> bool:
        """Return whether the stored turn and the new one belong to the same chat.

        Different chats may have one message in common. So with only one common message, most of the
        two prompts must be equal too.
        """
        at_start = self.first_change if self.is_continued else 0
        if max(self.common_after, at_start) >= SURE_MESSAGES:
            return True
        if differ is None:
            return self.is_continued
        return differ.token + differ.common > max(differ.before.tokens, differ.after.tokens)


class Chats:
    """The recent chats of one model in one router. Not thread-safe."""

    def __init__(self, *, capacity_tokens: int = CAPACITY_TOKENS, seed: int | None = None) -> None:
        """Create an empty store of chats.

        Args:
            capacity_tokens: upper bound of the memory, in token ids of 4 bytes.
            seed: seed of all hashes, 64 bits. It is random by default, so that clients cannot
                guess the content of other chats from a hash.
        """
        self._capacity_tokens = capacity_tokens
        self._seed = secrets.randbits(64) if seed is None else seed
        self._turns: OrderedDict[SentChat, None] = OrderedDict()  # the latest turn of each chat
        self._by_message: dict[int, list[SentChat]] = {}  # hash of a message -> chats, oldest first
        self.used_tokens = 0  # memory in use, at most capacity_tokens

    def __len__(self) -> int:
        return len(self._turns)

    def store(
        self, messages: Sequence[Any], token_ids: TokenIds, *, tools: Any = None, scope: str = ""
    ) -> Break | None:
        """Replace the chat's earlier turn by this one, and return the change in its history.

        Args:
            messages: the messages, as parsed from JSON.
            token_ids: the prompt.
            tools: the definitions of tools, as parsed from JSON.
            scope: chats in different scopes never count as the same chat, since they share no
                cache.
        """
        turn = self._turn(messages, token_ids, tools, scope)
        if turn is None:
            return None
        earlier, broken = self._compare(turn, messages)
        if earlier is not None:
            self._drop(earlier)
        self._add(turn)
        return broken

    def compare(
        self, messages: Sequence[Any], token_ids: TokenIds, *, tools: Any = None, scope: str = ""
    ) -> Break | None:
        """Return what `store` would return, without storing the turn."""
        turn = self._turn(messages, token_ids, tools, scope)
        return None if turn is None else self._compare(turn, messages)[1]

    def _turn(
        self, messages: Sequence[Any], token_ids: TokenIds, tools: Any, scope: str
    ) -> SentChat | None:
        """Return the turn to store; None if it cannot be hashed or is too long.

        It is too long with more than MAX_MESSAGES, or if its tokens take an eighth of the store.
        """
        if not 0 < len(messages) <= MAX_MESSAGES or len(token_ids) > self._capacity_tokens // 8:
            return None
        seed = xxh3_64_intdigest(_bytes(scope), self._seed)
        try:
            digests = [_digest(message, seed) for message in messages]
            tools_hash = xxh3_64_intdigest(encode(tools), seed) if tools else seed
        except (ValueError, TypeError, OverflowError, RecursionError):
            return None
        long = [number for number, (_, length) in enumerate(digests) if length >= MIN_CHARACTERS]
        hashes = [digest for digest, _ in digests]
        return SentChat(hashes, long, tools_hash, np.array(token_ids, np.uint32))

    def _compare(
        self, turn: SentChat, messages: Sequence[Any]
    ) -> tuple[SentChat | None, Break | None]:
        """Return the chat's earlier turn, and the change in its history since."""
        earlier = self._earlier(turn)
        if earlier is None:
            return None, None
        differ = difference(earlier.turn.token_ids, turn.token_ids, seed=self._seed)
        if not earlier.is_same_chat(differ):
            return None, None
        return earlier.turn, _break(earlier, turn, messages, differ) if differ else None

    def _earlier(self, turn: SentChat) -> Earlier | None:
        """Find the chat's earlier turn by the newest message that both turns have."""
        common = (n for n in reversed(turn.key_numbers) if turn.messages[n] in self._by_message)
        for number in islice(common, MAX_LOOKUPS):
            stored = reversed(self._by_message[turn.messages[number]])
            if overlaps := [overlap for old in stored if (overlap := _overlap(old, turn, number))]:
                return max(overlaps, key=lambda earlier: earlier.first_change)
        return None

    def _add(self, turn: SentChat) -> None:
        if not turn.key_numbers:
            return  # no later turn could find it
        self._turns[turn] = None
        self.used_tokens += turn.size_tokens
        for key in turn.keys:
            turns = self._by_message.setdefault(key, [])
            turns.append(turn)
            del turns[:-CHATS_PER_MESSAGE]
        while self.used_tokens > self._capacity_tokens:
            self._drop(next(iter(self._turns)))

    def _drop(self, turn: SentChat) -> None:
        del self._turns[turn]
        self.used_tokens -= turn.size_tokens
        for key in turn.keys:
            turns = [other for other in self._by_message.get(key, ()) if other is not turn]
            if turns:
                self._by_message[key] = turns
            else:
                self._by_message.pop(key, None)


def _overlap(old: SentChat, new: SentChat, number: int) -> Earlier | None:
    """Compare a stored turn with a new one.

    Args:
        number: number of a message of the new turn that the stored turn has too.

    Returns:
        None if they have no message in common after the first change. Then they are two chats that
        only begin with the same messages.
    """
    first_change = _common_length(old.messages, new.messages)
    if first_change == len(old.messages):
        return Earlier(old, first_change, common_after=0)
    old_number = _position(old.messages, new.messages[number], preferred=number)
    new_rest = new.messages[first_change : number + 1]
    old_rest = old.messages[first_change : old_number + 1]
    common_after = _common_length(new_rest[::-1], old_rest[::-1])
    return Earlier(old, first_change, common_after) if common_after else None


def _break(earlier: Earlier, turn: SentChat, messages: Sequence[Any], differ: Difference) -> Break:
    number = earlier.first_change
    if earlier.turn.tools != turn.tools and number:  # templates put tools before the second message
        return Break("tools", None, differ)
    if earlier.is_continued:
        return Break("template", None, differ)
    return Break(_role(messages[number]), number, differ)


def _role(message: Any) -> str:
    fields = message if isinstance(message, Mapping) else {}
    role, kind = fields.get("role"), fields.get("type")
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
    """Yield those parts of a message, as bytes, that a template may write into the prompt.

    A content that is a string yields the same as a list with this text as its only part.
    """
    if isinstance(content, str):
        yield _bytes(content)
    elif isinstance(content, list):
        yield from map(_piece, content)
    elif content is not None:
        yield encode(content)
    if message.keys() <= HASHED:
        return
    if rest := {name: value for name, value in message.items() if name not in HASHED and value}:
        yield encode(rest)


def _piece(part: Any) -> bytes:
    if not isinstance(part, dict):
        return encode(part)
    text = part.get("text")
    if isinstance(text, str):
        return _bytes(text)
    return encode({name: value for name, value in part.items() if name != "cache_control"})


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # JSON may contain lone surrogates


def _common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the longest common prefix.

    Bisection is faster than a loop, because comparing two slices runs in C.
    """
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _position(messages: Sequence[int], message: int, *, preferred: int) -> int:
    """Return the position of the message: `preferred` if it is there, else its last position."""
    if preferred < len(messages) and messages[preferred] == message:
        return preferred
    return len(messages) - 1 - messages[::-1].index(message)
