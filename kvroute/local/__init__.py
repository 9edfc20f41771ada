"""`kvroute serve` runs a cluster on this computer until a signal stops it."""
