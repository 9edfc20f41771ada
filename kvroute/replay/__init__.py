"""A trace on modelled replicas, under any policy."""
