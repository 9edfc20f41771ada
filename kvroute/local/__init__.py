"""Runs a whole cluster on one computer, for `kvroute serve`."""
