"""Which engine arguments vLLM takes, by its own types, and what replicas make of them.

vLLM is imported in the tests alone: that takes seconds.
"""

from pathlib import Path
from typing import Any, get_args

import pytest

from kvroute.local.before_start import check_engine_args
from kvroute.local.progress import StartProgress
from kvroute.machine.problem import StartError
from kvroute.settings.options.replica import Dtype
from kvroute.settings.owned_engine_args import FIXED, OWNED
from kvroute.settings.replica import ReplicaSettings
from kvroute.settings.serve import load

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

GIVEN = {
    "gpu_memory_utilization": 0.85,
    "quantization": "fp8",
    "max_num_batched_tokens": 4096,
    "enforce_eager": False,
    "kv_transfer_config": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"},
}


def complaints(**engine_args: Any) -> str:
    from kvroute.replica.vllm_engine.engine_args import problems_of

    return "; ".join(problems_of(engine_args))


def of_replica(**engine_args: Any) -> Any:
    """What vLLM is started with."""
    from kvroute.replica.vllm_engine.core.subscription import Subscription
    from kvroute.replica.vllm_engine.vllm_args import engine_args as made

    settings = ReplicaSettings(
        model="m", served_model_name="n", redis_url="", dtype="float32", engine_args=engine_args
    )
    subscription = Subscription()
    try:
        return made(settings, str(Path(__file__).parent), [subscription])  # no hub is asked
    finally:
        subscription.close()


def test_what_vllm_takes_is_not_complained_of() -> None:
    assert complaints(**GIVEN) == ""


@pytest.mark.parametrize(
    ("engine_args", "complaint"),
    [
        ({"gpu_memory_utilizaton": 0.5}, "did you mean gpu_memory_utilization"),
        ({"swap_space": 4}, "swap_space is not an engine argument of vLLM 0.3"),
        ({"_api_process_count": 4}, "not an engine argument of vLLM"),
        ({"seed": "a"}, "seed is 'a': Input should be a valid integer"),
        ({"gpu_memory_utilization": 7}, "is 7: Input should be less than or equal to 1"),
        ({"kv_cache_dtype": "fp9"}, "kv_cache_dtype is 'fp9': Input should be 'auto', "),
        ({"kv_transfer_config": {"foo": 1}}, "kv_transfer_config.foo is 1: Unexpected keyword"),
    ],
)
def test_what_vllm_does_not_take_is_told_in_its_words(
    engine_args: dict[str, Any], complaint: str
) -> None:
    assert complaint in complaints(**engine_args)


def test_the_arguments_that_a_user_may_not_give_are_vllms() -> None:
    from kvroute.replica.vllm_engine.engine_args import ENGINE, FRONT

    assert {*OWNED, *FIXED} <= ENGINE | FRONT


def test_the_arguments_of_vllms_server_are_checked_too_and_kept_apart() -> None:
    from kvroute.replica.vllm_engine.engine_args import checked, front_args

    given = {"tool_call_parser": "hermes", "max_num_batched_tokens": 4096}
    assert complaints(**given) == ""
    assert (checked(given), front_args(given)) == (
        {"max_num_batched_tokens": 4096},
        {"tool_call_parser": "hermes"},
    )
    assert "did you mean tool_call_parser" in complaints(tool_cal_parser="hermes")
    assert "enable_auto_tool_choice is 'a'" in complaints(enable_auto_tool_choice="a")


def test_the_data_types_are_vllms() -> None:
    from vllm.config.model import ModelDType

    assert set(get_args(Dtype)) == set(get_args(ModelDType))


def test_a_replica_gives_them_to_vllm_in_its_types_beside_our_own() -> None:
    args = of_replica(**GIVEN)
    assert (args.gpu_memory_utilization, args.max_num_batched_tokens) == (0.85, 4096)
    assert args.kv_transfer_config.kv_role == "kv_both"
    assert args.kv_events_config.enable_kv_cache_events
    assert (args.served_model_name, args.dtype) == ("n", "float32")


def test_a_users_argument_wins_over_our_default_for_cpus() -> None:
    args = of_replica(kv_cache_memory_bytes=1 << 20, enforce_eager=False)
    assert (args.kv_cache_memory_bytes, args.enforce_eager) == (1 << 20, False)


def test_whatever_reaches_a_replica_is_checked_there_again() -> None:
    with pytest.raises(ValueError, match="seed is 'a': Input should be a valid integer"):
        of_replica(seed="a")


def test_a_start_is_refused_before_anything_is_started() -> None:
    models = [{"model": "a"}, {"model": "b", "engine_args": {"sead": 1}}]
    with pytest.raises(StartError, match=r"--engine-args of b: sead is not .* did you mean seed"):
        check_engine_args(load({"models": models}).per_model, StartProgress())


def test_without_engine_arguments_vllm_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere")
    check_engine_args(load({}).per_model, StartProgress())
