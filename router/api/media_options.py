"""Limits on what a client may tell the processors of images, sound and video.

vLLM passes these options on to the model's processor, which obeys: an image of 10 MB could become
one of 10 GB, and the replica would die of it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvroute.router.api.errors import invalid, shown

FIELDS = ("mm_processor_kwargs", "media_io_kwargs")
MOST_PIXELS = 1 << 24  # of one image; Qwen's processors take 12.8 million at most by default
PIXELS = ("min_pixels", "max_pixels", "total_pixels")  # options that count pixels
MOST_EDGE = 4096  # pixels of an edge, frames of a video
EDGES = (
    *("height", "width", "shortest_edge", "longest_edge", "max_length", "sampling_rate"),
    *("num_frames", "max_frames", "min_frames", "max_image_size"),
)
MOST = 256.0  # any other number: crops, frames a second, factors
DEEPEST = 4  # objects and lists within each other

Found = tuple[str, float, float]  # name of an option, its value, the limit


def check_media_options(body: Mapping[str, Any]) -> None:
    """Raise an ApiError if a number in these fields is larger than any processor needs."""
    for field in FIELDS:
        if isinstance(body.get(field), dict):
            for name, value, most in _numbers(field, body[field], DEEPEST):
                if not abs(value) <= most:
                    message = f"{field}: {name} is {shown(value)}; the limit is {most:,.0f}"
                    raise invalid(field, message)


def _numbers(name: str, value: object, depth: int) -> Iterator[Found]:
    """Yield each number in the value, with the option that it belongs to."""
    if depth < 0:
        yield f"the nesting of {name}", math.inf, DEEPEST
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(key, item, depth - 1)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from _numbers(name, item, depth - 1)
    elif isinstance(value, int | float):
        yield name, value, _most(name)


def _most(name: str) -> float:
    if name in PIXELS:
        return MOST_PIXELS
    return MOST_EDGE if name in EDGES else MOST
