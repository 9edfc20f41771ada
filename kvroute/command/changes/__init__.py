"""The commands that change what a running cluster serves, and to whom."""
