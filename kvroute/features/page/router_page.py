"""The live page of one model in one router: what the core calls."""

from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from kvroute.features.page.decisions import Decisions
from kvroute.features.page.live import Live
from kvroute.features.page.recorder import Recorder
from kvroute.features.page.traffic import Traffic
from kvroute.features.page.view import View
from kvroute.features.router_feature import RouterFeature
from kvroute.router.observability.observers import RequestObservers

if TYPE_CHECKING:
    from kvroute.router.serving.assembly import Parts


class RouterPage(RouterFeature):
    """Watches the requests of one model, and sends what it knows to open pages."""

    name = "page"
    live: Live  # from `attach` on
    recorder: Recorder  # from `attach` on

    def __init__(self) -> None:
        self._decisions, self._traffic = Decisions(), Traffic()
        self.observer = RequestObservers(self._decisions, self._traffic)

    def attach(self, parts: "Parts") -> None:
        self.recorder = Recorder(self._traffic, parts.fleet, parts.queue)
        self.live = Live(View(parts, self._decisions).snapshot, parts.base.surroundings.draining)

    def tasks(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        return {"recorder": self.recorder.run()}
