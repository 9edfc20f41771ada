"""What the core learns from the entry of stored responses."""

import pytest

from kvroute.features.responses import StoredResponses
from kvroute.features.responses.items.compaction import COMPACT
from kvroute.features.responses.items.context_management import COMPACTED
from kvroute.router.api.calls import CHAT_COMPLETIONS, RESPONSES, parse_call
from kvroute.router.api.errors import ApiError
from kvroute.router.middleware.caller_check import roles_for
from tests.support.router_parts import FEATURES_ON, builtin_prompts, fake_base, fake_parts
from tests.support.routes import routes

BODY = b'{"model": "m", "input": "Hi", "messages": [], "background": true}'


def test_a_key_with_the_role_use_can_use_all_routes() -> None:
    each = list(routes(StoredResponses().routes()))
    assert len(each) == 13
    assert {roles_for(method, path) for method, path in each} == {("use",)}


def test_only_responses_can_run_in_the_background() -> None:
    assert parse_call(RESPONSES, BODY).body["background"] is True
    with pytest.raises(ApiError, match="background is true, which is not supported"):
        parse_call(CHAT_COMPLETIONS, BODY)


def test_only_calls_of_responses_are_extended_and_run_if_responses_are_stored() -> None:
    prompts = builtin_prompts()
    assert list(fake_parts(prompts).extending) == [RESPONSES, COMPACT, COMPACTED]
    prompts.close()
    assert StoredResponses().service(fake_base()) is None
    service = StoredResponses().service(fake_base(features=FEATURES_ON))
    assert service is not None
    assert service.name == StoredResponses.name
