"""Tests of one shared simulated cluster."""

import pytest

from tests.support.serving import Cluster


@pytest.fixture(scope="session")
def cluster(simulated_cluster: Cluster) -> Cluster:
    """Return the cluster that the tests of this folder talk to."""
    return simulated_cluster
