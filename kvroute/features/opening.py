"""An opening: the beginning of the prompts of one call, which a feature adds.

The body of the call lacks it. So the feature renders the prompts instead of the router's renderer.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvroute.contract.generation import TokenIds
    from kvroute.router.dispatch.generation import Generation


class Opening:
    """The beginning of the prompts of one call."""

    name = ""  # prompts with this name have this beginning
    kept_tokens = 0  # leading tokens of these prompts that replicas have to keep in their caches

    async def chat(
        self, body: Mapping[str, Any], content_format: str | None, *, max_model_len: int
    ) -> "TokenIds":
        """Return the tokens of a chat with this beginning, up to the assistant's next message.

        Args:
            content_format: see ChatTemplate.text.

        Raises:
            OnlyReplicaError: only a replica can render the body.
            ApiError: the chat cannot have this beginning, or is too long.
        """
        raise NotImplementedError

    async def completions(
        self, prompts: "Sequence[str] | Sequence[TokenIds]", *, max_model_len: int
    ) -> "list[TokenIds]":
        """Return the tokens of each prompt with this beginning.

        Args:
            prompts: either all texts, or all token ids.

        Raises:
            ApiError: a prompt is too long.
        """
        raise NotImplementedError

    def before(self, prompts: "Sequence[TokenIds]", *, has_media: bool) -> "list[TokenIds]":
        """Return prompts that a replica has rendered, each with this beginning.

        Args:
            has_media: whether the prompts contain more than text.

        Raises:
            ApiError: the prompts cannot have this beginning.
        """
        raise NotImplementedError

    def first_token(self, generation: "Generation") -> None:
        """Record that one of the prompts has its first token."""
