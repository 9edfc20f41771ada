"""Chooses the replica that renders a body with images: one that has processed the first image.

A replica processes the pixels of an image once, for rendering and for generation, and caches the
result. The router never loads images. It identifies an image by a hash of the URL, data or uuid in
the body. Videos and sounds are treated in the same way.
"""

from collections.abc import Collection, Mapping
from typing import Any

from xxhash import xxh3_64_intdigest

from kvroute.router.api.calls import MEDIA, message_parts

MAX_IMAGES = 16_384  # images that are remembered; beyond this, the least recently used is forgotten
FIELDS = (*MEDIA, "source")  # fields of a part that have an image; `source` is Anthropic's
# Number of characters that are hashed from the start, from the middle and from the end of a text
# that is more than three times as long.
SAMPLE = 1024


class ImageAffinity:
    """The replicas that last processed the images of this router's chats."""

    def __init__(self) -> None:
        self._replicas: dict[int, str] = {}  # image -> replica id, the most recently used last

    def replica_for(self, image: int, running: Collection[str]) -> str:
        """Return the replica that last answered a chat with this first image, if it runs.

        Otherwise, return a replica by rendezvous hashing, so that all routers choose the same one.

        Args:
            image: the hash that first_image() returned.
            running: the ids of the replicas that run; at least one.
        """
        last = self._replicas.get(image, "")
        if last in running:
            return last
        return max(running, key=lambda replica_id: xxh3_64_intdigest(replica_id.encode(), image))

    def record(self, image: int, replica_id: str) -> None:
        """Record that the replica has answered a chat with this first image."""
        self._replicas.pop(image, None)
        self._replicas[image] = replica_id
        if len(self._replicas) > MAX_IMAGES:
            del self._replicas[next(iter(self._replicas))]


def first_image(body: Mapping[str, Any]) -> int | None:
    """Return a hash of the first image in a body's messages, or None if there is no image."""
    name = next(filter(None, map(_name, message_parts(body))), None)
    return None if name is None else _hash(name)


def _name(part: Mapping[str, Any]) -> str:
    """Return the uuid, URL or data of the part's image, or "" if it has no image."""
    for field in FIELDS:
        if field in part:
            value = part[field]
            values = value.values() if isinstance(value, dict) else (value,)
            uuid = part.get("uuid")
            names = [uuid] if isinstance(uuid, str) else values
            return max((name for name in names if isinstance(name, str)), key=len, default="")
    return ""


def _hash(name: str) -> int:
    """Return a hash of the text. Long texts are sampled, so that this takes microseconds."""
    if len(name) > 3 * SAMPLE:
        middle = len(name) // 2
        sampled = name[:SAMPLE], name[middle : middle + SAMPLE], name[-SAMPLE:]
        name = f"{len(name)}{''.join(sampled)}"
    return xxh3_64_intdigest(name.encode(errors="replace"))
