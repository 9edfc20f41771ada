"""What a feature does in an engine, before and after each of its steps.

The hooks use no clock, so the simulated engine and a replay call them, too. They take microseconds:
the engine waits for them. Each hook has an empty default.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvroute.features.own_methods import overriding

if TYPE_CHECKING:
    from kvroute.contract.generation import GenerateRequest

NO_DATA: Mapping[str, bytes] = {}


class PendingPrompt(NamedTuple):
    """A prompt that an engine has not computed to its end."""

    start: int  # number of its leading tokens that are computed, or probably cached
    end: int  # number of its tokens
    waited_s: float  # seconds since it arrived at the engine


class ComputedPart(NamedTuple):
    """The tokens [start, end) of a prompt, which one step has computed."""

    start: int
    end: int


def data_of(request: "GenerateRequest") -> Mapping[str, bytes]:
    """Return what a request has for features in an engine, by the name of the feature.

    It comes from the client's call (RouterFeature.with_data), and from the choice of the replica
    (PlacingFeature.sending).
    """
    of_call = request.call.features if request.call else {}
    return {**of_call, **(request.features or {})}


class EngineFeature:
    """One feature in one engine's process. It may import the core, and no other feature."""

    name = ""  # the name of its folder, which is the key of its data in requests

    def prompt_tokens(
        self, answers: Sequence[bytes], prompts: Sequence[PendingPrompt]
    ) -> int | None:
        """Return the most prompt tokens that the next step may compute; None: no limit.

        Args:
            answers: for each answer that gets a token in the step, the data that its request has
                for this feature; empty: none.
            prompts: the first prompts that are not computed, in the order of their computation, at
                most PROMPTS. Batch requests that give way to others are not among them.
        """
        return None

    def step_ended(self, took_s: float, parts: Sequence[ComputedPart]) -> None:
        """Record the time of a step, and what it has computed of prompts."""


PROMPTS = 64  # most prompts that a hook gets, so that a long queue does not make steps longer


class EngineFeatures:
    """The features in one engine, in the order of kvroute/features/__init__.py."""

    def __init__(self, features: Iterable[EngineFeature] = ()) -> None:
        features = tuple(features)
        self._limiting = overriding(features, EngineFeature.prompt_tokens)
        self._learning = overriding(features, EngineFeature.step_ended)
        self.has_any = bool(features)

    def prompt_tokens(
        self,
        most: int,
        answers: Callable[[], Iterable[Mapping[str, bytes]]],
        prompts: Callable[[], Iterable[PendingPrompt]],
    ) -> int:
        """Return the most prompt tokens that the next step may compute.

        Args:
            most: the limit without features.
            answers: returns the data of features in the requests whose answers get a token.
            prompts: returns the prompts that are not computed, as a feature gets them.
        """
        if not self._limiting:
            return most
        data, pending = [*answers()], [*prompts()]
        for feature in self._limiting:
            of_feature = [each.get(feature.name, b"") for each in data]
            if (tokens := feature.prompt_tokens(of_feature, pending)) is not None:
                most = min(most, tokens)
        return most

    def step_ended(self, took_s: float, parts: Sequence[ComputedPart]) -> None:
        """Record the time of a step, and what it has computed of prompts."""
        for feature in self._learning:
            feature.step_ended(took_s, parts)


NO_ENGINE_FEATURES = EngineFeatures()
