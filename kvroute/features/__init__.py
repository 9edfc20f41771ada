"""The features of kvroute. Without its folder and its line in FEATURES, a feature is gone."""

from collections.abc import Sequence

from kvroute.contract.error_codes import CODES, Code, FeatureCode
from kvroute.features import (
    adapters,
    audio,
    audit,
    batches,
    changes,
    gaps,
    keys,
    page,
    prefixes,
    pulls,
    responses,
    retention,
    seats,
)
from kvroute.features.feature import Feature, Paths, RefusalText, TermText

FEATURES: tuple[Feature, ...] = (  # nothing else registers a feature
    keys.ApiKeys(),
    seats.Seating(),
    prefixes.NamedPrefixes(),
    adapters.AddedLater(),
    batches.Batching(),
    audio.Audio(),
    responses.StoredResponses(),
    retention.Retention(),
    changes.ChatChanges(),
    pulls.Pulling(),
    gaps.GapLimits(),
    audit.Auditing(),
    page.LivePage(),
)
HEADERS = tuple(header for feature in FEATURES for header in feature.headers)
FIELDS = tuple(field for feature in FEATURES for field in feature.fields)
GROUPS = tuple(group for feature in FEATURES for group in feature.groups)
UNREADABLE: dict[str, str] = {
    kind: remedy for feature in FEATURES for kind, remedy in feature.unreadable.items()
}
# Reason of a feature's refusal -> what operators read about it.
REFUSALS: dict[str, RefusalText] = {
    reason: text for feature in FEATURES for reason, text in feature.refusals.items()
}
# Term of the cost of replicas -> what operators read about it.
TERMS: dict[str, TermText] = {
    term: text for feature in FEATURES for term, text in feature.terms.items()
}
ALL_CODES: tuple[Code | FeatureCode, ...] = (  # all codes of errors, of the core and the features
    *CODES,
    *(code for feature in FEATURES for code in feature.codes),
)
# Path of a route -> fields of its bodies with which a request must not run twice.
ONCE: dict[str, Sequence[str]] = {
    path: fields for feature in FEATURES for path, fields in feature.once.items()
}
DOCTOR_REQUESTS = tuple(request for feature in FEATURES for request in feature.doctor_requests)
PATHS = Paths.joined(feature.paths for feature in FEATURES)  # all routes of features
