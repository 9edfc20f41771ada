"""Recognises the turns of conversations.

A turn continues a conversation if its prompt continues the prompt of an earlier turn. A router sees
this even if the earlier turn's blocks are no longer cached; an engine forgets the blocks that it
evicts. A conversation is recognised by the last block of its latest prompt, which the next prompt
contains. This module only computes: it does not use the clock or the network.
"""

import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.keep import MAX_TURNS, NO_BLOCK, SESSION_BITS, SessionTurn

MAX_ENDS = 50_000  # turns that the router remembers
# Blocks of a prompt that are searched for the end of the earlier turn. The answer to that turn
# follows its end, and may have this many blocks.
MAX_ANSWER_BLOCKS = 256


class SessionHints(NamedTuple):
    """What a client's request says about its conversation."""

    session: int = 0  # hash of the session id; 0 if the client sent none
    is_end: bool = False  # the client says that this is the last turn
    is_promised: bool = False  # the client says that a further turn will follow
    has_tools: bool = False  # the request defines tools that the model may call
    tenant: int = 0  # hash of the tenant; 0 if there is none


NO_HINTS = SessionHints()


@dataclass(slots=True)
class _Latest:
    """The latest turn of a conversation, which another turn may continue."""

    sent: SessionTurn
    turn: SessionTurn  # the same, with what the client has declared about the session since then


class Turns:
    """The latest turns of conversations, of all routers as far as this router knows them.

    Args:
        rng: makes numbers for sessions without an id.
        begun: each is called with a new turn, and the turn that it continues.
    """

    def __init__(
        self,
        rng: random.Random | None = None,
        begun: Iterable[Callable[[SessionTurn, SessionTurn | None], None]] = (),
    ) -> None:
        self._rng = rng or random.Random()
        self._begun = tuple(begun)
        self._ends: OrderedDict[Fingerprint, _Latest] = OrderedDict()  # by the last block
        # Hash of the session id that a client sent -> last block of the session's latest turn.
        self._sessions: OrderedDict[int, Fingerprint] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ends)

    def find(
        self,
        chain: Sequence[Fingerprint],
        known_blocks: int,
        hints: SessionHints,
        shared_blocks: int = 0,
    ) -> tuple[SessionTurn, SessionTurn | None]:
        """Return a prompt's turn, and the turn that it continues; None: it is the first one.

        Args:
            chain: the prompt's reusable blocks.
            known_blocks: leading blocks of the chain that some replica has or had cached.
            hints: what the client says about its conversation.
            shared_blocks: leading blocks that all namespaces share, such as a system prompt. These
                do not identify a conversation.
        """
        end = chain[-1] if chain else NO_BLOCK
        before = self._before(chain, known_blocks, hints.session, shared_blocks)
        earlier = self._turn(before)
        turn = SessionTurn(
            end,
            hints.session or self._session_after(earlier, end),
            _number_after(earlier, end),
            before,
            is_named=hints.session != 0,
            is_last=hints.is_end,
            has_tools=hints.has_tools,
            tenant=hints.tenant,
        )
        return turn, earlier

    def begin(self, turn: SessionTurn) -> None:
        """Record a turn that this router or another one sends. A second call has no effect."""
        if turn.end == NO_BLOCK or self.knows(turn):
            return
        earlier = self._turn(turn.before)
        self._ends.pop(turn.before, None)
        self._ends[turn.end] = _Latest(turn, turn)
        self._ends.move_to_end(turn.end)
        _bound(self._ends, MAX_ENDS)
        if turn.is_named:
            self._sessions[turn.session] = turn.end
            self._sessions.move_to_end(turn.session)
            _bound(self._sessions, MAX_ENDS)
        for begun in self._begun:
            begun(turn, earlier)

    def knows(self, turn: SessionTurn) -> bool:
        """Return whether `begin` has recorded the turn."""
        latest = self._ends.get(turn.end)
        return latest is not None and latest.sent == turn

    def end(self, session: int) -> SessionTurn | None:
        """Record that a client has ended a session.

        Returns:
            The turn that this makes the session's last one; None: there is none, or it was already.
        """
        latest = self._ends.get(self._sessions.get(session, NO_BLOCK))
        if latest is None or latest.turn.is_last:
            return None
        last, latest.turn = latest.turn, latest.turn._replace(is_last=True)
        return last

    def _turn(self, end: Fingerprint) -> SessionTurn | None:
        latest = self._ends.get(end)
        return latest.turn if latest else None

    def _session_after(self, earlier: SessionTurn | None, end: Fingerprint) -> int:
        """Return the number of a session without an id: that of the earlier turn, or a new one.

        A repeated prompt gets a new number, because it may come from another user. A turn that
        continues a session with an id gets a new number, because only the client may use its id.
        """
        if earlier is None or earlier.is_named or earlier.end == end:
            return self._rng.getrandbits(SESSION_BITS) or 1
        return earlier.session

    def _before(
        self, chain: Sequence[Fingerprint], known_blocks: int, session: int, shared_blocks: int
    ) -> Fingerprint:
        """Return the last block of the turn that a prompt continues; NO_BLOCK if there is none."""
        end = self._sessions.get(session, NO_BLOCK) if session else NO_BLOCK
        if end in self._ends and end in chain:  # agents use one id for several conversations
            return end
        end_index = min(known_blocks, len(chain))
        first = max(shared_blocks, end_index - MAX_ANSWER_BLOCKS)
        for index in range(end_index - 1, first - 1, -1):
            if chain[index] in self._ends:
                return chain[index]
        return NO_BLOCK


def _number_after(earlier: SessionTurn | None, end: Fingerprint) -> int:
    if earlier is None:
        return 1
    return min(MAX_TURNS, earlier.number + (earlier.end != end))


def _bound(table: OrderedDict[Any, Any], size: int) -> None:
    while len(table) > size:
        table.popitem(last=False)
