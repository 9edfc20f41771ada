"""What the core learns from the entry of added adapters."""

from kvroute.features.adapters import AddedLater
from kvroute.router.middleware.caller_check import roles_for
from tests.support.routes import routes


def test_operators_need_a_role_to_list_and_another_one_to_change_adapters() -> None:
    found = {
        (method, path): roles_for(method, path) for method, path in routes(AddedLater().routes())
    }
    assert found == {
        ("GET", "/v1/adapters"): ("observe",),
        ("POST", "/v1/load_lora_adapter"): ("manage",),
        ("POST", "/v1/unload_lora_adapter"): ("manage",),
    }
