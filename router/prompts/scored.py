"""Turns a request for scores into prompts, with the model's tokenizer."""

from collections.abc import Sequence

import numpy as np

from kvroute.contract.generation import TokenIds
from kvroute.router.api.scoring import Scoring
from kvroute.router.prompts.tokenizer import Prompts


async def scored_prompts(
    scoring: Scoring, tokenizer: Prompts, *, max_model_len: int
) -> list[TokenIds]:
    """Return one prompt for each item: the query with the item.

    A prompt that is too long is cut at its end, as in vLLM.
    """
    texts = [scoring.query] if isinstance(scoring.query, str) else []
    most = max_model_len - 1  # one token is generated
    (query,) = await tokenizer.encode(texts, special=scoring.add_special_tokens) or [
        _ids(scoring.query)
    ]
    items = await _items(scoring.items, tokenizer)
    pairs = ((item, query) if scoring.item_first else (query, item) for item in items)
    return [np.concatenate([first[:most], second[:most]])[:most] for first, second in pairs]


async def _items(items: Sequence[str] | Sequence[list[int]], tokenizer: Prompts) -> list[TokenIds]:
    texts = [item for item in items if isinstance(item, str)]
    return await tokenizer.encode(texts) if texts else [_ids(item) for item in items]


def _ids(given: str | Sequence[int]) -> TokenIds:
    return np.array(given, np.uint32)
