"""Dispatch: sends a prompt to a replica and streams the response.

If the replica is lost, another replica continues the response.
"""
