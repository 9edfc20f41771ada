"""Which replica renders a body with images: one that has processed the first of them before.

A replica processes an image's pixels once, for rendering and for generating, and keeps them. What
is here about an image is a hash of its URL, data or uuid, as the body has it: a router never loads
one. Videos and sounds are treated alike.
"""

from collections.abc import Collection, Mapping
from typing import Any

from xxhash import xxh3_64_intdigest

from kvroute.router.api.calls import MEDIA, message_parts

REMEMBERED = 16_384  # images, those that were used last
FIELDS = (*MEDIA, "source")  # the last one is Anthropic's
SAMPLE = 1024  # characters from beginning, middle and end of what is longer than all of them


class ImageHomes:
    """Where the images of a router's chats were last."""

    def __init__(self) -> None:
        self._homes: dict[int, str] = {}  # the one that was used last is the last

    def home(self, image: int, running: Collection[str]) -> str:
        """Return the replica that last answered a chat with this first image, if it runs.

        Otherwise it is a replica that all routers choose alike.
        """
        known = self._homes.get(image, "")
        if known in running:
            return known
        return max(running, key=lambda replica_id: xxh3_64_intdigest(replica_id.encode(), image))

    def answered(self, image: int, replica_id: str) -> None:
        """Record that the replica has answered a chat with this first image."""
        self._homes.pop(image, None)
        self._homes[image] = replica_id
        if len(self._homes) > REMEMBERED:
            del self._homes[next(iter(self._homes))]


def first_image(body: Mapping[str, Any]) -> int | None:
    """Return a number for the first image in a body's messages; None: there is none.

    Equal images have equal numbers; others hardly ever do.
    """
    name = next(filter(None, map(_name, message_parts(body))), None)
    return None if name is None else _hash(name)


def _name(part: Mapping[str, Any]) -> str:
    """Return what distinguishes the part's image from others; empty: there is no image."""
    for field in FIELDS:
        if field in part:
            value = part[field]
            values = value.values() if isinstance(value, dict) else (value,)
            uuid = part.get("uuid")
            names = [uuid] if isinstance(uuid, str) else values
            return max((name for name in names if isinstance(name, str)), key=len, default="")
    return ""


def _hash(name: str) -> int:
    """Return a hash, in microseconds however large the text is."""
    if len(name) > 3 * SAMPLE:
        middle = len(name) // 2
        sampled = name[:SAMPLE], name[middle : middle + SAMPLE], name[-SAMPLE:]
        name = f"{len(name)}{''.join(sampled)}"
    return xxh3_64_intdigest(name.encode(errors="replace"))
