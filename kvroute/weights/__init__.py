"""Weights that a model gets while the cluster runs: their versions and their files."""
