"""A prompt's blocks: their fingerprints, and which groups of layers share them."""
