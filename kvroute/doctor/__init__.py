"""Checks a running cluster for problems and suggests remedies, for `kvroute doctor`."""
