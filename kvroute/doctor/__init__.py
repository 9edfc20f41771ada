"""Finds problems of a running cluster and their remedies, for `kvroute doctor`."""
