"""Builds the prompts of a request to /generative_scoring: a query with each of several items."""

from collections.abc import Sequence

import numpy as np

from kvroute.contract.generation import TokenIds
from kvroute.router.api.scoring import Scoring
from kvroute.router.prompts.tokenizer import Prompts


async def scored_prompts(
    scoring: Scoring, tokenizer: Prompts, *, max_model_len: int
) -> list[TokenIds]:
    """Return one prompt per item: the query followed by the item, or the item by the query.

    As in vLLM, the end of a prompt that is too long is cut off.
    """
    texts = [scoring.query] if isinstance(scoring.query, str) else []
    longest = max_model_len - 1  # leaves space for the one token that the engine generates
    (query,) = await tokenizer.encode(texts, special=scoring.add_special_tokens) or [
        _ids(scoring.query)
    ]
    items = await _items(scoring.items, tokenizer)
    pairs = ((item, query) if scoring.item_first else (query, item) for item in items)
    return [
        np.concatenate([first[:longest], second[:longest]])[:longest] for first, second in pairs
    ]


async def _items(items: Sequence[str] | Sequence[list[int]], tokenizer: Prompts) -> list[TokenIds]:
    texts = [item for item in items if isinstance(item, str)]
    return await tokenizer.encode(texts) if texts else [_ids(item) for item in items]


def _ids(token_ids: str | Sequence[int]) -> TokenIds:
    return np.array(token_ids, np.uint32)
