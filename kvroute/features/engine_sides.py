"""Builds the features in the process of one engine."""

from collections.abc import Mapping

from kvroute.features import FEATURES
from kvroute.features.engine_feature import EngineFeatures


def engine_features(environment: Mapping[str, str]) -> EngineFeatures:
    """Return the sides of all features in one engine.

    Args:
        environment: the process's variables, with those of FeatureSettings.environment.
    """
    sides = (feature.engine(environment) for feature in FEATURES)
    return EngineFeatures(side for side in sides if side is not None)
