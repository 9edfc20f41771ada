"""What the core learns from the entry of the live page."""

from kvroute.features.page import LivePage
from kvroute.features.page.router_page import RouterPage
from kvroute.local.launch import first_steps
from kvroute.router.middleware.caller_check import roles_for
from kvroute.settings.serve import load
from tests.support.router_parts import fake_base
from tests.support.routes import routes

URL = "http://127.0.0.1:8123"


def test_all_may_load_the_page_and_only_observers_may_see_what_it_shows() -> None:
    found = {path: roles_for(method, path) for method, path in routes(LivePage().routes())}
    assert found == {
        "/": (),
        "/ui": (),
        "/ui/{name}": (),
        "/v1/cluster/live": ("observe",),
        "/v1/cluster/history": ("observe",),
    }


def test_a_page_that_is_off_watches_nothing_and_is_not_announced() -> None:
    assert isinstance(LivePage().router(fake_base()), RouterPage)
    assert LivePage().router(fake_base(features={"page": {"ui": False}})) is None
    assert f"live page: {URL}/ui" in [*first_steps(URL, "m", load({}))]
    assert "live page" not in "".join(first_steps(URL, "m", load({"ui": False})))
