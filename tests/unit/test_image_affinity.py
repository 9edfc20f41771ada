"""Bodies with the same first image are rendered by the same replica."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.router.prompts import image_affinity
from kvroute.router.prompts.image_affinity import FIELDS, ImageAffinity, first_image

REPLICAS = ["a", "b", "c", "d"]
TEXT = {"type": "text", "text": "What is it?"}


def chat(*parts: Any, field: str = "messages") -> dict[str, Any]:
    first = {"role": "user", "content": "Hello"}
    return {field: [first, {"role": "user", "content": [TEXT, *parts]}, {"content": "more"}]}


def in_chat(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **fields}


@pytest.mark.parametrize(
    "part",
    [
        in_chat("data:cat"),
        {"type": "input_image", "image_url": "data:cat"},
        {"type": "image", "source": {"type": "base64", "data": "cat", "media_type": "a"}},
        {"type": "input_audio", "input_audio": {"data": "a cat's", "format": "wav"}},
        {"image_url": "data:cat"},
    ],
    ids=["chats", "responses", "messages", "a sound", "no type"],
)
@pytest.mark.parametrize("field", ["messages", "input"])
def test_the_first_image_decides_whatever_follows(part: dict[str, Any], field: str) -> None:
    image = first_image(chat(part, field=field))
    assert image is not None
    assert first_image(chat(part, in_chat("data:dog"), field=field)) == image
    assert first_image(chat(in_chat("data:dog"), part, field=field)) != image


def test_a_uuid_identifies_an_image_with_or_without_its_data() -> None:
    named = first_image(chat(in_chat("data:cat", uuid="7")))
    assert named == first_image(chat({"type": "image_url", "image_url": None, "uuid": "7"}))
    assert named != first_image(chat(in_chat("data:cat", uuid="8")))


NAMES = st.sampled_from(["content", "uuid", "type", *FIELDS])
JSON = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner),
)


@given(st.dictionaries(st.sampled_from(["messages", "input", "prompt"]), JSON))
def test_no_body_raises(body: dict[str, Any]) -> None:
    assert isinstance(first_image(body), int | None)


def test_a_body_of_text_has_no_image() -> None:
    assert first_image(chat()) is None
    assert first_image({"prompt": "x"}) is None
    assert first_image({"input": "x"}) is None


def test_large_images_differ_if_their_length_or_a_sample_differs() -> None:
    whole = "data:image/png;base64," + "x" * 5_000_000
    others = [whole[:-1], whole[:-1] + "y", "e" + whole[1:], whole[:2_500_100] + whole[2_500_099:]]
    others.append(f"{whole[:2_500_100]}y{whole[2_500_101:]}")
    assert len({first_image(chat(in_chat(url))) for url in (whole, *others)}) == 1 + len(others)


def test_an_image_goes_to_the_replica_that_answered_a_chat_with_it() -> None:
    affinity = ImageAffinity()
    chosen = affinity.replica_for(7, REPLICAS)
    other = next(id_ for id_ in REPLICAS if id_ != chosen)
    affinity.record(7, other)
    assert affinity.replica_for(7, REPLICAS) == other
    assert affinity.replica_for(7, [id_ for id_ in REPLICAS if id_ != other]) == chosen


def test_all_routers_choose_the_same_replicas_and_spread_the_images() -> None:
    affinity = Counter(ImageAffinity().replica_for(image, REPLICAS) for image in range(1000))
    assert affinity == Counter(
        ImageAffinity().replica_for(image, REPLICAS[::-1]) for image in range(1000)
    )
    assert set(affinity) == set(REPLICAS)
    assert min(affinity.values()) > 200


def test_the_most_recently_used_images_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_affinity, "MAX_IMAGES", 2)
    affinity = ImageAffinity()
    for image in (1, 2, 1, 3):
        affinity.record(image, "not chosen")
    running = [*REPLICAS, "not chosen"]
    known = [image for image in (1, 2, 3) if affinity.replica_for(image, running) == "not chosen"]
    by_hash = [
        image for image in (1, 2, 3) if ImageAffinity().replica_for(image, running) == "not chosen"
    ]
    assert by_hash == []
    assert known == [1, 3]
