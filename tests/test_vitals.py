"""A slow engine lives; one that is stopped or stuck does not."""

from replica.vitals import STOPPED_LOOKS, STUCK_LOOKS, Vitals


def test_an_engine_that_steps_lives_however_slowly() -> None:
    vitals = Vitals()
    looks = [n // (STUCK_LOOKS - 1) for n in range(10 * STUCK_LOOKS)]
    assert not any(vitals.look(is_stopped=False, has_work=True, steps=n) for n in looks)


def test_an_engine_without_work_makes_no_steps_and_lives() -> None:
    vitals = Vitals()
    for _ in range(2 * STUCK_LOOKS):
        assert vitals.look(is_stopped=False, has_work=False, steps=7) is None


def test_a_step_that_does_not_end_is_its_last() -> None:
    vitals = Vitals(steps=7)
    found = [vitals.look(is_stopped=False, has_work=True, steps=7) for _ in range(STUCK_LOOKS)]
    assert found[-2] is None
    assert found[-1] == "its step does not end"


def test_a_pause_is_forgiven_and_a_stop_is_not() -> None:
    vitals = Vitals()
    pause = [True] * (STOPPED_LOOKS - 1) + [False]
    assert not any(vitals.look(is_stopped=each, has_work=True, steps=1) for each in pause)
    found = [vitals.look(is_stopped=True, has_work=True, steps=1) for _ in range(STOPPED_LOOKS)]
    assert found[-1] == "its process is stopped"
