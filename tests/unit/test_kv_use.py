"""The estimate of how much of a KV cache running requests hold counts shared blocks once."""

from hypothesis import given
from hypothesis import strategies as st

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.router.placement.kv_use import KvUse

DOCUMENT, CHAT = Fingerprint(1), Fingerprint(2)
SIZES = st.integers(0, 1000)
REQUESTS = st.tuples(SIZES, SIZES, st.sampled_from([None, DOCUMENT, CHAT]))


def test_requests_with_a_common_prefix_hold_it_once() -> None:
    use = KvUse()
    use.add("a", new_tokens=10, cached_tokens=500, prefix=DOCUMENT)
    use.add("b", new_tokens=20, cached_tokens=500, prefix=DOCUMENT)
    assert use.tokens == 10 + 20 + 500
    assert use.needed(new_tokens=5, cached_tokens=500, prefix=DOCUMENT) == 535
    assert use.needed(new_tokens=5, cached_tokens=500, prefix=CHAT) == 1035
    use.remove("a")
    assert use.tokens == 20 + 500


def test_unknown_prompts_share_nothing() -> None:
    use = KvUse()
    use.add("a", new_tokens=10, cached_tokens=0, prefix=None)
    use.add("b", new_tokens=20, cached_tokens=5, prefix=None)
    assert use.tokens == use.needed(new_tokens=0, cached_tokens=0, prefix=None) == 35


@given(st.lists(st.tuples(st.integers(0, 5), st.none() | REQUESTS), max_size=60))
def test_tokens_match_the_running_requests(
    steps: list[tuple[int, tuple[int, int, Fingerprint | None] | None]],
) -> None:
    """Each step sends or ends a request; six ids are used again and again."""
    use, running = KvUse(), dict[int, tuple[int, int, Fingerprint | None]]()
    for number, sent in steps:
        if sent is None:
            use.remove(str(number))
            running.pop(number, None)
        else:
            new_tokens, cached_tokens, prefix = sent
            use.add(str(number), new_tokens=new_tokens, cached_tokens=cached_tokens, prefix=prefix)
            running[number] = sent
        own = sum(new + (0 if prefix else cached) for new, cached, prefix in running.values())
        longest = {prefix: 0 for _, _, prefix in running.values() if prefix}
        for _, cached, prefix in running.values():
            if prefix:
                longest[prefix] = max(longest[prefix], cached)
        assert own + sum(longest.values()) <= use.tokens
    for number in list(running):
        use.remove(str(number))
    assert use.tokens == 0
