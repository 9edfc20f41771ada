"""A slow engine is alive; a stopped or stuck engine is declared dead."""

from kvroute.replica.vllm_engine.process.engine_health import (
    STOPPED_CHECKS,
    STUCK_CHECKS,
    EngineHealth,
)


def test_an_engine_with_slow_steps_is_alive() -> None:
    engine_health = EngineHealth()
    looks = [n // (STUCK_CHECKS - 1) for n in range(10 * STUCK_CHECKS)]
    assert not any(engine_health.check(is_stopped=False, has_work=True, steps=n) for n in looks)


def test_an_engine_without_work_is_alive_without_steps() -> None:
    engine_health = EngineHealth()
    for _ in range(2 * STUCK_CHECKS):
        assert engine_health.check(is_stopped=False, has_work=False, steps=7) is None


def test_an_engine_whose_step_does_not_end_is_dead() -> None:
    engine_health = EngineHealth(steps=7)
    found = [
        engine_health.check(is_stopped=False, has_work=True, steps=7) for _ in range(STUCK_CHECKS)
    ]
    assert found[-2] is None
    assert found[-1] == "its step does not end"


def test_a_short_pause_is_accepted_and_a_stop_is_not() -> None:
    engine_health = EngineHealth()
    pause = [True] * (STOPPED_CHECKS - 1) + [False]
    assert not any(engine_health.check(is_stopped=each, has_work=True, steps=1) for each in pause)
    found = [
        engine_health.check(is_stopped=True, has_work=True, steps=1) for _ in range(STOPPED_CHECKS)
    ]
    assert found[-1] == "its process is stopped"
