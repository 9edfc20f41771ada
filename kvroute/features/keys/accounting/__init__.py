"""Each tenant's usage, counted in the routers and summed in Redis."""
