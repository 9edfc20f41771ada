"""Options of image and video processors cannot make a replica run out of memory."""

import re
from typing import Any

import msgspec
import pytest

from kvroute.router.api.calls import parse_call
from kvroute.router.api.errors import ApiError

CHATS = "/v1/chat/completions"
USER = [{"role": "user", "content": "What is this?"}]


def parse(**fields: Any) -> None:
    parse_call(CHATS, msgspec.json.encode({"model": "m", "messages": USER, **fields}))


@pytest.mark.parametrize(
    "options",
    [
        {"min_pixels": 784, "max_pixels": 1_003_520},
        {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
        {"num_crops": 16, "do_resize": False, "padding": "longest", "image_mean": [0.5, 0.5, 0.5]},
        {"fps": 2.0, "num_frames": 768},
        {},
    ],
    ids=str,
)
def test_options_that_models_need_are_allowed(options: dict[str, Any]) -> None:
    parse(mm_processor_kwargs=options, media_io_kwargs={"video": options})


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"max_pixels": 10**12}, "max_pixels is 1000000000000; the limit is 16,777,216"),
        ({"size": {"longest_edge": 100_000}}, "longest_edge is 100000; the limit is 4,096"),
        ({"images_kwargs": {"num_crops": -1e300}}, "num_crops is -1e+300; the limit is 256"),
        ({"image_mean": [[[[[[1.0]]]]]]}, "nesting of image_mean"),
    ],
    ids=str,
)
@pytest.mark.parametrize("field", ["mm_processor_kwargs", "media_io_kwargs"])
def test_options_larger_than_any_model_needs_are_refused(
    field: str, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ApiError, match=re.escape(complaint)) as refused:
        parse(**{field: options})
    assert (refused.value.status, refused.value.param) == (400, field)
