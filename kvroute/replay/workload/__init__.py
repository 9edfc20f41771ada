"""The requests of a replay: the trace, its pace, and sessions whose turns wait for answers."""
