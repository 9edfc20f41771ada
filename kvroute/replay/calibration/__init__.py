"""How fast a modelled replica is: named profiles, and a fit to a running cluster."""
