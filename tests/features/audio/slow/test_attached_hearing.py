"""A cluster in front of vLLM's own server with a model for speech: both give the same answers."""

from collections.abc import Iterator

import httpx
import pytest

from tests.support.attached import NAME, AttachableServer, attachable_servers
from tests.support.serving import Cluster, start_cluster
from tests.support.tiny_audio import POSITIONS, form, hearing_model
from tests.support.transcriptions import FORMS, SHORT, SOUNDS, TRANSCRIPTIONS, Fields, plain

pytest.importorskip("soundfile", reason="vLLM reads recordings with the package soundfile")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttachableServer]:
    model = hearing_model(tmp_path_factory.mktemp("hearing"))
    options = ("--max-model-len", str(POSITIONS))
    folder = tmp_path_factory.mktemp("logs")
    with attachable_servers(model, folder, count=1, options=options) as (server,):
        yield server


@pytest.fixture(scope="module")
def cluster(server: AttachableServer) -> Iterator[Cluster]:
    with start_cluster("--attach", server.url) as cluster:
        yield cluster


def posted(url: str, fields: Fields, file: bytes) -> httpx.Response:
    body, content_type = form({"model": NAME, **fields}, file)
    headers = {"content-type": content_type}
    return httpx.post(f"{url}{TRANSCRIPTIONS}", content=body, headers=headers, timeout=120)


@pytest.mark.parametrize("name", SOUNDS)
def test_answers_equal_the_servers_own(
    cluster: Cluster, server: AttachableServer, name: str
) -> None:
    for fields in FORMS if name == "short" else [SHORT, {**SHORT, "stream": "true"}]:
        ours, theirs = (posted(each.url, fields, SOUNDS[name]) for each in (cluster, server))
        assert ours.status_code == theirs.status_code, fields
        if theirs.status_code == 200:  # errors have kvroute's types and codes
            assert plain(ours.content) == plain(theirs.content), fields
            assert ours.headers["content-type"] == theirs.headers["content-type"]
