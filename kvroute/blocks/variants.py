"""The names of a model's variants: the model with a LoRA adapter.

A variant that is there from the start (--lora) has the name by which clients request it. One that
is added later has a *key*, which is its name and the digest of its files. Routers and replicas use
the key in place of the name: in fingerprints, in the engine, and in the list of loaded adapters. So
a variant that gets the name of an earlier one shares no cached blocks with it, unless its files are
equal.
"""

import re

NAME = r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}"  # the names of variants that are added
MAX_NAME = 128  # the most characters of such a name
DIGEST = "[0-9a-f]{32}"
# The name of a tenant, if the variant is its own, the separator of tenants, the name, the digest.
_KEY = re.compile(rf"(?:.*␟)?({NAME})@{DIGEST}", re.DOTALL)


def is_key(variant: str) -> bool:
    """Return whether this is the key of an added variant, not the name of one from the start."""
    return _KEY.fullmatch(variant) is not None


def name_of(variant: str) -> str:
    """Return the name by which clients request a variant."""
    match = _KEY.fullmatch(variant)
    return match[1] if match else variant


def digest_in(key: str) -> str:
    """Return the digest that is part of a key."""
    return key.rpartition("@")[2]
