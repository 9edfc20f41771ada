"""Limits on a client's options for the model's processor of images, sound and video.

vLLM passes these options to the processor without a check. With a large value, the processor could
enlarge an image of 10 MB to 10 GB, and the replica would run out of memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvroute.router.api.errors import invalid, shown

FIELDS = ("mm_processor_kwargs", "media_io_kwargs")  # fields of a body with such options
# Largest value of the options that count pixels. The default of Qwen's processors is 12.8 million.
MAX_PIXELS = 1 << 24
PIXELS = ("min_pixels", "max_pixels", "total_pixels")  # options that count pixels
MAX_EDGE = 4096  # largest length of an edge in pixels, and largest number of frames of a video
# Options that are limited by MAX_EDGE.
EDGES = (
    *("height", "width", "shortest_edge", "longest_edge", "max_length", "sampling_rate"),
    *("num_frames", "max_frames", "min_frames", "max_image_size"),
)
MAX_OTHER = 256.0  # largest value of any other option, such as crops, frames per second and factors
MAX_DEPTH = 4  # deepest nesting of objects and lists in an option

Option = tuple[str, float, float]  # name of an option, its value, the limit


def check_media_options(body: Mapping[str, Any]) -> None:
    """Raise an ApiError if a number in FIELDS is larger than any processor needs."""
    for field in FIELDS:
        if isinstance(body.get(field), dict):
            for name, value, limit in _numbers(field, body[field], MAX_DEPTH):
                if not abs(value) <= limit:  # NaN is refused too
                    message = f"{field}: {name} is {shown(value)}; the limit is {limit:,.0f}"
                    raise invalid(field, message)


def _numbers(name: str, value: object, depth: int) -> Iterator[Option]:
    """Yield each number in the value, with the name and the limit of its option.

    If the value is nested too deep, yield its depth as a number that exceeds the limit.

    Args:
        name: name of the option.
        depth: number of further levels that may be nested.
    """
    if depth < 0:
        yield f"the nesting of {name}", MAX_DEPTH + 1, MAX_DEPTH
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(key, item, depth - 1)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from _numbers(name, item, depth - 1)
    elif isinstance(value, int | float):
        yield name, value, _limit(name)


def _limit(name: str) -> float:
    if name in PIXELS:
        return MAX_PIXELS
    return MAX_EDGE if name in EDGES else MAX_OTHER
