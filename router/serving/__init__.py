"""The parts of a router that serve one model, and the models that a router serves."""
