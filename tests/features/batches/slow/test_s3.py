"""Files and batches in a bucket of an S3 server that others wrote (moto)."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from obstore.store import S3Store

from kvroute.features.batches.stores.bucket import Bucket
from kvroute.local.ports import free_port
from tests.features.batches import file_stores
from tests.support.batches import assert_complete, create, is_final, questions
from tests.support.clients import openai_client
from tests.support.environments import environment
from tests.support.serving import start_cluster
from tests.support.waiting import wait_until

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}
LINES = 60


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """Start an S3 server with a bucket, and return its URL."""
    server, port = environment("s3-server").with_name("moto_server"), free_port()
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen([server, "-p", str(port)], stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: _answers(url))
        httpx.put(f"{url}/bucket").raise_for_status()
        yield url
        process.kill()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code < 500
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("behaviour", file_stores.BEHAVIOURS, ids=lambda test: test.__name__)
async def test_a_bucket_of_s3_behaves_like_a_folder(
    s3: str, tmp_path: Path, behaviour: file_stores.Behaviour
) -> None:
    store = S3Store(
        "bucket",
        prefix=tmp_path.name,
        endpoint=s3,
        access_key_id="test",
        secret_access_key="test",
        region="us-east-1",
        client_options={"allow_http": True},
    )
    await behaviour(Bucket(store, tmp_path / "local"))


def test_a_batch_runs_in_a_bucket(s3: str) -> None:
    env = {**os.environ, **CREDENTIALS, "AWS_ENDPOINT_URL": s3}
    options = ("--engine", "simulated", "--routers", "2", "--files-dir", "s3://bucket/batches")
    with start_cluster(*options, env=env) as cluster, openai_client(cluster) as client:
        model = client.models.list().data[0].id
        batch = create(client, questions(model, LINES)).id
        wait_until(lambda: is_final(client, batch))
        assert_complete(client, batch, LINES)
        names = [file.filename for file in client.files.list(purpose="batch_output")]
        assert names == [f"{batch}_output.jsonl"]
