"""The blocks of a prompt: their fingerprints, and the groups of layers that share them."""
