"""A router remembers the latest prompt of each conversation, in bounded memory."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvroute.blocks.chain import Scope
from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.generation import TokenIds
from kvroute.contract.keep import NO_BLOCK, SessionTurn
from kvroute.router.sessions.recent_prompts import PROMPT_TOKENS, RecentPrompts

SCOPE = Scope(namespace="n")


def turn(end: int, before: int = NO_BLOCK, *, is_last: bool = False) -> SessionTurn:
    return SessionTurn(Fingerprint(end), 1, 1, Fingerprint(before), is_last=is_last)


def ids(tokens: int) -> TokenIds:
    return np.zeros(tokens, np.uint32)


def test_the_next_turn_takes_the_place_of_the_one_before() -> None:
    prompts, second = RecentPrompts(), ids(20)
    prompts.see(turn(1), ids(10), SCOPE)
    prompts.see(turn(2, before=1), second, SCOPE)
    found = prompts.get(Fingerprint(2))
    assert prompts.ends() == [2]
    assert found is not None
    assert (found.token_ids is second, found.scope) == (True, SCOPE)


def test_of_an_ended_conversation_nothing_is_kept() -> None:
    prompts = RecentPrompts()
    prompts.see(turn(1), ids(10), SCOPE)
    prompts.see(turn(2, before=1, is_last=True), ids(20), SCOPE)
    assert (len(prompts), prompts.room_tokens) == (0, 0)


def test_a_prompt_without_a_block_is_not_kept() -> None:
    prompts = RecentPrompts()
    prompts.see(turn(NO_BLOCK), ids(3), SCOPE)
    assert len(prompts) == 0


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 400))))
def test_memory_is_bounded_and_counted(turns: list[tuple[int, int, int]]) -> None:
    prompts = RecentPrompts(capacity_tokens=2000)
    for end, before, tokens in turns:
        prompts.see(turn(end, before), ids(tokens), SCOPE)
    kept = [prompts.get(end) for end in prompts.ends()]
    assert prompts.room_tokens == sum(PROMPT_TOKENS + len(each.token_ids) for each in kept if each)
    assert prompts.room_tokens <= 2000
