"""`kvroute weights` shows the weights of each replica, and waits for an update or says why not."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from kvroute.cli import app
from kvroute.command.changes import weights_command
from kvroute.local.running import KEY
from kvroute.weights.version import NAME, name_in, number_in

URL = "http://127.0.0.1:8000"
OLD, NEW = "step-1@17", "step-2@18"
Answer = Mapping[str, Any]


def replica(id_: str, key: str | None, problem: str | None = None) -> dict[str, Any]:
    version = None if key is None else name_in(key)
    return {"id": id_, "version": version, "key": key, "problem": problem}


def state(*replicas: Answer, key: str = NEW, model: str = "base", **more: Any) -> dict[str, Any]:
    """Return the weights of a model as the API does."""
    is_done = all(each["key"] == key for each in replicas)
    return {
        "model": model,
        "version": name_in(key),
        "key": key,
        "source": f"/srv/{name_in(key)}" if key else None,
        "created": 1795896000 if key else None,
        "state": "ready" if is_done else "updating",
        "failed": None,
        "replicas": replicas,
        **more,
    }


BEGUN = state(replica("a", OLD), replica("b", OLD))
DONE = state(replica("a", NEW), replica("b", NEW))
FAILURE = {
    "version": "step-2",
    "key": NEW,
    "source": "/srv/step-2",
    "created": 1795896000,
    "problem": "it lacks 1 tensor: w",
}


class Api:
    """Answers POST with `begun`, and one GET after the other with the states."""

    def __init__(self, begun: Answer, states: Iterable[Answer], status: int) -> None:
        self.requests: list[tuple[str, str, Mapping[str, Any]]] = []
        self._begun, self._states, self._status = begun, iter(states), status

    def __call__(self, method: str, url: str, **sent: Any) -> httpx.Response:
        self.requests.append((method, url.removeprefix(URL), sent))
        content = {"data": [next(self._states)]} if method == "GET" else self._begun
        status = 200 if method == "GET" else self._status
        request = httpx.Request(method, url)
        return httpx.Response(status, content=json.dumps(content), request=request)

    @property
    def body(self) -> Answer:
        """The body of the only POST."""
        (sent,) = (sent for method, _, sent in self.requests if method == "POST")
        return dict(sent["json"])


Serve = Callable[..., Api]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Return a function that lets the commands talk to an API with these answers."""
    monkeypatch.setattr(weights_command, "POLL_S", 0.0)

    def serve(*states: Answer, begun: Answer = BEGUN, status: int = 202) -> Api:
        api = Api(begun, states, status)
        monkeypatch.setattr("kvroute.client.httpx.request", api)
        return api

    return serve


def run(*words: str, **env: str) -> Result:
    env = {"COLUMNS": "80", "KVROUTE_URL": URL, **env}
    result = CliRunner().invoke(app, ["weights", *words], env=env)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def output(result: Result, exit_code: int = 0) -> str:
    """Return the output, with each break of a line as a space."""
    assert result.exit_code == exit_code, result.output
    return " ".join(result.output.split())


# Keys of updates.


@given(st.from_regex(NAME, fullmatch=True), st.integers(0, 10**18 - 1))
def test_a_key_has_the_name_and_the_number_of_its_update(name: str, number: int) -> None:
    key = f"{name}@{number}"
    assert (name_in(key), number_in(key)) == (name, number)


def test_the_key_of_the_start_comes_before_all_others() -> None:
    assert (name_in(""), number_in("")) == ("", 0)


# kvroute weights show.


def test_the_weights_and_what_each_replica_does_are_shown(serve: Serve) -> None:
    behind = (replica("b", None), replica("c", OLD), replica("d", "", "it is not a folder"))
    serve(state(replica("a", NEW), *behind))
    shown = run("show").output
    assert max(map(len, shown.splitlines())) <= 80
    lines = [line.rstrip().split(maxsplit=2) for line in shown.splitlines() if line]
    assert lines[:6] == [
        ["model", "base"],
        ["weights", "step-2"],
        ["folder", "/srv/step-2"],
        ["key", NEW],
        ["updated", "2026-11-28", "20:00 UTC"],
        ["state", "updating:", "loaded by 1 of 4 replicas"],
    ]
    assert lines[6:10] == [
        ["replica", "weights", "progress"],
        ["a", "step-2", "has them"],
        ["b", "?", "finishes its requests, or loads"],
        ["c", "step-1", "waits for its turn"],
    ]
    assert "cannot load step-2, and tries again: it is not a folder" in " ".join(shown.split())


def test_the_weights_of_the_start_have_no_folder_and_a_failed_update_its_reason(
    serve: Serve,
) -> None:
    serve(state(replica("a", ""), key="", failed=FAILURE))
    shown = output(run("show"))
    assert "weights of the start state ready: loaded by 1 of 1 replica" in shown
    assert "FAILED step-2 in /srv/step-2, on 2026-11-28 20:00 UTC: it lacks 1 tensor: w" in shown
    assert "folder" not in shown


def test_only_the_named_model_is_asked_for_with_the_users_key(serve: Serve) -> None:
    api = serve(DONE)
    run("show", "--model", "base", **{KEY: "kv-secret"})
    ((method, path, sent),) = api.requests
    assert (method, path, sent["params"]) == ("GET", "/v1/weights", {"model": "base"})
    assert sent["headers"] == {"authorization": "Bearer kv-secret"}


# kvroute weights update.


def test_an_update_ends_when_every_replica_has_the_weights(serve: Serve) -> None:
    api = serve(BEGUN, state(replica("a", NEW), replica("b", None)), DONE)
    shown = output(run("update", "step-2", "--version", "v2", "--at-once", "2"))
    fields = {"source": "step-2", "version": "v2", "at_once": 2}
    assert api.body == fields | {"wait": False}
    for line in ("loaded by 0 of 2 replicas", "loaded by 1 of 2 replicas"):
        assert shown.count(line) == 1
    assert shown.endswith("step-2: loaded by 2 replicas")


def test_a_folder_that_is_here_is_sent_with_its_whole_path(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step-2").mkdir()
    api = serve(DONE)
    run("update", "step-2")
    assert api.body["source"] == str(tmp_path / "step-2")


def test_without_waiting_nothing_is_asked_after_the_update_has_begun(serve: Serve) -> None:
    api = serve()
    shown = output(run("update", "step-2", "--no-wait", "--model", "base"))
    assert [method for method, *_ in api.requests] == ["POST"]
    assert api.body["model"] == "base"
    assert "step-2: the update has begun; kvroute weights show says how far it is" in shown


def test_refused_weights_end_the_command_with_the_reason(serve: Serve) -> None:
    message = 'source is "gone": it is not a folder. The old weights go on serving'
    serve(begun={"error": {"message": message, "code": "invalid_value"}}, status=400)
    assert 'FOLDER is "gone": it is not a folder. The old' in output(run("update", "gone"), 1)
    serve(begun={"error": {"message": "at_once is 0; expected more"}}, status=400)
    assert "--at-once is 0; expected more" in output(run("update", "x", "--at-once", "0"), 1)


def test_weights_that_the_first_replica_cannot_load_are_a_failure(serve: Serve) -> None:
    serve(BEGUN, state(replica("a", OLD), replica("b", OLD), key=OLD, failed=FAILURE))
    shown = output(run("update", "step-2"), 1)
    assert shown.endswith("step-2: it lacks 1 tensor: w. The old weights go on serving")


def test_a_replica_that_cannot_load_is_a_failure_when_no_other_one_goes_on(serve: Serve) -> None:
    lost = replica("b", OLD, "it is not a folder on the replica's machine")
    goes_on = state(replica("a", NEW), lost, replica("c", None))
    stuck = state(replica("a", NEW), lost, replica("c", NEW))
    api = serve(goes_on, stuck)
    shown = output(run("update", "step-2"), 1)
    assert len(api.requests) == 3
    assert "step-2: loaded by 2 of 3 replicas; replica b cannot load it" in shown
    assert shown.endswith("tries again: it is not a folder on the replica's machine")


def test_an_answer_of_a_router_that_knows_only_the_old_weights_is_waited_out(serve: Serve) -> None:
    earlier = FAILURE | {"key": "step-2@16"}  # an update of this name has failed before
    late = state(replica("a", OLD), replica("b", OLD), key=OLD, failed=earlier)
    serve(late, DONE)
    assert output(run("update", "step-2")).endswith("loaded by 2 replicas")


def test_an_update_that_another_one_has_replaced_is_a_failure(serve: Serve) -> None:
    newer = "step-3@19"
    serve(state(replica("a", newer), replica("b", newer), key=newer))
    shown = output(run("update", "step-2"), 1)
    assert shown.endswith("another update has replaced these weights by step-3")


def test_an_interrupted_command_says_that_the_update_goes_on(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    serve(BEGUN)
    monkeypatch.setattr("kvroute.command.changes.weights_command.time.sleep", interrupt)
    assert output(run("update", "step-2"), 1).endswith("stopped waiting; the update goes on")
