"""What is wrong with a running cluster, and what to do about it."""
