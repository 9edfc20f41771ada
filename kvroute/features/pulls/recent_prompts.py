"""The latest prompt of each conversation that this router has sent, in bounded memory.

If a conversation's replica is removed, other replicas get its blocks, and engines find blocks by
the prompt's token ids.
"""

from collections import OrderedDict
from typing import NamedTuple

from kvroute.blocks.chain import Scope
from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.generation import TokenIds
from kvroute.contract.keep import NO_BLOCK, RetentionHint, SessionTurn
from kvroute.contract.ranks import replica_of
from kvroute.features.pulls.peer_pulls import Exchange

CAPACITY_TOKENS = 4_000_000  # limit of all prompts together: 16 MB
# Memory of a prompt besides its token ids, in token ids of 4 bytes.
PROMPT_TOKENS = 128


class RecentPrompt(NamedTuple):
    """A prompt that a replica has computed."""

    token_ids: TokenIds
    scope: Scope
    turn: SessionTurn
    keep: RetentionHint  # when a replica evicts its blocks
    rank_id: str  # the rank that has its blocks
    source: Exchange  # how this rank lets others pull them


class RecentPrompts:
    """The latest prompts, by their last block. The oldest ones are forgotten first."""

    def __init__(self, *, capacity_tokens: int = CAPACITY_TOKENS) -> None:
        self._capacity_tokens = capacity_tokens
        self._prompts: OrderedDict[Fingerprint, RecentPrompt] = OrderedDict()  # oldest first
        self._tokens = 0  # size of all prompts, at most the capacity

    def __len__(self) -> int:
        return len(self._prompts)

    def store(self, prompt: RecentPrompt) -> None:
        """Store a conversation's prompt instead of its earlier one.

        A conversation that the client has ended is forgotten.
        """
        turn = prompt.turn
        self.forget(turn.before)
        self.forget(turn.end)
        if turn.end == NO_BLOCK or turn.is_last or _size(prompt) > self._capacity_tokens:
            return
        self._prompts[turn.end] = prompt
        self._tokens += _size(prompt)
        while self._tokens > self._capacity_tokens:
            self.forget(next(iter(self._prompts)))

    def forget(self, end: Fingerprint) -> None:
        """Forget the prompt with this last block."""
        if prompt := self._prompts.pop(end, None):
            self._tokens -= _size(prompt)

    def move(self, end: Fingerprint, rank_id: str, source: Exchange) -> None:
        """Record that another rank has the blocks of a prompt now."""
        if prompt := self._prompts.get(end):
            self._prompts[end] = prompt._replace(rank_id=rank_id, source=source)

    def on(self, replica_id: str) -> list[RecentPrompt]:
        """Return the prompts whose blocks a replica has, the latest one first."""
        prompts = reversed(self._prompts.values())
        return [prompt for prompt in prompts if replica_of(prompt.rank_id) == replica_id]


def _size(prompt: RecentPrompt) -> int:
    return PROMPT_TOKENS + len(prompt.token_ids)
