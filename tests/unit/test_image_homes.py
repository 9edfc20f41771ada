"""Bodies with the same first image are rendered by the same replica."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.router.prompts import image_homes
from kvroute.router.prompts.image_homes import FIELDS, ImageHomes, first_image

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
def test_the_first_image_counts_whatever_follows(part: dict[str, Any], field: str) -> None:
    image = first_image(chat(part, field=field))
    assert image is not None
    assert first_image(chat(part, in_chat("data:dog"), field=field)) == image
    assert first_image(chat(in_chat("data:dog"), part, field=field)) != image


def test_a_uuid_names_an_image_with_or_without_its_data() -> None:
    named = first_image(chat(in_chat("data:cat", uuid="7")))
    assert named == first_image(chat({"type": "image_url", "image_url": None, "uuid": "7"}))
    assert named != first_image(chat(in_chat("data:cat", uuid="8")))


NAMES = st.sampled_from(["content", "uuid", "type", *FIELDS])
JSON = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(NAMES, inner),
)


@given(st.dictionaries(st.sampled_from(["messages", "input", "prompt"]), JSON))
def test_any_body_can_be_asked(body: dict[str, Any]) -> None:
    assert isinstance(first_image(body), int | None)


def test_a_body_of_text_has_none() -> None:
    assert first_image(chat()) is None
    assert first_image({"prompt": "x"}) is None
    assert first_image({"input": "x"}) is None


def test_large_images_differ_if_their_length_or_any_sample_does() -> None:
    whole = "data:image/png;base64," + "x" * 5_000_000
    others = [whole[:-1], whole[:-1] + "y", "e" + whole[1:], whole[:2_500_100] + whole[2_500_099:]]
    others.append(f"{whole[:2_500_100]}y{whole[2_500_101:]}")
    assert len({first_image(chat(in_chat(url))) for url in (whole, *others)}) == 1 + len(others)


def test_an_image_goes_where_a_chat_with_it_was_answered() -> None:
    homes = ImageHomes()
    chosen = homes.home(7, REPLICAS)
    other = next(each for each in REPLICAS if each != chosen)
    homes.answered(7, other)
    assert homes.home(7, REPLICAS) == other
    assert homes.home(7, [each for each in REPLICAS if each != other]) == chosen


def test_routers_choose_alike_and_spread_images() -> None:
    homes = Counter(ImageHomes().home(image, REPLICAS) for image in range(1000))
    assert homes == Counter(ImageHomes().home(image, REPLICAS[::-1]) for image in range(1000))
    assert set(homes) == set(REPLICAS)
    assert min(homes.values()) > 200


def test_the_images_used_last_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_homes, "REMEMBERED", 2)
    homes = ImageHomes()
    for image in (1, 2, 1, 3):
        homes.answered(image, "not chosen")
    running = [*REPLICAS, "not chosen"]
    known = [image for image in (1, 2, 3) if homes.home(image, running) == "not chosen"]
    by_hash = [image for image in (1, 2, 3) if ImageHomes().home(image, running) == "not chosen"]
    assert by_hash == []
    assert known == [1, 3]
