"""The routing policies that a replay compares."""
