"""The names of the policies, for --help: an import of the policies takes half a second."""

from kvroute.features import FEATURES

POLICY_NAMES = (
    "kvroute",
    *(f"kvroute-{policy}" for feature in FEATURES for policy in feature.policies),
    "round-robin",
    "power-of-two",
    "least-loaded",
    "random",
    "consistent-hash",
    "sticky-least-loaded",
    "sglang",
    "dynamo",
    "dynamo-wspt",
    "llm-d",
    "llm-d-requests",
    "llm-d-blend",
    "llm-d-blend-spec",
    "lmetric",
    "min-ttft",
)
