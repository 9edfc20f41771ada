"""The items of inputs and outputs that clients send and get in a form that no replica knows."""
