"""What each tenant uses, counted in a router and added up in Redis."""
