"""The command `kvroute`, and a cluster in the foreground."""
