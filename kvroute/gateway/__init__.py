"""`kvroute attach`: a router and the agents of all attached servers in one process, without Ray."""
