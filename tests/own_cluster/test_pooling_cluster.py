"""A real cluster with an embedding model."""

from collections.abc import Iterator

import httpx
import pytest
from openai import NotFoundError, OpenAI

from tests.support.bodies import CHATS
from tests.support.engines import WIDTH, shallow_model
from tests.support.serving import Cluster, start_cluster

ARGS = ("--engine-arg", "runner=pooling", "--engine-arg", "convert=embed")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = shallow_model(tmp_path_factory.mktemp("pooling") / "model")
    options = ("--model", str(model), "--served-model-name", "m", "--max-model-len", "8192")
    with start_cluster(*options, "--replicas", "1", *ARGS, deadline_s=250) as cluster:
        yield cluster


def test_openais_client_gets_embeddings_and_no_chats(cluster: Cluster) -> None:
    with OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        answer = client.embeddings.create(model="m", input=["hi", "ho"])
        assert [len(each.embedding) for each in answer.data] == [WIDTH, WIDTH]
        assert answer.usage.prompt_tokens == 2
        with pytest.raises(NotFoundError):
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])


def test_an_answer_has_the_id_of_its_request(cluster: Cluster) -> None:
    body, headers = {"model": "m", "input": "hi"}, {"x-request-id": "mine"}
    answer = httpx.post(f"{cluster.url}/v1/embeddings", json=body, headers=headers, timeout=60)
    assert answer.json()["id"] == "embd-mine"


def test_a_text_may_have_many_token_ids(cluster: Cluster) -> None:
    body = {"model": "m", "input": [1] * 5000}
    answer = httpx.post(f"{cluster.url}/v1/embeddings", json=body, timeout=60)
    assert answer.json()["usage"]["prompt_tokens"] == 5000


def test_another_model_or_route_is_not_found(cluster: Cluster) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    for path, fields in ((CHATS, body), ("/classify", {"input": "hi"})):
        assert httpx.post(f"{cluster.url}{path}", json=fields, timeout=60).status_code == 404
