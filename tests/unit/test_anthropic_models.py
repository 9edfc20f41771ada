"""Anthropic's clients read the list of models in their own form, page by page."""

from typing import Any

import pytest
from anthropic.types import ModelInfo

from kvroute.router.api.errors import ApiError
from kvroute.router.endpoints.anthropic_models import info, page

CARDS = [{"id": name, "created": 0, "max_model_len": 8192} for name in "abcde"]


@pytest.mark.parametrize(
    ("query", "ids", "has_more"),
    [
        ({}, "abcde", False),
        ({"limit": "2"}, "ab", True),
        ({"limit": "2", "after_id": "b"}, "cd", True),
        ({"limit": "2", "after_id": "d"}, "e", False),
        ({"after_id": "e"}, "", False),
        ({"limit": "2", "before_id": "e"}, "cd", True),
        ({"limit": "2", "before_id": "c"}, "ab", False),
        ({"limit": "5", "after_id": "a", "before_id": "d"}, "bc", False),
    ],
)
def test_a_page_has_the_models_after_or_before_an_id(
    query: dict[str, str], ids: str, has_more: bool
) -> None:
    listed = page(CARDS, query)
    assert [model["id"] for model in listed["data"]] == [*ids]
    assert listed["has_more"] is has_more
    assert (listed["first_id"], listed["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))


@pytest.mark.parametrize(
    ("name", "value"), [("limit", "0"), ("limit", "x"), ("limit", "1001"), ("after_id", "z")]
)
def test_a_wrong_query_is_refused_with_its_value(name: str, value: str) -> None:
    with pytest.raises(ApiError, match=f'{name} is "{value}"'):
        page(CARDS, {name: value})


def test_a_model_has_all_fields_of_anthropics_form() -> None:
    model: dict[str, Any] = info(CARDS[0])
    read = ModelInfo.model_validate(model)
    assert model.keys() >= ModelInfo.model_fields.keys() - {"type"}
    assert (read.id, read.display_name, read.max_input_tokens) == ("a", "a", 8192)
    assert read.created_at.year == 1970
