"""Host memory keeps recently used blocks, and the blocks that retention hints protect."""

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.keep import Order, RetentionHint
from kvroute.replica.modelled.host_cache import HostCache

CAPACITY = 6

prompts = st.lists(st.integers(1, 12), min_size=1, max_size=8).map(
    lambda numbers: [Fingerprint(number) for number in numbers]
)


def chain(*numbers: int) -> list[Fingerprint]:
    return [Fingerprint(number) for number in numbers]


def host(capacity: int = CAPACITY) -> HostCache:
    return HostCache(capacity)


def test_hits_end_at_the_first_gap() -> None:
    cache = host()
    cache.store(chain(1, 2, 4))
    assert cache.hits(chain(1, 2, 3, 4)) == 2
    assert cache.hits(chain(1, 2, 3, 4), start=3) == 1
    assert cache.hits(chain(1, 2, 3, 4), start=2) == 0


def test_the_least_recently_used_prompt_is_evicted_from_its_end() -> None:
    cache = host()
    cache.store(chain(1, 2, 3))
    cache.store(chain(4, 5, 6))
    cache.use(chain(1, 2, 3))
    assert cache.store(chain(7, 8)) == (chain(7, 8), chain(6, 5))


def test_a_block_that_is_stored_already_is_not_stored_again() -> None:
    cache = host()
    assert cache.store(chain(1, 2)) == (chain(1, 2), [])
    assert cache.store(chain(1, 2, 3)) == (chain(3), [])
    assert len(cache) == 3


def test_a_prompt_evicts_none_of_its_own_blocks() -> None:
    cache = host(3)
    cache.store(chain(1, 2, 9))
    assert cache.store(chain(1, 2, 3, 4)) == (chain(3), chain(9))


def test_blocks_that_are_seldom_reused_are_evicted_first() -> None:
    cache = host(4)
    cache.store(chain(1, 2))
    cache.use(chain(1, 2))
    cache.store(chain(3, 4))
    cache.use(chain(3, 4), RetentionHint(Order.UNLIKELY))
    cache.store(chain(5, 6))
    assert [*cache] == chain(1, 2, 5, 6)


def test_an_ended_sessions_blocks_are_evicted_first() -> None:
    cache = host(4)
    for first, session in ((1, 7), (3, 8)):
        cache.store(chain(first, first + 1))
        cache.use(chain(first, first + 1), RetentionHint(session=session))
    cache.end(8)
    assert cache.store(chain(5))[1] == chain(4)


def test_a_cleared_cache_has_no_blocks() -> None:
    cache = host()
    cache.store(chain(1, 2))
    cache.clear()
    assert len(cache) == 0
    assert cache.store(chain(1, 2)) == (chain(1, 2), [])


def test_pinned_blocks_stay_even_if_they_are_stored_after_the_pin() -> None:
    cache = host(4)
    cache.store(chain(1, 2))
    cache.pin("law", chain(1, 2, 3))
    cache.store(chain(1, 2, 3))
    assert cache.store(chain(4, 5)) == (chain(4), [])  # there is room for one more block
    assert cache.store(chain(6)) == (chain(6), chain(4))
    assert [*cache] == chain(1, 2, 3, 6)


def test_blocks_of_an_ended_pin_count_as_just_used() -> None:
    cache = host(4)
    cache.store(chain(1, 2))
    cache.pin("law", chain(1, 2))
    cache.store(chain(3, 4))
    cache.pin("law", ())
    assert cache.store(chain(5, 6, 7))[1] == chain(4, 3, 2)


def test_a_block_of_two_pins_stays_until_both_have_ended() -> None:
    cache = host(2)
    cache.store(chain(1))
    cache.pin("law", chain(1))
    cache.pin("tax", chain(1, 2))
    cache.pin("law", chain(9))
    assert cache.store(chain(3, 4)) == (chain(3), [])
    cache.pin("tax", ())
    assert cache.store(chain(3, 4)) == (chain(4), chain(1))


@given(prompts)
def test_no_room_at_all_stores_nothing(prompt: list[Fingerprint]) -> None:
    cache = host(0)
    assert cache.store(prompt) == ([], [])
    cache.use(prompt, RetentionHint(session=1))
    assert cache.hits(prompt) == len(cache) == 0


@given(st.lists(st.tuples(st.sampled_from(["store", "use", "pin law", "pin tax"]), prompts)))
def test_no_sequence_of_steps_evicts_pinned_blocks(
    steps: list[tuple[str, list[Fingerprint]]],
) -> None:
    cache, pins = host(), dict[str, set[Fingerprint]]()
    for step, prompt in steps:
        pinned = {hash_ for pin in pins.values() for hash_ in pin if hash_ in cache}
        if step == "store":
            new, dropped = cache.store(prompt)
            assert not pinned & {*dropped}
            assert {*new} <= {*cache}
        elif step == "use":
            cache.use(prompt, RetentionHint(session=1))
        else:
            cache.pin(step, list(dict.fromkeys(prompt)))
            pins[step] = {*prompt}
        held = {hash_ for pin in pins.values() for hash_ in pin if hash_ in cache}
        assert len(cache) - len(held) == len(cache._idle)
        assert len(cache) <= CAPACITY


class LeastRecentlyUsed(RuleBasedStateMachine):
    """Without hints, the order is LRU, and a prompt's last block counts as its oldest."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = host()
        self.model: OrderedDict[Fingerprint, None] = OrderedDict()  # the oldest first

    @rule(prompt=prompts)
    def store(self, prompt: list[Fingerprint]) -> None:
        fits = list(dict.fromkeys(prompt))[:CAPACITY]
        new = [hash_ for hash_ in fits if hash_ not in self.model]
        old = [hash_ for hash_ in self.model if hash_ not in fits]
        dropped = old[: max(0, len(self.model) + len(new) - CAPACITY)]
        assert self.cache.store(prompt) == (new, dropped)
        for hash_ in dropped:
            del self.model[hash_]
        self.renew(fits)

    @rule(prompt=prompts)
    def use(self, prompt: list[Fingerprint]) -> None:
        self.cache.use(prompt)
        self.renew([hash_ for hash_ in dict.fromkeys(prompt) if hash_ in self.model])

    def renew(self, hashes: list[Fingerprint]) -> None:
        for hash_ in reversed(hashes):
            self.model.pop(hash_, None)
            self.model[hash_] = None

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        assert set(self.cache) == set(self.model)
        assert len(self.cache) <= CAPACITY


TestLeastRecentlyUsed = LeastRecentlyUsed.TestCase
