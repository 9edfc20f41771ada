"""Named prefixes, and hot prefixes without a name."""
