"""The variants of a model: their names, and which of them an engine has in memory.

A variant is the model itself, or the model with weights that are added to it, such as a LoRA
adapter. Cached blocks depend on it (blocks/chain.py), and an engine computes nothing while it loads
one.

A variant that is there from the start (--lora) has the name by which clients request it. One that
is added later has a *key*, which is its name and the digest of its files. Routers and replicas use
the key in place of the name: in fingerprints, in the engine, and in the list of loaded adapters. So
a variant that gets the name of an earlier one shares no cached blocks with it, unless its files are
equal.
"""

import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence

NAME = r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}"  # the names of variants that are added
MAX_NAME = 128  # most characters of an added variant's name
DIGEST = "[0-9a-f]{32}"
SETUP_S = 0.5  # assumed seconds to load a variant, until a load is measured
# A key is NAME@DIGEST, after the tenant and a separator if one tenant owns the variant.
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


class VariantCache:
    """The variants in an engine's memory, at most `capacity`: an LRU cache."""

    def __init__(self, capacity: int, names: Iterable[str] = ()) -> None:
        self._capacity = capacity
        self._names = OrderedDict.fromkeys(names)

    @property
    def names(self) -> Sequence[str]:
        """Return the names, the least recently used one first."""
        return tuple(self._names)

    def use(self, name: str) -> bool:
        """Load the variant or mark it as used; return True if it had to be loaded."""
        is_new = name not in self
        self._names[name] = None
        self._names.move_to_end(name)
        if len(self._names) > self._capacity:
            self._names.popitem(last=False)
        return is_new

    def drop(self, name: str) -> None:
        """Remove the variant from memory, if it is there."""
        self._names.pop(name, None)

    def __contains__(self, name: str) -> bool:
        return name in self._names
