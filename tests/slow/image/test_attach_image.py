"""The image of deploy/attach has no Ray, and serves in front of a server outside."""

import json

import httpx
import pytest

from kvroute.process.builtin_model import BUILTIN_MODEL, resolve
from tests.support.containers import ContainerNetwork
from tests.support.gated_server import gated_server
from tests.support.images import Images
from tests.support.scripted_model import NAME

pytestmark = pytest.mark.timeout(1800)
ATTACH_IMAGE = "localhost/kvroute-attach"
MAX_MB = 400  # of its own layers; a compressed image, as registries have it, is a third
MODEL = "/model"  # where the container has the model's tokenizer


def test_it_serves_without_a_cluster(images: Images, network: ContainerNetwork) -> None:
    base = images.build_debian("python3-venv")
    images.build_kvroute("deploy/attach/Dockerfile", base=base, tag=ATTACH_IMAGE)
    sizes = [json.loads(images.run("image", "inspect", each))[0] for each in (ATTACH_IMAGE, base)]
    own_mb = (sizes[0]["Size"] - sizes[1]["Size"]) / 1e6
    print(f"{own_mb:.0f} MB above the base image")
    assert own_mb < MAX_MB
    with gated_server(f"{network.prefix}1") as server:
        server.ends.set()
        container = network.start(
            ATTACH_IMAGE,
            *("--volume", f"{resolve(BUILTIN_MODEL)}:{MODEL}:ro", "--read-only"),
            *("--tmpfs", "/home/kvroute:mode=1777", "--volume", "/state"),
            command=(server.url, "--insecure", "--model", MODEL, "--state-dir", "/state"),
        )
        container.wait_for_health()
        body = {"model": NAME, "input": "Work.", "stream": True}
        answer = httpx.post(f"{container.url}/v1/responses", json=body, timeout=60)
        assert "response.completed" in answer.text
        for package in ("ray", "torch", "vllm"):
            assert container.execute("python3", "-c", f"import {package}").returncode == 1
        assert container.stop(60) == 0
