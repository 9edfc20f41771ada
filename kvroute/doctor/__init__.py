"""`kvroute doctor` finds the problems of a running cluster and their remedies."""
