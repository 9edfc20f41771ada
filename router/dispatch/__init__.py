"""A prompt becomes one stream of chunks; if a replica is lost, another one continues."""
