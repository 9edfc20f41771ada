"""What another replica still has to generate of an answer whose replica was lost."""

import pytest

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


def test_it_has_just_the_tokens_that_are_left() -> None:
    from vllm.sampling_params import SamplingParams

    from kvroute.replica.vllm_engine.continued import rest

    params = SamplingParams(max_tokens=20, min_tokens=5, seed=7)
    left = rest(params, [11, 12, 13])
    assert (left.max_tokens, left.min_tokens) == (17, 2)
    assert left.seed != 7  # no random number is used twice
