"""Blocks with images have other fingerprints exactly where vLLM gives them other hashes."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.blocks.fingerprint import MediaSpan, media_in

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

PROMPT = 120  # tokens
lengths = st.integers(1, 50)
places = st.lists(st.tuples(st.integers(0, PROMPT - 1), lengths), max_size=8).map(sorted)


def request_with(media: list[MediaSpan]) -> Any:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    specs = [
        MultiModalFeatureSpec(
            None, "image", span.identifier, PlaceholderRange(span.offset, span.length)
        )
        for span in media
    ]
    return Request("r", [7] * PROMPT, SamplingParams(max_tokens=1), None, mm_features=specs)


@given(places, st.integers(1, 40))
@settings(deadline=None)
def test_a_block_counts_the_media_that_vllm_counts(
    placed: list[tuple[int, int]], block_size: int
) -> None:
    """Also where they overlap, as the sounds and pictures of a video do."""
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    media = [MediaSpan(f"f{number}", *place) for number, place in enumerate(placed)]
    request, at = request_with(media), 0
    for begin in range(0, PROMPT - block_size + 1, block_size):
        end = begin + block_size
        keys, at = generate_block_hash_extra_keys(request, begin, end, at)
        ours = [
            ("mm", each.identifier, each.offset - begin) for each in media_in(media, begin, end)
        ]
        assert ours == list(keys or ())


def test_a_rendered_prompt_tells_its_images_in_their_order() -> None:
    from vllm.multimodal.inputs import PlaceholderRange

    from kvroute.replica.vllm_engine.http.request_run import rendered_of

    places = {
        "video": [PlaceholderRange(5, 3)],
        "image": [PlaceholderRange(0, 4), PlaceholderRange(8, 1)],
    }
    hashes = {"video": ["v"], "image": ["i", "j"]}
    rendered = rendered_of(
        {
            "type": "multimodal",
            "prompt_token_ids": [7] * 12,
            "mm_placeholders": places,
            "mm_hashes": hashes,
        }
    )
    assert rendered.media == (
        MediaSpan("i", 0, 4),
        MediaSpan("v", 5, 3),
        MediaSpan("j", 8, 1),
    )
    assert len(rendered.token_ids) == 4 * 12
    assert not rendered.is_text


def test_embeddings_are_like_no_other_prompt() -> None:
    from kvroute.replica.vllm_engine.http.request_run import rendered_of

    prompt = {"type": "embeds", "prompt_embeds": [[0.5, 0.5]] * 70}
    one, other = rendered_of(prompt), rendered_of(prompt)
    assert len(one.token_ids) == 4 * 70
    assert [(span.offset, span.end) for span in one.media] == [(0, 70)]
    assert one.media[0].identifier != other.media[0].identifier
