"""What the seats know of one active session."""

from collections import OrderedDict
from dataclasses import dataclass, field

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.keep import SessionTurn

# A session may have several conversations, such as those of its sub-agents. The tokens of this many
# of them are counted, the latest ones.
MAX_CONTEXTS = 64


@dataclass(slots=True)
class ActiveSession:
    """A session that has waiting or running requests, or had some in the last IDLE_S."""

    tenant: int  # number of the session's tenant
    used_s: float  # time when its latest request was sent or ended
    shared_tokens: int = 0  # tokens at the start of its prompts that other sessions have too
    running: int = 0  # number of its requests that wait for a seat or have not ended
    seated_s: float | None = None  # time when it got its seat, or None if it has none
    tokens: int = 0  # sum of the tokens of its contexts, without the shared tokens
    # Last block of each conversation's latest prompt -> the prompt's tokens that are not shared.
    contexts: OrderedDict[Fingerprint, int] = field(default_factory=OrderedDict)

    def add_turn(self, turn: SessionTurn, tokens: int) -> None:
        """Replace the context of the conversation's previous turn by that of this turn.

        Args:
            tokens: prompt tokens of this turn.
        """
        for block in (turn.before, turn.end):
            self.tokens -= self.contexts.pop(block, 0)
        self.contexts[turn.end] = max(0, tokens - self.shared_tokens)
        self.tokens += self.contexts[turn.end]
        while len(self.contexts) > MAX_CONTEXTS:
            self.tokens -= self.contexts.popitem(last=False)[1]
