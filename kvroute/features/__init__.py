"""The features of kvroute. Without its folder and its line in FEATURES, a feature is gone."""

from kvroute.features import seats
from kvroute.features.feature import Feature, RefusalText

FEATURES: tuple[Feature, ...] = (  # nothing else registers a feature
    seats.Seating(),
)
# Reason of a feature's refusal -> what operators read about it.
REFUSALS: dict[str, RefusalText] = {
    reason: text for feature in FEATURES for reason, text in feature.refusals.items()
}
