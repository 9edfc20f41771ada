"""The requests of a replay: a trace, its pace, and sessions that wait for their answers."""
