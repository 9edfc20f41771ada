"""The routing policies that a replay compares: kvroute, and models of other routers."""
