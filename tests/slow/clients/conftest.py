"""Client libraries, which call the vLLM cluster of tests/vllm."""

import pytest

from tests.support.serving import Cluster


@pytest.fixture
def cluster(vllm_cluster: Cluster) -> Cluster:
    """Return the cluster that the tests of this folder talk to."""
    return vllm_cluster
