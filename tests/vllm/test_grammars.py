"""A grammar that cannot be compiled within the limits costs nobody but its client anything."""

import threading
from typing import Any

import httpx
import pytest

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.serving import Cluster

OPTIONAL = {
    "type": "object",
    "properties": {f"property_{number}": {"type": "string"} for number in range(3000)},
    "additionalProperties": False,
    "minProperties": 1500,
}
HOSTILE: dict[str, dict[str, Any]] = {
    "schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "hostile", "schema": OPTIONAL},
        }
    },
    "regex": {"structured_outputs": {"regex": "(a|b)?" * 20_000}},
}
HELLO = {"model": BUILTIN_MODEL, "messages": [{"role": "user", "content": "Hello"}]}
URL = "/v1/chat/completions"


class Beside:
    """A stream that one client reads while another one asks for something else."""

    def __init__(self, url: str) -> None:
        self.begun, self._enough = threading.Event(), threading.Event()
        self.chunks = 0
        self.error = ""
        self._thread = threading.Thread(target=self._read, args=(url,))

    def __enter__(self) -> "Beside":
        self._thread.start()
        assert self.begun.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        self._thread.join()

    def _read(self, url: str) -> None:
        body = {**HELLO, "stream": True, "ignore_eos": True, "max_tokens": 3000}
        while not self._enough.is_set():
            with httpx.stream("POST", url, json=body, timeout=60) as answer:
                for line in answer.iter_lines():
                    self.chunks += 1
                    self.error = line if '"error"' in line else self.error
                    self.begun.set()
                    if self._enough.is_set():
                        return


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_grammar_is_refused_and_streams_go_on(cluster: Cluster, kind: str) -> None:
    """Its limit is named, each time, and no replica is lost."""
    before = {each.pid for each in cluster.titled("kvroute:Replica")}
    with Beside(cluster.url + URL) as beside:
        begun = beside.chunks
        for _ in range(2):
            refused = httpx.post(cluster.url + URL, json=HELLO | HOSTILE[kind], timeout=60)
            assert refused.status_code == 400
            assert "that is the limit" in refused.json()["error"]["message"]
        assert beside.chunks > begun
    assert beside.error == ""
    assert {each.pid for each in cluster.titled("kvroute:Replica")} == before


def test_grammars_are_obeyed(cluster: Cluster) -> None:
    """Of each backend that vLLM chooses by itself."""
    schema = {"type": "integer", "multipleOf": 3, "minimum": 3, "maximum": 9}  # guidance
    for grammar, allowed in (
        ({"choice": ["yes", "no"]}, {"yes", "no"}),
        ({"regex": "[ab]{3}"}, {f"{x}{y}{z}" for x in "ab" for y in "ab" for z in "ab"}),
        ({"json": schema}, {"3", "6", "9"}),
    ):
        body = HELLO | {"structured_outputs": grammar, "max_tokens": 16}
        answer = httpx.post(cluster.url + URL, json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] in allowed


def test_a_grammar_that_is_none_is_refused_with_the_reason(cluster: Cluster) -> None:
    body = HELLO | {"structured_outputs": {"grammar": "root ::= nothing"}}
    refused = httpx.post(cluster.url + URL, json=body, timeout=60)
    assert refused.status_code == 400
    assert "Invalid grammar" in refused.json()["error"]["message"]


def test_a_choice_for_which_the_model_has_no_token_is_the_clients_error(cluster: Cluster) -> None:
    """The built-in model's tokenizer has no byte 6. vLLM's own server fails in the middle."""
    body = HELLO | {"structured_outputs": {"choice": ["0\x06"]}}
    refused = httpx.post(cluster.url + URL, json=body, timeout=60)
    assert refused.status_code == 400
    assert "no token for the next character" in refused.json()["error"]["message"]


@pytest.mark.parametrize("wrong", [[], "json", 1])
def test_a_field_of_a_wrong_type_is_the_clients_error(cluster: Cluster, wrong: object) -> None:
    """vLLM's own server answers that it has failed."""
    refused = httpx.post(cluster.url + URL, json=HELLO | {"structured_outputs": wrong}, timeout=60)
    assert refused.status_code == 400
    assert "type" in refused.json()["error"]["message"]
