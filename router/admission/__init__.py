"""Which requests wait before they go to a replica, for how long, and which are refused."""
