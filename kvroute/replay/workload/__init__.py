"""The requests of a replay: the trace, its pace, and sessions that wait for their answers."""
