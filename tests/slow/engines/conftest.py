"""Tests of vLLM engines without a cluster, and of what surrounds an engine."""

from tests.support.unmerged import unmerged

__all__ = ["unmerged"]  # a fixture
