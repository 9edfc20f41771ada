"""The latest prompt of each conversation that this router has sent, in bounded memory."""

from collections import OrderedDict
from typing import NamedTuple

from kvroute.blocks.chain import Scope
from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.generation import TokenIds
from kvroute.contract.keep import NO_BLOCK, SessionTurn

CAPACITY_TOKENS = 4_000_000  # 16 MB
PROMPT_TOKENS = 128  # what the rest of a prompt takes, in tokens' room: 500 bytes


class RecentPrompt(NamedTuple):
    token_ids: TokenIds  # shape (n,); not copied
    scope: Scope
    room_tokens: int


class RecentPrompts:
    """By the fingerprint that ends them (SessionTurn.end). The oldest are dropped first."""

    def __init__(self, *, capacity_tokens: int = CAPACITY_TOKENS) -> None:
        self._capacity_tokens = capacity_tokens
        self._prompts: OrderedDict[Fingerprint, RecentPrompt] = OrderedDict()  # oldest first
        self.room_tokens = 0  # taken, at most capacity_tokens

    def __len__(self) -> int:
        return len(self._prompts)

    def see(self, turn: SessionTurn, token_ids: TokenIds, scope: Scope) -> None:
        """It takes the place of the conversation's earlier prompt. The last one of a conversation
        takes it, and is not kept."""
        end, before, room_tokens = turn.end, turn.before, PROMPT_TOKENS + len(token_ids)
        if before in self._prompts:
            self.drop(before)
        if end in self._prompts:
            self.drop(end)
        if end == NO_BLOCK or turn.is_last or room_tokens > self._capacity_tokens // 8:
            return
        self._prompts[end] = RecentPrompt(token_ids, scope, room_tokens)
        self.room_tokens += room_tokens
        while self.room_tokens > self._capacity_tokens:
            self.drop(next(iter(self._prompts)))

    def ends(self) -> list[Fingerprint]:
        """Of all that are kept, latest first."""
        return [*reversed(self._prompts)]

    def get(self, end: Fingerprint) -> RecentPrompt | None:
        return self._prompts.get(end)

    def drop(self, end: Fingerprint) -> None:
        if prompt := self._prompts.pop(end, None):
            self.room_tokens -= prompt.room_tokens
