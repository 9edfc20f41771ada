"""How fast a modelled replica is: named profiles, or a file with the same numbers."""
