"""The speed and the cache of a modelled replica: named profiles, or a file with the numbers."""
