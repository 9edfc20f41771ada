"""The commands of `kvroute`."""
