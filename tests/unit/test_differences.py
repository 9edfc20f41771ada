"""Where hot prefixes differ from each other, and their text without the template's tokens."""

import numpy as np
import pytest

from kvroute.router.prefixes.differences import differences
from kvroute.router.prompts.tokenizer import Prompts


def found(*prompts: list[int]) -> list[int]:
    return differences([np.array(prompt, dtype=np.uint32) for prompt in prompts])


def test_a_prompt_differs_where_no_other_goes_on_as_it_does() -> None:
    assert found([1, 2, 3, 4], [1, 2, 9, 9], [1, 7, 7, 7]) == [2, 2, 1]


def test_a_prompt_that_another_continues_is_compared_with_the_rest() -> None:
    assert found([1, 2], [1, 2, 3, 4]) == [0, 2]
    assert found([1, 2], [1, 2, 3, 4], [1, 5]) == [1, 2, 1]


@pytest.mark.parametrize("prompts_", [[], [[1, 2, 3]]])
def test_without_another_prompt_there_is_no_difference(prompts_: list[list[int]]) -> None:
    assert found(*prompts_) == [0] * len(prompts_)


def chat(prompts: Prompts, *texts: str) -> np.ndarray:
    start = prompts._backend.encode("<|im_start|>", add_special_tokens=False).ids
    assert len(start) == 1, "the built-in model's template has special tokens"
    text = "".join(f"<|im_start|>{text}<|im_end|>\n" for text in texts)
    return np.array(prompts._backend.encode(text, add_special_tokens=False).ids, dtype=np.uint32)


def test_plain_text_has_neither_special_tokens_nor_roles(prompts: Prompts) -> None:
    token_ids = chat(prompts, "system\nBe brief.", "user\nThe system is down")
    assert prompts.plain_text(token_ids) == "Be brief. · The system is down"


def test_a_part_may_begin_behind_a_special_token(prompts: Prompts) -> None:
    token_ids = chat(prompts, "user\nGood day")
    assert prompts.plain_text(token_ids[1:], int(token_ids[0])) == "Good day"
    assert prompts.plain_text(token_ids[1:], int(token_ids[-1])) == "user\nGood day"
