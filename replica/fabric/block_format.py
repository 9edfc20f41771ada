"""The format of an engine's blocks: a digest of everything that their bytes depend on.

Replicas with equal formats can use each other's blocks. A block's key covers its tokens and its
cache salt, and the format covers the rest.
"""

import hashlib
import json
from collections.abc import Mapping


def format_of(facts: Mapping[str, object]) -> str:
    """Return the format of an engine with these facts, which JSON can represent."""
    packed = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(packed.encode()).hexdigest()
