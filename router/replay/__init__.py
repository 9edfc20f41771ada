"""What a routing policy would do with a recorded trace, on modelled replicas."""
