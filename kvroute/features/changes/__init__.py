"""Changes in chats: finds where the prompt of a chat differs from that of its earlier turn.

README.md explains the parts. What such a change costs is accounted for by the core
(router/placement/ledger.py).
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvroute.features.feature import Feature, State

if TYPE_CHECKING:
    from kvroute.doctor.checks import Check
    from kvroute.features.changes.router_changes import RouterChanges
    from kvroute.router.serving.router_base import RouterBase


class ChatChanges(Feature):
    """The changes in the history of chats."""

    name = "changes"
    has_state = True

    def router(self, base: "RouterBase") -> "RouterChanges":
        from kvroute.features.changes.router_changes import RouterChanges

        return RouterChanges(base.tokenizer)

    def checks(self, states: Sequence[State]) -> "Iterator[Check]":
        from kvroute.features.changes.change_checks import changes

        return changes(states)
